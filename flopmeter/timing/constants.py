"""Every constant of the time model: its unit, its meaning, its source.

Figures of one device (peaks, achieved fractions, clocks, caches) are in that device's profile. The constants here hold
for all devices. Each was set on several GPUs; one that was fitted says on which.
Sources used more than once:

[NeuSight] 18 thousand measured fp32 operators on P4, P100, V100, T4 and A100 (Lee et al., ASPLOS 2025,
    github.com/sitar-lab/NeuSight, torch 2.1).
[vidur] 2,240 operators of transformer layers in fp16 on A100 SXM and A40 (github.com/microsoft/vidur, torch 2.1).
[timm] eager and compiled inference of 1,242 image models, AMP, on RTX 3090 and 4090
    (github.com/huggingface/pytorch-image-models, results/, torch 2.4).
[aiconfigurator] bf16 GEMMs on A100, H100, H200 and L40S (github.com/ai-dynamo/aiconfigurator@095f58a).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flopmeter.records import Access

# Clock in Hz where a profile names none.
DEFAULT_CLOCK_HZ = 1.5e9

# --- arithmetic --------------------------------------------------------------------------------------------

# Share of the vector peak. Vendors count a fused multiply-add as two operations. An addition, a multiply or
# an exp does one operation in the same time, so it reaches at most half the peak: 9.75 of an A100's 19.5 TFLOP/s
# (Horace He, 'Making Deep Learning Go Brrrr From First Principles', 2022).
PLAIN_ARITHMETIC_SHARE = 0.5

# Instructions of exp, erf, tanh or a logarithm in an element-wise kernel, with what goes with it: reduction of the
# argument, a polynomial or the special function unit, a division, and conversions of fp16. Set on GELU in fp16 on an
# A100 [vidur]: 41 million elements in 122 µs, of which the bytes alone would take 92. Not in fused kernels: those of
# torch's compiler, and those that costs/instructions.py counts, have the instructions of their machine code.
FUNCTION_OPERATIONS = 20

# The same of a function on a score of flex_attention: an SM computes 16 of them in a clock cycle beside 128 additions
# (CUDA C++ Programming Guide, table of arithmetic throughput), and what goes with it (tanh divides) is as much again.
SCORE_FUNCTION_OPERATIONS = 16

# Exponents p of (compute^p + memory^p)^(1/p): 1 is no overlap, infinity perfect overlap (those of matmuls are in
# gemm_kernels.py). Element-wise kernels have many independent threads that overlap: 3, from the knee of the
# fused-multiply curve of the article above. A thread computes the address of an element before it loads the element, in
# turns: 2 (2 to 3 are equally good on [timm]). In a compiled kernel that holds rows in registers (168 to 218 a thread,
# so that an SM has few threads) random numbers are drawn while nothing is loaded: 1. Dropouts with a layer norm and
# with a softmax on an H100 take .89 to 1.01 of both times (BERTs in validation/traces, 46 kernels of three shapes).
VECTOR_OVERLAP = 3.0
TURNS_OVERLAP = 2.0
DRAWING_OVERLAP = 1.0

# Integer additions and multiply-adds of an SM per clock cycle (CUDA C++ Programming Guide, 'Arithmetic Instructions',
# throughput of native instructions: 64 for compute capability 7.0 to 9.0).
INTEGER_LANES_PER_SM = 64

# Conversions of an SM per clock cycle, as from int8 to fp32 (the same guide, 'all other type conversions': 16 on
# Ampere; taken for all NVIDIA GPUs). What inductor makes of int8 weights and one row waits for them: gpt-fast decodes
# Llama-2-7B in int8 at 1.07 TB/s on an A100, in bf16 at 1.40 (its README).
CONVERSIONS_PER_CYCLE = 16

# Instructions that a compute unit of AMD starts for single elements in a cycle: 4 SIMDs of 16 lanes. From CDNA2 on the
# fp32 peak counts packed instructions of two elements ('CDNA 2 Architecture', AMD, 2021), which reductions do not have.
AMD_LANES_PER_COMPUTE_UNIT = 64

# --- matmuls -----------------------------------------------------------------------------------------------

# A side of the tile by which a matmul counts as small: one with fewer of these tiles than SMs.
FULL_TILE_SIDE = 128

# Bytes that an SM moves from and to the L2 cache in a clock cycle: it stores a tile of 128 x 128 in 2 bytes in 4,096
# cycles. 7 to 9 with any GPU of [aiconfigurator] left out; GEMMs whose weights stay in the cache of an L40S ask for
# 6 to 8 too.
MATMUL_CACHE_BYTES_PER_CYCLE = 8

# Bytes that an SM takes from the L2 cache in a clock cycle at most: the width of its port, two sectors of 32 bytes,
# from Volta on. With it goes the exponent (as above) with which a tile's loads overlap its multiply-adds, from
# [aiconfigurator] on H100 and H200: 3 to infinity are within .3 points. On B200, GB200 and B300, whose GEMMs set
# neither, the median product of 1e10 to 1e11 FLOP reaches .605, .593 and .673 of the peak, for .609, .594 and .678
# in its database.
OPERAND_BYTES_PER_CYCLE = 64
OPERAND_OVERLAP = 4.0

# Bytes that an SM's shared memory passes in a clock cycle (32 banks of 4 bytes; CUDA programming guide), and the rows
# of an instruction of Hopper's matrix units (PTX ISA, `wgmma`: m64nNk16).
SHARED_MEMORY_BYTES_PER_CYCLE = 128
WGMMA_ROWS = 64

# Of an operand's element: TF32 is the only type of that size that matrix units multiply.
TF32_BYTES = 4

# Split-K: into how many slices K may be split when a matmul has too few tiles to fill the device (not for batched
# matmuls, for which cuBLAS has no such kernels), how many waves of slices suffice, the least depth of a slice, bytes of
# a partial sum (fp32), and the clock cycles of the kernel that adds them: 2,900 on A100, 3,600 on L40S, 5,200 on H100
# and H200 [aiconfigurator].
SPLIT_K = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_WAVES_SPLIT = 4
LEAST_SLICE_DEPTH = 64
PARTIAL_SUM_BYTES = 4
SPLIT_K_CYCLES = 4500

# Share of a matmul's rate that a kernel for many groups reaches: each tile first looks up the pointers and the end of
# its group, and neighbouring tiles share fewer operands in the L2 cache. Fitted to layers of experts with more than 64
# rows an expert [aiconfigurator]; CUTLASS's kernels reach .85 to .95, Triton's .65 to .8.
GROUPED_RATE_SHARE = 0.8
# Memory accesses, each waiting for the one before, by which a tile finds the end of its group and then its pointers.
# They come before the latency of its first loads, and no other tile keeps the SM busy meanwhile. Layers of experts of
# the same database: 1 to 4 are alike.
GROUP_LOOKUPS = 2


class UnpackingKernel(NamedTuple):
    """A kernel of torch's own whose loads or conversions of narrow weights take longer than its multiply-adds."""

    tile: tuple[int, int]  # rows and columns of the output that a block, or a warp, computes
    depth: int  # that it takes at a time
    cycles: float  # of an SM, for that


