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
from math import inf
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
# A100 [vidur]: 41 million elements in 122 µs, of which the bytes alone would take 92. Not in fused kernels, whose
# compiler approximates them: two cosines in one take little longer than one (article above).
FUNCTION_OPERATIONS = 20

# The same of a function on a score of flex_attention: an SM computes 16 of them in a clock cycle beside 128 additions
# (CUDA C++ Programming Guide, table of arithmetic throughput), and what goes with it (tanh divides) is as much again.
SCORE_FUNCTION_OPERATIONS = 16

# Exponents p of (compute^p + memory^p)^(1/p): 1 is no overlap, infinity perfect overlap (those of matmuls are in
# gemm_kernels.py). Element-wise kernels have many independent threads that overlap: 3, from the knee of the
# fused-multiply curve of the article above. A thread computes the address of an element before it loads the element, in
# turns: 2 (2 to 3 are equally good on [timm]).
VECTOR_OVERLAP = 3.0
INDEX_OVERLAP = 2.0

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

# Least time of one step of a recurrent layer, in seconds: all SMs wait for each other at a barrier. 2.8 TFLOP/s at
# 1152 units and 4 sequences on a Titan X are 3.8 µs a step (Diamos et al., 'Persistent RNNs', ICML 2016).
RECURRENT_STEP_SECONDS = 3.8e-6

# --- convolutions ------------------------------------------------------------------------------------------

# Input channels per filter at which a convolution on matrix units reaches half its rate, since the fragments of its
# implicit GEMM are padded. Dense in NCHW and in NHWC layout (compiled models), and grouped by powers of two in NCHW, or
# on vector units. Fitted on [timm].
HALF_RATE_CHANNELS = 20
HALF_RATE_CHANNELS_LAST = 1
HALF_RATE_CHANNELS_GROUPED = 72

# Groups with a power of two of channels share the tiles of dense filters in NHWC (cuDNN's release notes tell of kernels
# for such widths since 7.0.4). Any other group is an implicit GEMM of its own, with tiles so many channels wide; narrow
# ones load each pixel anew for few results. Fitted on 43 grouped nets of [timm] in channels-last, on two cards: 5.1 and
# 4.8 % off (by the other law 11.7 and 10.4). Tiles of 32 or 128 are up to 1.3 worse; for powers of two 20 channels
# would do as well as HALF_RATE_CHANNELS_LAST, within .6. In NCHW, where groups of 24 are faster, the tiles alone are
# fitted, on twelve RegNets on these cards: 2.8 and 5.9 % off (by the other law 9.9 and 11.6).
GROUP_TILE_CHANNELS = 64
GROUP_TILE_CHANNELS_NCHW = 32
HALF_RATE_TILE_CHANNELS = 120

# Bytes of channels that the main loop of cuDNN's matrix kernels takes at a time. Filters over fewer channels, such as
# those over an image's three, run on kernels with Ampere's instructions on newer GPUs too (torch.profiler's trace of a
# ViT in bf16 on an H100, AMD-AGI/TraceLens: s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8).
CONVOLUTION_DEPTH_BYTES = 64

# Kernels that a library launches beside a convolution in NCHW on matrix units, by vendor and bytes of an element. Its
# kernels work on NHWC: three transpose input, weight and result. MIOpen in 16 bits: one more clears the result and one
# casts it from fp32 (torch.profiler's trace of a ResNet in bf16 on an MI300X, AMD-AGI/TraceLens: five beside a forward
# one, nine or ten beside the two of a backward one). cuDNN in tf32: `nchwToNhwcKernel` and back beside kernels named
# nhwckrsc_nhwc (some, nhwckrsc_nchw, write NCHW). Before Hopper it converts 16 bits within the kernel: image models in
# NCHW take 1.1 to 1.25 times as long as in NHWC [timm], where copies would double them.
CONVERSIONS: Mapping[tuple[str, float], int] = {("amd", 2): 5, ("nvidia", 4): 3}

