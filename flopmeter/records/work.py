"""What the time model of each sort of kernel needs besides FLOPs and bytes: one record for each sort.

A record has no defaults for what decides its time, so that mypy finds a fact that a rule forgot.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from flopmeter.records.collectives import CollectiveKind

AttentionBackend = Literal["flash", "flash_3", "efficient", "cudnn", "flex", "flex_decoding", "paged", "other"]
"""`flex_decoding`: the template for few queries in a compiled graph, of which other kernels combine the parts. `paged`:
what servers run over a paged cache where FlashAttention-2 is the newest."""


Computed = Literal["output", "input gradient", "filter gradient"]

# --- parts of the records below -------------------------------------------------------------------------------------


class Matmul(NamedTuple):
    """`batch` independent matmuls [m, k] @ [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        return self.batch * self.m * self.n * self.k


class Planes(NamedTuple):
    """Images, or filters: how many there are, their channels, and their positions."""

    images: int
    channels: int
    positions: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.images * self.channels * self.positions


class Convolution(NamedTuple):
    """The shape of a convolution, besides its implicit GEMM (a Matmul whose batch is the number of groups)."""

    channels: int  # of the input that each filter sees: input channels over groups
    kernel: tuple[int, ...]
    positions: tuple[int, ...]  # spatial size of what is computed; () for a gradient of the filters
    is_dense: bool  # stride and dilation 1, not transposed
    channels_last: bool = False  # the channels of a position are contiguous: matrix units need no copy
    computes: Computed = "output"
    tensors: tuple[Planes, ...] = ()  # that the kernel reads and, last, the one that it writes


class Recurrence(NamedTuple):
    """Steps that run one after another. `matmuls` are those of one step: one per layer and direction.
    `keeps_weights`: on which devices one kernel runs all steps, with the weights on the chip: everywhere where a thread
    block holds all units. Elsewhere a step is a matmul and a kernel for the gates."""

    steps: int
    matmuls: tuple[Matmul, ...]
    keeps_weights: Literal["everywhere", "on large devices", "nowhere"]
    is_backward: bool = False

    @property
    def layer_steps(self) -> int:
        """Steps of all layers and directions."""
        return self.steps * len(self.matmuls)


class Mask(NamedTuple):
    """Query i sees the keys from i + shift - left to i + shift + right; None: as far as there are keys."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False  # shift is keys - queries, so that the last query sees the last key; else 0


class AttentionShape(NamedTuple):
    """What fused attention works on: squares of queries x keys, one for each sequence and head of queries."""

    sequences: int
    heads: int  # of queries
    key_heads: int  # heads / key_heads heads of queries share one head of keys and values
    queries: int  # of one sequence, the most if they differ
    keys: int
    head_dim: int  # of q and k
    value_dim: int  # of v and the output
    mask: Mask = Mask()
    is_backward: bool = False
    is_packed: bool = False  # sequences of any length lie one after another in one tensor
    lengths: tuple[tuple[int, int, int], ...] = ()  # the sizes of packed ones, if they are known and not all alike

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """For each size of sequence: how many there are of it, and the queries and keys of one."""
        return self.lengths or ((self.sequences, self.queries, self.keys),)

    @property
    def all_queries(self) -> int:
        """Queries of all sequences."""
        return sum(count * queries for count, queries, _ in self.sizes)

    @property
    def scores(self) -> int:
        """Pairs of a query and a key, of all sequences and heads, masked or not."""
        return self.heads * sum(count * queries * keys for count, queries, keys in self.sizes)

    @property
    def all_keys(self) -> int:
        """Keys of all sequences."""
        return sum(count * keys for count, _, keys in self.sizes)


class BlockTime(NamedTuple):
    """How long a block with one row stays on an SM of NVIDIA, in clock cycles."""

    alone: int  # with no others on the SM, without its accesses to memory; its threads do one thing after another
    among_others: int  # on a full SM, until the next is in its place, without operations on elements


Registers = tuple[tuple[int, int], ...]
"""Of a thread, by the compute capability that its kernel is compiled for, times ten, in order: an SM of NVIDIA holds no
more threads than it has registers for. (): few enough for all that it would hold."""


class Reread(NamedTuple):
    """How a kernel with a block of threads for each row works, and what it reads a second time. Whether a second read
    hits the L2 cache depends on the device: all rows that its SMs work on at a time, with `threads` threads each, share
    the cache. A kernel of its own reads after others have gone through all of it.
    """

    nbytes: int  # of second reads; 0 if a row stays in registers
    rows: int
    row_bytes: int
    threads: int  # that work on one row
    operations: int = 0  # operations by which each of these threads combines its partial result with those of others
    accesses: int = 0  # memory accesses of each of these threads, one after another; 0: not known to bound it
    amd_threads: int = 0  # the same on AMD, whose warps have 64 threads, if it differs there
    is_kernel: bool = False  # a kernel of its own, next to the one that reads and writes the rest
    element_operations: int = 0  # of each thread on its elements, of every kind: loads, addresses, functions, casts
    block: BlockTime | None = None  # if it is known; `element_operations` are then of NVIDIA's, `operations` of others'
    registers: Registers = ()
    in_turns: bool = False  # all threads of a block load, wait for what they loaded, and compute, and begin anew


# --- kernels that multiply matrices. `macs` are multiply-adds; one of complex numbers counts as four. ---------------


class MatmulWork(NamedTuple):
    """Matmuls that one kernel runs one after another."""

    matmuls: tuple[Matmul, ...]
    macs: int
    alignment_bytes: int  # of the rows of the operands: the largest power of two, at most 16
    may_pad: bool = False  # inductor copies unaligned operands to aligned rows where that pays
    unpacks_weights: bool = False  # by a server's kernel, from fewer bits than it multiplies
    across_depth: bool = False  # neighbours in memory lie across the depth in both operands, as in gradients of weights


class GroupedMatmulWork(NamedTuple):
    """Matmuls of groups, such as the tokens of each expert, side by side in one kernel (launch/grouped_matmul.py). Rows
    are multiples of 16 bytes: torch accepts no others."""

    matmuls: tuple[Matmul, ...]
    macs: int
    unpacks_weights: bool = False


class UnpackingMatmulWork(NamedTuple):
    """A matmul whose kernel converts narrow weights between its loads and its multiply-adds."""

    matmul: Matmul
    macs: int
    bits: Literal[4, 8]  # of a weight


class RecurrentWork(NamedTuple):
    """All layers and steps of a recurrent network in one call of a library."""

    matmuls: tuple[Matmul, ...]
    macs: int
    alignment_bytes: int
    recurrence: Recurrence


class ConvolutionWork(NamedTuple):
    """A convolution, or one of its gradients."""

    implicit: Matmul
    macs: int
    shape: Convolution


class AttentionWork(NamedTuple):
    """Fused attention."""

    backend: AttentionBackend  # whose kernel it is
    shape: AttentionShape
    macs: int
    masked_flops: int  # of a causal or windowed mask: counted, but skipped by the kernel
    recomputed_flops: int  # that the kernel computes a second time (flash backward's fifth matmul)
    score_flops: int = 0  # of flex_attention's score_mod on one score, in all passes over it
    score_functions: int = 0  # how many of them are exp, tanh and the like
    adds_bias: bool = False  # or a mask, which lies in memory
    drops: bool = False  # scores, by dropout


class FormulaWork(NamedTuple):
    """Multiply-adds of matmuls whose shapes nobody gave: the program registered a formula for the FLOPs alone."""

    macs: int


MatrixWork = (
    MatmulWork | GroupedMatmulWork | UnpackingMatmulWork | RecurrentWork | ConvolutionWork | AttentionWork | FormulaWork
)


# --- all other kernels ----------------------------------------------------------------------------------------------


class GridLoop(NamedTuple):
    """A row of blocks for each of several inputs, each row as long as the longest input needs, but with no more blocks
    than an SM is to hold: these take the input in turns (a 'grid-stride loop')."""

    rows: int
    longest: int  # blocks that the longest input would take without the limit
    blocks_per_sm: int  # of a row


class ThreadGrid(NamedTuple):
    """Thread blocks whose threads walk over their inputs, each step an access to memory that waits for the one before.

    How many blocks share the inputs of a result may depend on the device: `blocks` and `steps` are then those of one
    block for all of them, and `joiners` says how one block adds up the parts of the others.
    """

    blocks: int
    threads: int  # of a block
    steps: int  # inputs of a thread
    at_a_time: int = 1  # how many of them it asks for before it waits
    cycles: int = 0  # between two of its steps, in which it waits for what others of its block compute
    operations: int = 0  # integer instructions of a thread
    joiners: int = 0  # threads that add up the parts of one result; 0: the inputs of a result stay in one block
    registers: int = 0  # of a thread, on NVIDIA's; 0: few enough that an SM holds as many threads as it can
    chains: int = 1  # of instructions of a thread that do not wait for each other, such as those of several elements
    by_element: bool = False  # an element-wise kernel; its first access is that of the kernel, which is priced apart
    in_turns: bool = False  # few threads load, compute and store in turns, and hide little of each other's waiting
    launches: int = 1  # one after another, with so many blocks each
    loop: GridLoop | None = None  # if no more blocks start than an SM is to hold; `blocks` is what would do without


class Scatter(NamedTuple):
    """What warps ask caches for in addition because neighbouring threads take elements that lie far apart."""

    lookups: int = 0  # of lines, in an SM's first-level cache
    requests: int = 0  # of these to the second level, if the first keeps what a block has touched
    block_lines: int = 0  # that a block touches


class Atomics(NamedTuple):
    """What threads add to elements that others add to as well, which the L2 cache does."""

    rounds: int = 0  # additions to a sector, each by as many threads as name different words of it
    returned: int = 0  # instructions of warps that wait for what was there before


class VectorWork(NamedTuple):
    """Memory traffic, and arithmetic on vector units."""

    rereads: tuple[Reread, ...] = ()
    index_operations: int = 0  # integer ones: for the addresses of operands with different strides, for random numbers
    grid: ThreadGrid | None = None  # if the steps or the number of its threads may bound the kernel
    scatter: Scatter = Scatter()
    kernels: int = 1  # that the op launches one after another, where the further ones do little but start and end
    random_numbers: int = 0  # that threads draw; their integer operations are among those above
    instructions: int = 0  # of all threads, where these may bound the kernel
    reduces: bool = False  # in a compiled kernel, so that these wait for steps of a loop and for each other's results
    atomics: Atomics = Atomics()


class HostCopy(NamedTuple):
    """A copy between host and device, over their link."""

    link_bytes: int
    is_staged: bool = False  # a thread of the host copies to or from a page-locked buffer, since the memory is not


class Collective(NamedTuple):
    """What a group of ranks does together. Its price depends on how they are linked (device/cluster.py)."""

    kind: CollectiveKind
    nbytes: int  # of the whole tensor: after a gather, before a reduce-scatter or a scatter, as in nccl-tests
    ranks: tuple[int, ...]  # global ranks of the group, this rank's included
    gpus_per_node: int | None = None  # of the world; None: as many as the cluster has
    adds_in_switch: bool = True  # False: the switch cannot add numbers of this type


KernelWork = MatrixWork | VectorWork | HostCopy | Collective


def matmuls_of(work: KernelWork) -> tuple[Matmul, ...]:
    """The matmuls that a library runs, also the implicit one of a convolution, but not those of fused attention, which
    has tiles of its own."""
    match work:
        case MatmulWork() | GroupedMatmulWork() | RecurrentWork():
            return work.matmuls
        case ConvolutionWork():
            return (work.implicit,)
    return ()
