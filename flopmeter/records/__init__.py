"""The records that flow from stage to stage: TensorSpec, Call and Op, then Cost and Kernel, then Timing.

They are frozen, run no op and know no rule, so any stage can be printed and tested alone.
A `Call` and its `Cost` are shared by every op of the same geometry: a trace of a hundred equal layers
holds the facts of one.
"""

from flopmeter.records.costs import (
    ATTENTION,
    COMMUNICATION,
    CONTRACTION,
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    OP_CLASSES,
    RANDOM,
    REDUCTION,
    SORTING,
    UNCOUNTED,
    Access,
    AttentionBackend,
    Collective,
    CollectiveKind,
    Convolution,
    Cost,
    Matmul,
    Recurrence,
    Region,
    Reread,
    Switches,
    Tf32Switch,
)
from flopmeter.records.launches import (
    Kernel,
    Launches,
    LaunchMode,
    Placement,
)
from flopmeter.records.ops import (
    Call,
    Op,
    Phase,
    RankGroup,
)
from flopmeter.records.tensors import (
    TensorSpec,
)
from flopmeter.records.timings import (
    Clock,
    Clocks,
    Regime,
    Timing,
)
from flopmeter.records.traces import (
    BEFORE,
    DEFAULT_STREAM,
    Accumulation,
    Resize,
    Storage,
    StorageRole,
    StreamUse,
    Sync,
    Trace,
)

__all__ = [
    "TensorSpec",
    "Call",
    "RankGroup",
    "Op",
    "Phase",
    "CONTRACTION",
    "NORMALIZATION",
    "ELEMENTWISE",
    "ATTENTION",
    "REDUCTION",
    "MOVEMENT",
    "INDEXING",
    "RANDOM",
    "SORTING",
    "COMMUNICATION",
    "UNCOUNTED",
    "OP_CLASSES",
    "Access",
    "AttentionBackend",
    "Collective",
    "CollectiveKind",
    "Convolution",
    "Cost",
    "Matmul",
    "Recurrence",
    "Region",
    "Reread",
    "Switches",
    "Tf32Switch",
    "BEFORE",
    "DEFAULT_STREAM",
    "Accumulation",
    "StreamUse",
    "Resize",
    "Storage",
    "StorageRole",
    "Sync",
    "Trace",
    "Kernel",
    "LaunchMode",
    "Launches",
    "Placement",
    "Clock",
    "Clocks",
    "Regime",
    "Timing",
]