# By the bits of a weight. 4 (aten/src/ATen/native/cuda/int4mm.cu): the source has 32 instructions of a warp: 8 loads of
# activations, 3 of weights and scales, 11 to unpack, 2 of the matrix unit, 8 additions (the scaling counts as FLOPs).
# Four of them issue in a cycle. 8 (int8mm.cu): each thread adds up one output, element by element. The 32 threads of a
# warp have 2 rows and 16 columns; columns lie a row of weights apart, so that one load touches 16 lines of the L1 cache
# and 2 more for the activations, and the cache looks up one line in a cycle. Not measured.
UNPACKING = {4: UnpackingKernel((16, 8), 32, 32 / 4), 8: UnpackingKernel((2, 16), 1, 16 + 2)}

# Bytes that a thread loads at a time, if all rows begin at multiples of them, and at most if any does not: cuBLAS has
# kernels for 16, 4 and 2 bytes (`align8`, `align2` and `align1` in 16 bits), and takes those for 4 where rows begin at
# multiples of 8 too. How many loads of 4 bytes or 2, of all its threads, an SM finishes in a clock cycle, on an H100
# SXM (torch 2.11, 2026-11: validation/traces): over vocabularies of 50,257 and 30,522 words 2.9 to 3.4 and 2.8 to 3.1.
# A GEMM of 4096 x 4096 x 4096 there, with one more element or two in the rows of any operand: 3.0 to 3.3 of 4 bytes in
# bf16 and 3.1 in tf32; 2.4 to 3.6 of 2 bytes, with those at the ends where rows are multiples of 8,192 bytes, or none.
FULL_ALIGNMENT_BYTES = 16
UNALIGNED_LOAD_BYTES = 4
UNALIGNED_LOADS_PER_CYCLE = 3.1

