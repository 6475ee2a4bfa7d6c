"""Rules of ops that mostly move data: copies, indexing, random numbers, sorting, collectives, sparse gradients."""

import torch

from flopmeter.costs.data_movement import (  # noqa: F401  (they fill RULES)
    concatenation,
    indexing,
    movement,
    sorting,
    table_gradients,
)

if torch.distributed.is_available():  # else torch has no collectives
    from flopmeter.costs.data_movement import communication  # noqa: F401