# On Hopper (cuDNN 9.19 on an H100, torch 2.11, 2026-11: validation/traces) cuDNN turns all three tensors of a
# convolution in NCHW, in 16 bits too, but where it is a plain product (filters of one element, no stride). A thread
# block turns a tile of 32 channels and 32 positions, whether they are there or not: it keeps an SM for so many cycles,
# beside its traffic. (.56 ms for 256 images of 3 channels, .14 for 64; full tiles 1.9 and, in fp32, 2.8 ns.)
TURNED_TILE_SIDE = 32
TURNED_TILE_CYCLES = 366
# Channels are padded to 16 bytes first: in NCHW by the same kernel, in NHWC by `nhwcAddPaddingKernel`, with so many
# integer operations for each element that it reads (217 and 249 us for 38.5 million in bf16 and fp32).
PADDED_BYTES = 16
PADDING_OPERATIONS = 100
# Where these 16 bytes are all of a pixel, the threads of the implicit GEMM work out the place of each. 2 x 50,176 x 768
# x 768 and 2 x 3.2 million x 64 x 147 FLOPs take 1.35 and 1.54 ms, tf32 as long: an SM takes so many cycles for each
# load. Gradients of filters take less: .42 and .88 ms.
PIXEL_LOAD_CYCLES = {"output": 1.9, "filter gradient": 0.9, "input gradient": 1.9}

# Share of the fp32 vector peak that depthwise convolutions reach; they do not use matrix units. In channels-last they
# are bound by memory up to a side of 7 (.25 and above are equally good on [timm]). For longer sides cuDNN has no such
# kernel and takes a slow one (from one network, ConvMixer-1536/20 with a side of 9: .010 to .014).
# The gradient of the input takes 2.4 to 2.9 times as long there, with filters of 5 and 7 (H100, torch 2.11, 2026-11:
# validation/traces).
DEPTHWISE_SHARE = 0.06
DEPTHWISE_SHARE_OF_INPUT_GRADIENT = 0.09
DEPTHWISE_SHARE_CHANNELS_LAST = 0.25
DEPTHWISE_MOST_SIDE = 7
DEPTHWISE_SHARE_LARGE = 0.012

# In NCHW torch has depthwise kernels of its own for all types but fp16 (`use_cudnn_depthwise` in Convolution.cpp, and
# DepthwiseConv2d.cu): integer operations of a thread to find its place, for each element of its window, and of a block
# for each element that it adds to one weight's gradient. From filters of 3, 5 and 7 on the same H100, in bf16 and fp32:
# 160, 290 and 550 for an output, 23 to 31 for an addition; input gradients of 3 x 3 take 1.8 times as many.
DEPTHWISE_PLACE_OPERATIONS, DEPTHWISE_VISIT_OPERATIONS = 73, 10
DEPTHWISE_ADDITION_OPERATIONS = 27

# cuDNN runs dense 3x3 convolutions on vector units as Winograd's F(4x4, 3x3): a 6x6 patch of the input
# becomes 36 numbers, 36 matmuls multiply them, and the result becomes 4x4 outputs (Lavin and Gray, arXiv 1509.09308).
WINOGRAD_OUTPUT, WINOGRAD_PATCH = 4, 6

# --- fused attention ---------------------------------------------------------------------------------------


Tiles = tuple[tuple[int, int, int], ...]  # (up to this head dimension, rows of queries, columns of keys)