# Least time of one step in cuDNN's kernels that keep the weights of a recurrent layer on the chip, in seconds, forward
# and backward: of those that run everywhere, whose thread blocks have all units (`RNN_blockPersist_fp_LSTM_HMMA`, 128
# units), and of those for large devices, whose blocks wait for each other at a barrier (`ampere_lstm_tile16`, 512
# units). One LSTM each in fp16 on an H200 (`validation/traces`); 1152 units of a plain network took 3.8 µs forward on a
# Titan X (Diamos et al., 'Persistent RNNs', ICML 2016).
KEPT_STEP_SECONDS = {"everywhere": (1.75e-6, 1.94e-6), "on large devices": (2.5e-6, 4.0e-6)}

# Share of an H100's matrix peak that Ampere's `mma` instructions reach there; torch's flash kernels use them (Luo et
# al., 'Benchmarking and Dissecting the Nvidia Hopper GPU Architecture', arXiv 2402.13499: 62.9 % on average). Their
# operands come from registers, not from shared memory as those of `wgmma` and `tcgen05`. So the registers bound the
# FLOPs of an SM in a cycle (of the boost clock), on every part of compute capability 9 and 10: data-centre Blackwell is
# taken to read its registers no faster (.31 of its peak), and an H20, whose peak is below that, loses nothing. Neither
# was measured. On RTX Blackwell cuBLAS reaches the peak with `mma`, but vision transformers on an RTX 5090 ([timm],
# torch 2.9) show that the flash kernels do not: 1.2 to 1.8 times the time.
LEGACY_MMA_SHARE = 0.63
LEGACY_MMA_FLOP_PER_CYCLE = LEGACY_MMA_SHARE * 989.4e12 / (132 * 1980e6)

# Lanes for fp32 of the SMs that these cycles are for (CUDA C++ Programming Guide: 64 or 128).
LANES_OF_SM = 128

# --- convolutions ------------------------------------------------------------------------------------------

# Input channels per filter at which a convolution on matrix units reaches half its rate, since the fragments of its
# implicit GEMM are padded. Dense in NCHW and in NHWC (compiled models, and images where `converts_layout`), and
# grouped by powers of two in NCHW, or on vector units. Fitted on [timm].
HALF_RATE_CHANNELS = 20
HALF_RATE_CHANNELS_LAST = 1
HALF_RATE_CHANNELS_GROUPED = 72

