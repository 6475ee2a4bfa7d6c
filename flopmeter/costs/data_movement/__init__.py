"""Rules of ops that mostly move data: copies, indexing, random numbers, sorting, collectives, sparse gradients."""

import torch

# They fill RULES.
from flopmeter.costs.data_movement import concatenation, indexing, movement, sorting, table_gradients  # noqa: F401

if torch.distributed.is_available():  # else torch has no collectives
    from flopmeter.costs.data_movement import communication  # noqa: F401