class AttentionKernel(NamedTuple):
    """One family of attention kernels. A thread block keeps a tile of queries and passes over tiles of keys."""

    tiles: Tiles
    blocks_per_sm: int  # at most, at a time: while one begins or ends, another one computes
    score_cycles: float  # of an SM per score, not hidden behind the matmuls: exp, row sums, conversion
    backward_score_cycles: float  # the same in the backward pass, which also adds to dq atomically
    overlap_exponent: float  # of arithmetic and memory traffic, see above
    block_cycles: float  # of a block beside its tiles: start, queries and first keys from DRAM, output
    shared_queries: float = 0  # up to so many queries, heads with the same keys share a block
    shares_in_window: bool = False  # they do so under a window too
    longest_first: bool = False  # under a causal mask the blocks with most keys start first
    speed: float = 1.0  # of all that an SM does for a score, against the family that the other figures are from
    flop_per_cycle: tuple[float, float] | None = None  # most that the matmuls of an SM reach: forward, backward
    wide_speed: tuple[float, float] = (1.0, 1.0)  # the same as `speed`, forward and backward, of heads of more than 128
    hides_softmax: bool = False  # that of one tile runs beside the matmuls of another: the cycles above overlap them
    holds_tiles: bool = True  # whole tiles of queries, keys and values lie in the shared memory of an SM
    masks_by_count: bool = False  # forward, so many tiles at the end of a block, and all under a window
    read_share: float = 1.0  # of the bandwidth of a copy, which its loads reach
    combines_at_a_time: int = 1  # slices that a block of the combining kernel loads before it waits for them
    tiles_on: Mapping[tuple[int, int], Tiles] = {}  # other tiles, by compute capability
    causal_tiles_on: Mapping[tuple[int, int], Tiles] = {}  # those under a causal mask, and in the backward pass
    window_tiles: Tiles = ()  # forward under a window, if these are others
    starts_at_window: bool = False  # forward under a window, the first tile begins with the first key that a block sees


# Of the matrix peak, what the loop over the keys reaches beside the softmax.
ATTENTION_PIPE_SHARE = 0.9

# Energy of a FLOP of fused attention on Hopper, in that of a large product: a softmax comes with it. Ampere's `mma`
# takes more, since its operands are copied to registers first; on Ampere and Ada products do that, too, and attention
# there is met without a factor ([aiconfigurator], [vidur]). Blackwell was not measured. From the time of runs of a
# second on an H100 SXM at its limit of 700 W beside that at the boost clock (torch 2.11, 2026-11; causal, 32 heads of
# 128, 16,384 tokens): 1.24 forward and 1.32 backward by cuDNN's kernels, 2.30 and 2.25 by FlashAttention-2's.
HOPPER_ATTENTION_ENERGY = 1.28
HOPPER_MMA_ENERGY = 1.78

# Clock cycles of an SM per score of a masked tile: four instructions (index, compare, select) on 64 integer lanes.
# Without them the curve below is 6 % too fast at 512 tokens.
MASKED_SCORE_CYCLES = 4 / 64

# Up to this head dimension FlashAttention-2 has kernels for lengths that its tiles divide
# (flash_fwd_launch_template.h).
MOST_EVEN_HEAD_DIM = 128