# Groups with a power of two of channels share the tiles of dense filters in NHWC (cuDNN's release notes tell of kernels
# for such widths since 7.0.4). Any other group is an implicit GEMM of its own, with tiles this many channels wide;
# narrow ones load each pixel anew for few results. Fitted on 43 grouped nets of [timm] in channels-last, on two cards:
# 5.1 and 4.8 % off (by the other law 11.7 and 10.4). Tiles of 32 or 128 are up to 1.3 worse; for powers of two 20
# channels would do as well as HALF_RATE_CHANNELS_LAST, within .6. In NCHW, where groups of 24 are faster, the tiles
# alone are fitted, on twelve RegNets on these cards: 2.8 and 5.9 % off (by the other law 9.9 and 11.6).
GROUP_TILE_CHANNELS = 64
GROUP_TILE_CHANNELS_NCHW = 32
HALF_RATE_TILE_CHANNELS = 120
# Narrower groups than these fill no load of 8 bytes in 16 bits, and are not packed in NHWC: whatever runs there reaches
# this share of the matrix rate. Set on DLA-46-X-C and DLA-60-X-C (2 channels) of [timm], RTX 3090 and 4090, eager and
# compiled: 2 to 11 % off, before 26 to 40 too fast. SENet-154 (2 channels) and DPN-92 (3) set nothing: 5.4 % off on
# average, before 13. Which kernel that is was not seen.
LEAST_PACKED_CHANNELS = 4
NARROWEST_GROUP_SHARE = 0.004

# Bytes of channels that the main loop of cuDNN's matrix kernels takes at a time. Filters over fewer channels, such as
# those over an image's three, run on kernels with Ampere's instructions on newer GPUs too (torch.profiler's trace of a
# ViT in bf16 on an H100, AMD-AGI/TraceLens: s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8).
CONVOLUTION_DEPTH_BYTES = 64

# Kernels that a library launches around a convolution in NCHW on matrix units, by vendor and bytes of an element. Its
# kernels work on NHWC: three transpose input, weight and result. MIOpen in 16 bits: one more clears the result and one
# casts it from fp32 (torch.profiler's trace of a ResNet in bf16 on an MI300X, AMD-AGI/TraceLens: five beside a forward
# one, nine or ten beside the two of a backward one). cuDNN in tf32: `nchwToNhwcKernel` and back beside kernels named
# nhwckrsc_nhwc (some, nhwckrsc_nchw, write NCHW). In 16 bits see `converts_layout`.
CONVERSIONS: Mapping[tuple[str, float], int] = {("amd", 2): 5, ("nvidia", 4): 3}

# On Hopper (cuDNN 9.19 on an H100, torch 2.11, 2026-11: validation/traces) cuDNN converts all three tensors of a
# convolution in NCHW, in 16 bits too, but where it is a plain product (filters of one element, no stride). A thread
# block converts a tile of 32 channels and 32 positions, whether they are there or not: it keeps an SM for this many
# cycles, beside its traffic. (.56 ms for 256 images of 3 channels, .14 for 64; full tiles 1.9 and, in fp32, 2.8 ns.)
CONVERTED_TILE_SIDE = 32
CONVERTED_TILE_CYCLES = 366
# Channels are padded to 16 bytes first: in NCHW by the same kernel, in NHWC by `nhwcAddPaddingKernel`, with this
# many integer operations for each element that it reads (217 and 249 us for 38.5 million in bf16 and fp32).
PADDED_BYTES = 16
PADDING_OPERATIONS = 100
# Where these 16 bytes are all of a pixel, cuDNN's kernels have Ampere's instructions. A step of their main loop takes
# one position of the filters and 64 bytes of channels, present or not, so that 16 x 16 positions of 3 channels are
# multiplied as 8,192. Tiles of 128 x 128 or 256 x 64 reach this share of the rate of `mma`: ten calls with filters of
# 7, 14 and 16, for 1 to 256 images, in bf16 and tf32, reach .68 to .78, and one more .58.
PIXEL_STEP_BYTES = 64
PIXEL_STEP_SHARE = 0.73
PIXEL_TILES = ((128, 128), (256, 64))
# Gradients of filters go through pixels, not positions; there threads work out the place of each. 2 x 50,176 x 768 x
# 768 and 2 x 3.2 million x 64 x 147 FLOPs take .42 and .88 ms: an SM takes this many cycles for each load.
PIXEL_LOAD_CYCLES = 0.9
# With few positions too, kernels without matrix units are faster than that, and convert nothing
# (`convolve_common_engine_float_NHWC`, `implicit_convolve_sgemm`). Tiles have 32 filters, and steps of 8 values. Of the
# fp32 vector peak, filters of 3 x 3 and 4 x 4 over 3 channels in bf16 reach .20 to .22 in NHWC (five calls) and
# .23 to .37 in NCHW (four). (cuDNN took such a kernel for one image with filters of 16 x 16 in NHWC too, and none
# in NCHW or for 4 and 8 images, where it would have been faster: not predicted.)
DIRECT_TILE = (32, 8)
DIRECT_SHARE = {"channels-last": 0.21, "contiguous": 0.27}

