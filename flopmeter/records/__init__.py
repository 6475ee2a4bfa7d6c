"""The records that flow from stage to stage: TensorSpec, Call and Op, then Cost and Kernel, then Timing.

They are frozen, run no op and know no rule, so any stage can be printed and tested alone.
A `Call` and its `Cost` are shared by every op of the same geometry: a trace of a hundred equal layers
holds the facts of one.
"""

from flopmeter.records.bodies import BlockCount, BodyOp, FlexBody, TritonBody, TritonOp
from flopmeter.records.collectives import CollectiveKind
from flopmeter.records.compiled import Compilation, CompiledGraph, CompiledKernel, GraphBreak, Origin
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
    Cost,
    Region,
    Switches,
)
from flopmeter.records.launches import Kernel, Launches, LaunchMode, Life, Nodes, Placement
from flopmeter.records.ops import Call, Op, OpsBody, Phase, RankGroup
from flopmeter.records.tensors import TensorSpec
from flopmeter.records.timings import UNKNOWN_POWER, Clocks, Regime, RunClock, Timing
from flopmeter.records.traces import (
    BEFORE,
    DEFAULT_STREAM,
    OF_WEIGHTS,
    Accumulation,
    BackwardPass,
    ForwardEnd,
    OptimizerStep,
    Padding,
    Resize,
    Storage,
    StorageRole,
    StreamUse,
    Sync,
    TemplateRun,
    Trace,
)
from flopmeter.records.work import (
    Atomics,
    AttentionBackend,
    AttentionShape,
    AttentionWork,
    BlockTime,
    Collective,
    Convolution,
    ConvolutionWork,
    FormulaWork,
    GridLoop,
    GroupedMatmulWork,
    HostCopy,
    KernelWork,
    Mask,
    Matmul,
    MatmulWork,
    MatrixWork,
    Planes,
    Recurrence,
    RecurrentWork,
    Registers,
    Reread,
    Scatter,
    ThreadGrid,
    UnpackingMatmulWork,
    VectorWork,
    matmuls_of,
)