# FlashAttention-2's tiles are in its launch templates (Dao-AILab/flash-attention, csrc/flash_attn/src), those of
# FlashAttention-3 in hopper/tile_size.h; cuDNN's kernels on Hopper are taken to be like the latter.
# An SM computes 16 exp per clock cycle (CUDA C++ Programming Guide), .0625 cycles each. FlashAttention-2 hides none of
# them: .1 with the rest of the softmax, .38 backward. They and the .9 are from the papers' curves, and alike on A100
# (220 and 175 TFLOP/s forward and backward at head dimension 128, arXiv 2307.08691) and H100 (335 and 322 in arXiv
# 2407.08608, where FlashAttention-2 is compared with). In FlashAttention-3 two warpgroups take turns, which hides about
# half: .055 (from prefill on H100 and H200, aiconfigurator@095f58a; .045 to .06 are alike). Backward, as much is
# assumed (.22).
# The exponent 1.5 is from the ramp of the curve on H100: 191 TFLOP/s at 512 tokens, where traffic takes half of the
# time. In FlashAttention-3 a warp of its own loads keys: 2. A kernel that
# only reads memory need not turn its bus round: over 1 GB of keys and more, -3 reaches .91 to .925 of spec on H100 and
# H200, where copies reach .85 (same database). The kernel that combines slices loads one at a time in FlashAttention-2
# (`combine_attn_seqk_parallel` in flash_fwd_kernel.h), and four in -3 (`kStages` in flash_fwd_combine_kernel.h).
# The cycles of a block: 4,000 (decoding over few keys, in thousands of blocks, same database: 9,450, 11,450 and 8,260
# cycles each at head dimension 128, 64 and 192 on an L40S, which holds one, and 5,400 on an A100, which holds two);
# 3,000 to 6,000 are alike for prefill.
# FlashAttention-2 shares blocks among heads for one query and without a window (`seqlenq_ngroups_swapped` in
# flash_api.cpp).
_FLASH_2_TILES_8_6: Tiles = ((64, 128, 128), (96, 128, 64), (128, 128, 32), (192, 128, 64), (512, 64, 64))
_FLASH_2_CAUSAL_TILES_8_6: Tiles = ((64, 128, 128), (128, 64, 64), (192, 128, 64), (512, 64, 64))
FLASH_2 = AttentionKernel(
    tiles=((64, 128, 128), (192, 128, 64), (512, 64, 64)),
    tiles_on={
        (8, 0): ((64, 128, 128), (512, 128, 64)), (8, 6): _FLASH_2_TILES_8_6, (8, 9): _FLASH_2_TILES_8_6,
    },
    causal_tiles_on={(8, 6): _FLASH_2_CAUSAL_TILES_8_6, (8, 9): _FLASH_2_CAUSAL_TILES_8_6},
    blocks_per_sm=2, score_cycles=0.1, backward_score_cycles=0.38, overlap_exponent=1.5, block_cycles=4000,
    masks_by_count=True,
)  # fmt: skip
# The kernel that can split keys reads a cache as products read weights, by `cp.async`: their overlap and their share of
# the bandwidth (MMA in gemm_kernels.py; aiconfigurator's vLLM rows: 2 to 2.7 are alike).
FLASH_2_SPLIT = FLASH_2._replace(
    tiles=((64, 64, 256), (128, 64, 128), (512, 64, 64)), tiles_on={}, causal_tiles_on={}, shared_queries=1,
    overlap_exponent=2.7, read_share=0.93,
)  # fmt: skip
# For a paged cache FlashAttention-2 has no other kernel than the one that can split keys, for any number of queries
# (`mha_varlen_fwd` in flash_api.cpp). Where it splits none, its loop is that of FLASH_2, over other tiles.
FLASH_2_PAGED = FLASH_2._replace(tiles=FLASH_2_SPLIT.tiles, tiles_on={}, causal_tiles_on={})
# For each tile a thread reads the table of pages from the L2 cache before it can ask for its keys, and again for its
# values (`resolve_thread_kv_page_slice_offset` in vLLM's fork, flash_fwd_kernel.h).
PAGE_LOOKUPS = 2
# Where heads share a block there, the result is copied into the caller's tensor. With several sequences and key heads
# both the queries and the result change their order (`mha_varlen_fwd` in vLLM's fork), and a copy that permutes waits
# so much longer: for the divisors and strides that it finds addresses with, and its own instructions, likely. From
# calls of fewer than 128 keys, which take 6.1 µs longer so on an A100 and 3.6 on an L40S (aiconfigurator): 3,400 and
# 3,250 cycles a copy.
PERMUTED_COPY_CYCLES = 3300
# A call over a paged cache puts all heads that share keys into one block, whatever the number of queries
# (`get_pack_gqa` in hopper/flash_api.cpp), and tiles have at least 128 rows, but 64 where all queries of a block fit
# into these, the head dimension is at most 128 and there is no window (`use_one_mma_wg` in hopper/heuristics.h of
# vLLM's fork). So under a window a call with one query a head pays for 128 or 192. The first tile begins with the first
# key of the window (`n_offset` in hopper/block.h).
_FLASH_3_CAUSAL_TILES: Tiles = ((64, 192, 128), (96, 192, 144), (128, 128, 128), (192, 128, 96), (512, 128, 80))
FLASH_3 = AttentionKernel(
    tiles=((64, 192, 192), (96, 192, 144), (128, 128, 176), (192, 128, 112), (512, 128, 80)),
    causal_tiles_on={(9, 0): _FLASH_3_CAUSAL_TILES},
    window_tiles=((64, 192, 160), (128, 128, 128), (192, 128, 96), (512, 128, 64)), starts_at_window=True,
    blocks_per_sm=1, score_cycles=0.055, backward_score_cycles=0.22, overlap_exponent=1.5, block_cycles=5000,
    shared_queries=inf, shares_in_window=True, longest_first=True,
)  # fmt: skip
FLASH_3_SPLIT = FLASH_3._replace(
    tiles=((64, 64, 192), (128, 64, 128), (192, 128, 96), (512, 128, 80)), causal_tiles_on={}, overlap_exponent=2.0,
    read_share=1.09, combines_at_a_time=4,
)  # fmt: skip
# Data-centre Blackwell (flash_attn/cute/flash_fwd_sm100.py at 0251105; CUTLASS's example 77 is built alike): one warp
# issues the matmuls of two tiles of 128 queries, whose sums lie in a memory of the matrix unit, and two warpgroups do
# nothing but their softmax, whose exp takes an SM .0625 cycles. So it runs beside the matmuls. Backward, it is shared
# memory that works beside the five matmuls, at 128 bytes a cycle. For a tile of 128 x 128 and a head of 128 it delivers
# eight operands of 32 KiB (two others lie in the memory of the matrix unit), and takes dS and, to be added up in fp32,
# dq in and out: 13 x 256 cycles (the paper counts the same 3,328 beside 2,560 of the matmuls, arXiv 2603.05451; two
# SMs that share their operands would take 2,688), of which a loop reaches .9 too. Shorter heads take less. cuDNN's
# kernels are taken to be like that. Not measured.
FLASH_4 = FLASH_3._replace(
    tiles=((512, 256, 128),), causal_tiles_on={}, window_tiles=(), starts_at_window=False, score_cycles=0.0625,
    hides_softmax=True, backward_score_cycles=13 * 256 / 128**2 / ATTENTION_PIPE_SHARE,
)  # fmt: skip
# For few queries the operands change places: 128 keys are the rows of the matrix unit, and 8 or 16 queries its columns
# (`SwapsMmaAbForGeneration` in TensorRT-LLM's fmhaKernels.h). So few columns wait for shared memory: the 4 KiB of 128
# keys take 32 cycles, as 64 columns would. What loads and combines is taken to be FlashAttention-3's.
FLASH_4_SPLIT = FLASH_4._replace(
    tiles=((512, 64, 128),), overlap_exponent=2.0, read_share=FLASH_3_SPLIT.read_share,
    combines_at_a_time=FLASH_3_SPLIT.combines_at_a_time,
)  # fmt: skip
# Blackwell Ultra (10.3) computes exp twice as fast (NVIDIA, "Making Softmax More Efficient with NVIDIA Blackwell
# Ultra", 2026), and FlashAttention-4 leaves all of it to that unit there.
FLASH_4_ULTRA = FLASH_4._replace(score_cycles=FLASH_4.score_cycles / 2)