# Share of the fp32 vector peak that depthwise convolutions reach; they do not use matrix units. In channels-last they
# are bound by memory up to a side of 7 (.25 and above are equally good on [timm]). For longer sides cuDNN has no such
# kernel and takes a slow one (from one network, ConvMixer-1536/20 with a side of 9: .010 to .014).
# The gradient of the input takes 2.4 to 2.9 times as long there, with filters of 5 and 7, and so does all in fp32, for
# which cuDNN has no specialized kernel: six calls with filters of 3, 5 and 7 reach .07 to .105 (H100 and H200, torch
# 2.11, 2026-11: validation/traces).
DEPTHWISE_SHARE = 0.06
DEPTHWISE_SHARE_UNSPECIALIZED = 0.09
DEPTHWISE_SHARE_CHANNELS_LAST = 0.25
DEPTHWISE_MOST_SIDE = 7
DEPTHWISE_SHARE_LARGE = 0.012

# In NCHW torch has depthwise kernels of its own for all types but fp16 (`use_cudnn_depthwise` in Convolution.cpp, and
# DepthwiseConv2d.cu): integer operations of a thread to find its place, and for each element of its window. From
# filters of 3, 5 and 7 on the same H100, in bf16 and fp32: 160, 290 and 550 for an output. A thread of the input's
# gradient asks for each tap whether an output lies there, whatever the stride: it takes 276 to 288, 312 to 388 and 760.
DEPTHWISE_PLACE_OPERATIONS, DEPTHWISE_VISIT_OPERATIONS, DEPTHWISE_GRADIENT_VISIT_OPERATIONS = 73, 10, 14
DEPTHWISE_GRADIENT_OPERATIONS = {9: 285, 25: 340}  # by taps, of the kernels that the compiler unrolls
# For a weight's gradient the warps of a block take image after image, 32 positions at a time: this many instructions
# for an image, and for 32 positions. From 17 shapes there, of which all but one are met within a fifth; images of 7 x 7
# take 2.4 times as much for an element as large ones.
DEPTHWISE_IMAGE_INSTRUCTIONS, DEPTHWISE_POSITIONS_INSTRUCTIONS = 50, 24

# cuDNN runs dense 3x3 convolutions on vector units as Winograd's F(4x4, 3x3): a 6x6 patch of the input
# becomes 36 numbers, 36 matmuls multiply them, and the result becomes 4x4 outputs (Lavin and Gray, arXiv 1509.09308).
WINOGRAD_OUTPUT, WINOGRAD_PATCH = 4, 6

# --- memory ------------------------------------------------------------------------------------------------

# The first-level cache of an SM, by compute capability (the unified data cache in the CUDA C++ Programming Guide's
# sections on each architecture, as if nothing of it were shared memory), and that of others. Its lines are tagged: it
# looks one up in a cycle, for all threads of a warp that ask for it (Nsight Compute's documentation, 'L1TEX: T-stage').
L1_KB = {
    (7, 0): 128, (7, 5): 96, (8, 0): 192, (8, 6): 128, (8, 7): 192, (8, 9): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip
OTHER_L1_KB = 256
LOOKUP_CYCLES = 1

# Cycles of an SM for an atomic addition of a warp that returns what was there before. Set on four `scatter_add_` in
# bf16 on an H100, which adds as the gradient of a bilinear interpolation does (validation/traces, kernels_index); six
# such gradients were not used to set it (kernels_pointwise).
RETURN_CYCLES = 10

# Share of the streaming bandwidth, by the access pattern of a kernel.
ACCESS_SHARE: Mapping[Access, float] = {
    "stream": 1.0,
    "strided": 1.0,  # copies between layouts: what they lack is in places, sectors and steps of their threads
    "window": 1.0,  # pooling: what it lacks is in its integer operations
    "gather": 0.7,  # elements by index
    "rows": 1.0,  # whole rows by index, each by a thread block of its own
    "scatter": 0.8,  # and added to atomically: .7 to .9 are alike (H100 and H200, validation/traces)
    "sort": 0.25,  # several passes of a radix sort
    "scan": 0.8,  # one pass, in which each block waits for the sum of those before it: 10 million int64 on an H100
    "reduce": 1.0,  # what they lack is in the steps of their threads and in joining values
    "normalize": 1.0,  # rows: what they lack is in their second reads
    "channels": 0.8,  # batch and group norm: a channel's planes lie apart [timm]
    "statistics": 0.9,  # batch norm in training: .8 of torch's kernels, 1 of cuDNN's (H100 SXM, validation/traces)
    # Kernels of lists, each of whose blocks walks through a piece of 256 KB of its own: 22 foreach and fused kernels of
    # optimizers on an H100 and an H200 that take 75 µs to 2.4 ms (torch 2.11, validation/traces), .9 to 1.02.
    "chunks": 0.94,
    "fused": 1.0,
}

# That of "statistics" on GDDR, fitted: training of image models in fp16 and NCHW on an RTX 3090 (rtx3090_train.csv
# of the same results, torch 1.12). Five nets are 4.4 % off; by the share above, 9.
STATISTICS_SHARE_GDDR = 0.6

# Elements of less than 4 bytes, of which a thread loads four at a time (torch's vectorized_elementwise_kernel), on
# GDDR: .87 of spec where fp32 streams reach .93 [timm]. HBM loses nothing: fp16 additions reach .88 of an A100's spec
# [vidur], fp32 ones .88 [NeuSight].
NARROW_SHARE = 0.94

# Clock cycles from a load until its data is there: from memory (466 on A100, 479 on H100, 542 on RTX 4090) and from the
# L2 cache (262, 263, 273; Luo et al., arXiv 2402.13499, table of latencies), and from one arithmetic instruction to the
# next that needs its result (4 since Volta, 6 on Pascal; Jia et al., arXiv 1804.06826).
MEMORY_LATENCY_CYCLES = 480
CACHE_LATENCY_CYCLES = 265
ARITHMETIC_LATENCY_CYCLES, PASCAL_LATENCY_CYCLES = 4, 6

# Clock cycles of a step of a thread that loads, computes little and loads again, beside other threads that do so, from
# memory and from the L2 cache: 742 and 306 in cumsum over 64 rows, 817 and 335 in a norm of 65,536 elements, 752 in
# cumsum over 8,192 rows (H100 SXM, torch 2.11, 2026-11: validation/traces, kernels_reduce). More than the latencies
# above, which one thread sees that walks a small table: pages, and banks of memory, change meanwhile.
STEP_CYCLES = 750
CACHED_STEP_CYCLES = 320

# Cycles in which a device starts one thread block more: batch norms over a quarter and a half million planes of 7 x 7,
# one block each, take as long in 16 and in 32 bits (H100 SXM, torch 2.11, 2026-11: validation/traces, kernels_norm).
BLOCK_START_CYCLES = 1.2

# Where several blocks share a result, cycles in which the blocks of a wave store their parts, count themselves and
# learn whether they are the last; and of a step over the parts, half of which lie in the cache's other partition. From
# 51 sums of columns on an H100, which they meet within 9 % in the mean; 14 on an H200 are 8 % off (validation/traces).
LAST_BLOCK_CYCLES = 6500
JOINING_STEP_CYCLES = 480

# Inputs of a thread that torch's reductions keep at least and at most where several blocks share a result
# (`setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh).
LEAST_SHARED_VALUES, MOST_SHARED_VALUES = 16, 256

MOST_BLOCKS_PER_SM = 32
REGISTERS_AT_A_TIME = 8  # that a thread gets (CUDA's occupancy calculator)
THREAD_BYTES = 16  # that a thread of torch's kernels for plain tensors takes in one load (MemoryAccess.cuh)
ISSUED_LANES_PER_SM = 128  # an instruction for 32 threads from each of four schedulers in a cycle, of any kind
ISSUED_LANES_BY_CAPABILITY = {(6, 0): 64}  # two schedulers (CUDA C++ Programming Guide, 'Compute Capability 6.x')
# Share of these that torch's own kernels of functions fill where an SM has 64 lanes for fp32 and 64 for other
# arithmetic, whose instructions wait for either: GELU in fp16 on an A100 [vidur], 41 million elements of 29
# instructions in 122 µs, of which the bytes alone would take 92. For compiled kernels there it was not measured.
ISSUED_SHARE_OF_FUNCTIONS = 0.625
# Share of these that reductions of torch's compiler fill, whose threads wait for the steps of a loop and for each
# other. Set on softmaxes of losses on an H100 (.98 to 1.01 of what they took, validation/traces). Other kernels fill
# all: GELUs, SiLUs, batch norms at inference and GELUs of torch's own come out at .92 to 1.07 by it and VECTOR_OVERLAP.
ISSUED_SHARE_OF_REDUCTIONS = 0.8
LEAST_BLOCK_THREADS = 128  # of torch's kernels: a block holds several rows of fewer threads (PersistentSoftmax.cuh)

# Second reads begin to miss the L2 cache when the rows in flight fill more than this share of it, and all of them miss
# when the rows are 1.3 times as large as the cache: addresses are hashed over slices, and rows of other blocks evict
# them. Fitted on [NeuSight]: .3 on all its devices.
CACHE_SHARE_WITHOUT_MISSES = 0.3
# From the A100 on data-centre parts have an L2 cache of two parts, of which each keeps what its own SMs read (NVIDIA
# A100 whitepaper, 'A100 L2 Cache'). Rows are read again from there up to this share of both, and not beyond it:
# logarithms of softmax over 32,000 to 151,936 numbers on an H100 and an H200 (torch 2.11, 2026-11:
# validation/traces). On an A100 [NeuSight] the other law does as well (10 % off for softmax, by this one 10.5).
CACHES_IN_TWO_PARTS = {(8, 0), (9, 0), (10, 0), (10, 3)}
HELD_SHARE_OF_TWO_PARTS = 0.55

# What a kernel before has left in the L2 cache is gone when this many times the cache has passed it beyond the share
# above. Additions in fp16 on A100 and A40 [vidur]: 1 to 2 are alike.
CACHES_UNTIL_ALL_MISS = 2.0

# Matmuls that read several weights in turn find nothing when these fill more than the cache by this share of it; less
# of it, in proportion, loses a part. Addresses are hashed over the sets of a cache, of which a few are full before the
# others. GEMMs on an L40S [aiconfigurator]: six weights of a cache's size together are found, at 1.04 half of them, at
# 1.09 a seventh.
CACHE_EDGE = 0.1

# What kernels reach on the L2 cache, in bytes of each clock cycle and SM: additions of 2 to 6 MB a tensor take 2.9 TB/s
# on an A100 and 1.6 TB/s on an A40 [vidur], 19 and 11.
CACHE_BYTES_PER_CYCLE = 16

# The same on AMD's, and the bytes of a line, which comes for one element whose neighbours lie far from it ('CDNA 3
# Architecture', AMD, 2023). From one copy in a trace of an MI300X (AMD-AGI/TraceLens): 19 million bf16 elements, 4.6 kB
# apart, take 159 µs, and 29 where whole heads are copied.
AMD_CACHE_BYTES_PER_CYCLE = 24
AMD_LINE_BYTES = 128

# Share of a PCIe link that one direction reaches: 55.4 of 63 GB/s host to device on generation 5
# (stas00/ml-engineering, network).
LINK_SHARE = 0.88

# Spec rate of the link in bytes/s where a profile names none: PCIe generation 3, 16 lanes, one direction.
DEFAULT_LINK_BYTES_PER_S = 16e9