# CUTLASS's memory-efficient kernels. In 16 bits they take so many cycles and reach so many FLOP a cycle, whatever the
# matrix unit could do, since warps of 32 x 32 scores fetch their operands from shared memory; rows without a query have
# no softmax. Longer heads keep their sums in memory. Set on three shapes of an H100 (torch 2.11, 2026-11:
# validation/traces, kernels_attention): heads of 128, 64 and 256; 46 calls of 30 µs and more there and on an H200 are
# met within .09 in the mean, and BEiTs, whose attention has a mask, on RTX 3090 and 4090 ([timm]) within .02.
# Before Ampere they load through registers, in turn with the matmuls (there is no `cp.async`), and pass the scores
# through shared memory: about half as fast. From Stable Diffusion 1.5 on a V100 (diffusers' docs at 2c529b75, torch
# 2.0, 23 runs of 1 to 16 images), whose largest attention has heads of 40.
# In fp32 and TF32: at .73 of what FlashAttention-2 would reach, which they are within .06 of on an H100.
EFFICIENT = FLASH_2._replace(
    tiles=((64, 64, 64), (128, 64, 128), (512, 32, 128)), tiles_on={}, causal_tiles_on={}, holds_tiles=False,
    masks_by_count=False, speed=0.73,
)  # fmt: skip
EFFICIENT_IN_16_BITS = EFFICIENT._replace(
    score_cycles=0.24, backward_score_cycles=0.7, flop_per_cycle=(950, 690), wide_speed=(0.78, 0.22), speed=1.0,
)  # fmt: skip
EFFICIENT_BEFORE_AMPERE = EFFICIENT_IN_16_BITS._replace(speed=0.52)

# AMD's kernels in torch are compiled by Triton (AOTriton). From the one shape that was measured, 165 µs for 16 x 16
# causal heads of 559 tokens on MI300X, if half of that is the softmax: right in magnitude, no more.
AOTRITON = FLASH_2._replace(
    tiles=((64, 128, 128), (512, 128, 64)), tiles_on={}, causal_tiles_on={}, holds_tiles=False,
    masks_by_count=False, score_cycles=0.35, backward_score_cycles=1.3, speed=0.44,
)  # fmt: skip
# For few queries ROCm's kernels have tiles of 16 rows, the height of its matrix instructions, and split the keys in
# parts of 256; heads with the same keys share a block (vLLM's csrc/rocm/attention.cu, AITER's paged attention:
# `mfma16`, grid of sequences x parts x key heads). Not measured: the other figures are FlashAttention-2's.
AMD_SPLIT = AOTRITON._replace(tiles=((512, 16, 256),), shared_queries=1, shares_in_window=True)

# flex_attention's templates, by inductor's source and not measured. They go through the same steps as
# FlashAttention-2, whose figures they have, but for three: Triton compiles them for the matrix instructions of the
# device's own generation; the backward pass adds nothing atomically, so that it computes the scores twice; and a block
# that keeps keys serves all query heads that share them. Tiles of the forward pass by the major of the compute
# capability (template_heuristics/triton.py, 16-bit types): a head dimension without an entry there has 64 x 64. (11 and
# 12 are alike. Before 8.0 there is no template.) Tiles of the backward pass: up to which head dimension, the keys that
# a block keeps, and the queries that it takes at a time.
FLEX = FLASH_2._replace(tiles_on={}, causal_tiles_on={}, holds_tiles=False, masks_by_count=False)
FLEX_TILES = {
    8: {64: (128, 64), 128: (128, 64), 192: (128, 32), 256: (32, 64)},
    9: {64: (128, 128), 128: (128, 64), 256: (64, 32)},
    10: {64: (128, 128), 128: (128, 64), 192: (128, 128), 256: (64, 32)},
    11: {64: (128, 64), 128: (128, 64), 256: (32, 64)},
}
FLEX_OTHER_TILE, FLEX_LONG_TILE = (64, 64), (64, 32)  # of other head dimensions up to 256, and of longer ones
FLEX_BACKWARD_TILES = {
    8: ((63, 128, 32), (256, 64, 64)),
    9: ((63, 64, 64), (128, 128, 64), (256, 64, 64)),
    10: ((128, 128, 64), (256, 64, 64)),
    11: ((63, 128, 32), (256, 64, 64)),
}
FLEX_LONG_BACKWARD_TILE = (16, 16)
# Torch 2.15 has others on data-centre Blackwell.
FLEX_TILES_OF_2_15 = {**FLEX_TILES, 10: {64: (128, 64), 128: (128, 128), 192: (128, 128), 256: (64, 32)}}
FLEX_BACKWARD_TILES_OF_2_15 = {**FLEX_BACKWARD_TILES, 10: ((64, 64, 32), (128, 128, 64), (256, 64, 64))}
FLEX_KEY_SHARE = 4 / 7  # of the backward pass's products, those of blocks that keep keys

# Where blocks differ in length, the SMs run out of work at different times: the last ends so much of the longest block
# after the mean. Simulated for FlashAttention-2's grids with two blocks on an SM: .6 to 1.2, lower for long sequences.
ATTENTION_TAIL = 0.7

# Bytes of shared memory of an SM, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications), those of others, and what the system takes of them for each thread block.
SHARED_MEMORY_KB = {
    (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (12, 0): 100, (12, 1): 100,
}  # fmt: skip
OTHER_SHARED_MEMORY_KB = 228
BLOCK_RESERVED_KB = 1

# The first-level cache of an SM, by compute capability (the unified data cache of the same guide's sections on each
# architecture; on 7.5 and 7.0 as on the others what shared memory leaves), and others. Its lines are tagged: it looks
# one up in a cycle, for all threads of a warp that ask for it (Nsight Compute's documentation, 'L1TEX: T-stage').
L1_KB = {
    (7, 0): 128, (7, 5): 96, (8, 0): 192, (8, 6): 128, (8, 7): 192, (8, 9): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip
OTHER_L1_KB = 256
LOOKUP_CYCLES = 1

# A kernel that splits the keys is taken if the blocks are fewer than this share of those that the device holds; of the
# numbers of slices, the first that fills the last wave .85 as well as the best (FlashAttention's num_splits_heuristic).
FEW_BLOCKS, SLICE_FILL, MOST_SLICES = 0.8, 0.85, 128

# Seconds of the kernel that combines the slices, beside its traffic and the slices themselves: the smallest kernel and
# two trips to memory. A block of it adds up slice after slice, each a trip to the L2 cache.
COMBINE_SECONDS = 4e-6

# Multiples to which head dimensions are padded, up to 128 and above.
HEAD_DIMENSION_MULTIPLES = (32, 64)

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

# Bytes of an element of dq beside those of the op's tensors: FlashAttention's backward sets a copy in fp32 to zero,
# adds to it, and converts it, and another kernel reads the output and its gradient for the row sums.
BACKWARD_EXTRA_BYTES = 16

# --- memory ------------------------------------------------------------------------------------------------

# Share of the streaming bandwidth, by the access pattern of a kernel.
ACCESS_SHARE: Mapping[Access, float] = {
    "stream": 1.0,
    "strided": 0.8,  # copies between layouts: one side is not contiguous; .8 to 1 are alike on [timm]
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
# next that needs its result (4 since Volta; Jia et al., arXiv 1804.06826).
MEMORY_LATENCY_CYCLES = 480
CACHE_LATENCY_CYCLES = 265
ARITHMETIC_LATENCY_CYCLES = 4

# Clock cycles of a step of a thread that loads, computes little and loads again, beside other threads that do so, from
# memory and from the L2 cache: 742 and 306 in cumsum over 64 rows, 817 and 335 in a norm of 65,536 elements, 752 in
# cumsum over 8,192 rows (H100 SXM, torch 2.11, 2026-11: validation/traces, kernels_reduce). More than the latencies
# above, which one thread sees that walks a small table: pages, and banks of memory, change meanwhile.
STEP_CYCLES = 750
CACHED_STEP_CYCLES = 320

# Cycles in which a device starts one thread block more: batch norms over a quarter and a half million planes of 7 x 7,
# one block each, take as long in 16 and in 32 bits (H100 SXM, torch 2.11, 2026-11: validation/traces, kernels_norm).
BLOCK_START_CYCLES = 1.2

# Where several blocks share a result, cycles until the last of them has stored its part, counted itself and knows that
# it is the last; and of a step over the parts, half of which lie in the cache's other partition. From 26 sums over rows
# on an H100 (validation/traces, kernels_reduce and programs), whose steps take 380 to 700.
LAST_BLOCK_CYCLES = 4500
JOINING_STEP_CYCLES = 550

# Inputs of a thread that torch's reductions keep at least and at most where several blocks share a result
# (`setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh).
LEAST_SHARED_VALUES, MOST_SHARED_VALUES = 16, 256

# Threads that an SM holds at full occupancy, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications); 2048 on the others.
RESIDENT_THREADS = 2048
RESIDENT_THREADS_BY_CAPABILITY = {
    (7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536,
}  # fmt: skip
MOST_BLOCKS_PER_SM = 32
LEAST_BLOCK_THREADS = 128  # of torch's kernels: a block holds several rows of fewer threads (PersistentSoftmax.cuh)

# Second reads begin to miss the L2 cache when the rows in flight fill more than this share of it, and all of them miss
# when the rows are 1.3 times as large as the cache: addresses are hashed over slices, and rows of other blocks evict
# them. Fitted on [NeuSight]: .3 on all its devices.
CACHE_SHARE_WITHOUT_MISSES = 0.3

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
