"""Families of fused attention kernels: their tiles, and what an SM takes for a score and for a block.

Sources used more than once are those of constants.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from flopmeter.timing.constants import CACHE_BYTES_PER_CYCLE, LANES_OF_SM

Tiles = tuple[tuple[int, int, int], ...]  # (up to this head dimension, rows of queries, columns of keys)


class AttentionKernel(NamedTuple):
    """One family of attention kernels. A thread block keeps a tile of queries and passes over tiles of keys."""

    tiles: Tiles
    blocks_per_sm: int  # at most, at a time: while one begins or ends, another one computes
    score_cycles: float  # of an SM per score, not hidden behind the matmuls: exp, row sums, conversion
    backward_score_cycles: float  # the same in the backward pass
    overlap_exponent: float  # of arithmetic and memory traffic, as in constants.py
    block_cycles: float  # of a block besides its tiles: start, queries and first keys from DRAM, output
    shared_queries: float = 0  # up to this many queries, heads with the same keys share a block
    split_queries: float = inf  # up to this many, the library also has a kernel that splits the keys
    shares_in_window: bool = False  # they do so under a window too
    longest_first: bool = False  # under a causal mask the blocks with most tiles start first
    longest_of_head_first: bool = False  # of each head
    speed: float = 1.0  # of all that an SM does for a score, against the family that the other figures are from
    flop_per_cycle: tuple[float, float] | None = None  # most that the matmuls of an SM reach: forward, backward
    wide_speed: tuple[float, float] = (1.0, 1.0)  # the same as `speed`, forward and backward, of heads of more than 128
    hides_softmax: bool = False  # one tile's softmax runs during another's matmuls: the cycles above overlap them
    holds_tiles: bool = True  # whole tiles of queries, keys and values lie in the shared memory of an SM
    masks_by_count: bool = False  # forward, masks a number of tiles at the end of a block, and all under a window
    warps_read_all: bool = False  # forward, each warp reads all keys and values from shared memory; else it is no bound
    read_share: float = 1.0  # of the bandwidth of a copy, which its loads reach
    bias_cycles: float = 0.0  # of an SM per score, for a mask in memory that is added to it
    dropout_cycles: float = 0.0  # the same, for the random number that decides whether it is dropped
    dq_cycles_per_byte: float = 0.0  # of an SM, to add to the gradients of queries in memory; else in the cycles above
    sums_heads: bool = False  # backward, of those that share keys, in a kernel of its own
    combines_at_a_time: int = 1  # slices that a block of the combining kernel loads before it waits for them
    tiles_on: Mapping[tuple[int, int], Tiles] = {}  # other tiles, by compute capability
    causal_tiles_on: Mapping[tuple[int, int], Tiles] = {}  # those under a causal mask, and in the backward pass
    window_tiles: Tiles = ()  # forward under a window, if these are others
    starts_at_window: bool = False  # forward under a window, the first tile begins with the first key that a block sees


# The share of the matrix peak that the loop over the keys reaches, the softmax aside.
ATTENTION_PIPE_SHARE = 0.9

# Energy of a FLOP of fused attention on Hopper, forward and backward, in that of a large product: a softmax comes with
# it. Ampere's `mma` takes more, since its operands are copied to registers first; on Ampere and Ada products do that,
# too, and attention there is met without a factor ([aiconfigurator], [vidur]). Blackwell was not measured. Fitted to
# the time of runs of a second on an H100 SXM at its limit of 700 W (torch 2.11, 2026-11; causal, 32 heads of 128,
# 16,384 tokens), by cuDNN's kernels and by FlashAttention-2's.
HOPPER_ATTENTION_ENERGY = 1.23, 1.47
HOPPER_MMA_ATTENTION_ENERGY = 2.29, 2.22

# FlashAttention-2 has four warps, and for heads of more than 128 one for each 16 queries (flash_fwd_launch_template.h).
# Heads of 256 on an H100 take .84 of the measured time with that bound and .75 without.
WARPS, QUERIES_OF_A_WIDE_WARP = 4, 16

# Clock cycles of an SM per score of a masked tile: four instructions (index, compare, select) on 64 integer lanes.
# Without them the curve below is 6 % too fast at 512 tokens.
MASKED_SCORE_CYCLES = 4 / 64

# Up to this head dimension FlashAttention-2 has kernels for lengths that its tiles divide
# (flash_fwd_launch_template.h).
MOST_EVEN_HEAD_DIM = 128

# FlashAttention-2's tiles are in its launch templates (Dao-AILab/flash-attention, csrc/flash_attn/src), those of
# FlashAttention-3 in hopper/tile_size.h; cuDNN's kernels on Hopper are taken to be like the latter.
# An SM computes 16 exp per clock cycle (CUDA C++ Programming Guide), .0625 cycles each. FlashAttention-2 hides none of
# them: .1 with the rest of the softmax (.38 backward in kernels that are taken to be like it, with what they add to
# gradients). They and the .9 are from the papers' curves, and alike on A100 (220 and 175 TFLOP/s forward and backward
# at head dimension 128, arXiv 2307.08691) and H100 (335 and 322 in arXiv 2407.08608, where FlashAttention-2 is compared
# with). In FlashAttention-3 two warpgroups take turns, which hides about
# half: .055 (from prefill on H100 and H200, aiconfigurator@095f58a; .045 to .06 are alike). Backward, as much is
# assumed (.22).
# The exponent 1.5 is from the ramp of the curve on H100: 191 TFLOP/s at 512 tokens, where traffic takes half of the
# time. In FlashAttention-3 a warp of its own loads keys: 2. A kernel that only reads memory need not turn its bus
# round: over 1 GB of keys and more, -3 reaches .91 to .925 of spec on H100 and H200, where copies reach .85 (same
# database). The kernel that combines slices loads one at a time in FlashAttention-2 (`combine_attn_seqk_parallel` in
# flash_fwd_kernel.h), and four in -3 (`kStages` in flash_fwd_combine_kernel.h).
# The cycles of a block: 4,000 (decoding over few keys, in thousands of blocks, same database: 9,450, 11,450 and 8,260
# cycles each at head dimension 128, 64 and 192 on an L40S, which holds one, and 5,400 on an A100, which holds two);
# 3,000 to 6,000 are alike for prefill.
# FlashAttention-2 shares blocks among heads for one query and without a window (`seqlenq_ngroups_swapped` in
# flash_api.cpp). Its dropout takes 16 numbers of 8 bits from ten rounds of Philox (dropout.h), 80 instructions on 64
# integer lanes, and a comparison and a selection for each: .11 cycles (not measured).
_FLASH_2_TILES_8_6: Tiles = ((64, 128, 128), (96, 128, 64), (128, 128, 32), (192, 128, 64), (512, 64, 64))
_FLASH_2_CAUSAL_TILES_8_6: Tiles = ((64, 128, 128), (128, 64, 64), (192, 128, 64), (512, 64, 64))
FLASH_2 = AttentionKernel(
    tiles=((64, 128, 128), (192, 128, 64), (512, 64, 64)),
    tiles_on={
        (8, 0): ((64, 128, 128), (512, 128, 64)), (8, 6): _FLASH_2_TILES_8_6, (8, 9): _FLASH_2_TILES_8_6,
    },
    causal_tiles_on={(8, 6): _FLASH_2_CAUSAL_TILES_8_6, (8, 9): _FLASH_2_CAUSAL_TILES_8_6},
    blocks_per_sm=2, score_cycles=0.1, backward_score_cycles=0.38, overlap_exponent=1.5, block_cycles=4000,
    masks_by_count=True, warps_read_all=True, dropout_cycles=80 / 16 / 64 + 2 / 64,
)  # fmt: skip
# The backward pass keeps keys and passes over queries (flash_bwd_launch_template.h). Its softmax takes what the forward
# pass's does. For each tile it adds the gradients of its queries to memory in fp32, one element a thread, which keeps
# an SM .0825 cycles a byte (3.2 TB/s on an H100), and a block takes 6,000 cycles besides. Set on 21 calls on an H100
# and an H200 with heads of 40 to 256 and 196 to 16,384 tokens, which are met within 3 % in the mean (torch 2.11,
# 2026-11: validation/traces; by .38 cycles a score it was 14 %). The A100's 175 TFLOP/s come out as 173.
FLASH_2_BACKWARD = FLASH_2._replace(
    tiles=((64, 128, 128), (128, 128, 64), (512, 64, 64)),
    tiles_on=dict.fromkeys(
        ((8, 6), (8, 9), (12, 0), (12, 1)),  # whose blocks have 99 KiB of shared memory
        ((32, 128, 128), (96, 128, 64), (192, 64, 64), (512, 32, 64)),
    ),
    causal_tiles_on={}, blocks_per_sm=1, longest_of_head_first=True, sums_heads=True,
    block_cycles=6000, backward_score_cycles=FLASH_2.score_cycles, dq_cycles_per_byte=0.0825,
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
# cuDNN's kernels on Hopper, as torch 2.11 calls them: their names tell tiles, and their grids blocks, in profiles of an
# H100 and an H200 (validation/traces). 132 blocks stay on the device and take one tile of queries after another, so
# that the next one's loads run during the end of the last: 1,500 cycles each. Those with most keys do not come first.
# They pack no heads that share keys, and split no keys but for a single query. The softmax is FlashAttention-3's. 58
# calls without a mask in memory or dropout, on which the cycles of a block and the exponent were set, are met within
# 8 % in the mean. (FlashAttention-3's tiles, with which they were priced before, gave 28 %, and 2.5 times the time of
# 197 tokens: they take 192.) A mask of 16 bits takes the L2 cache .125 cycles a score, and four instructions to be
# loaded, widened and added; a random number for dropout .23, from three calls.
CUDNN_HOPPER = FLASH_3._replace(
    tiles=((512, 128, 128),), causal_tiles_on={}, window_tiles=(), starts_at_window=False, block_cycles=1500,
    overlap_exponent=2.0, longest_first=False, shared_queries=0, split_queries=1,
    bias_cycles=2 / CACHE_BYTES_PER_CYCLE + 4 / LANES_OF_SM, dropout_cycles=0.23,
)  # fmt: skip
# The backward pass keeps 128 keys and takes 64 queries at a time, those with most queries first, and sums the gradients
# of heads that share keys afterwards (`fmha_reduce_head`). Set on 25 calls: mean error 6 % (12 % by
# FlashAttention-3's); heads of 256 take .76 of the measured time, for a reason that the profile does not tell. A mask
# takes .3 cycles with heads of 64 and .5 of 128, from four calls: .35 is taken for both.
CUDNN_HOPPER_BACKWARD = CUDNN_HOPPER._replace(
    tiles=((512, 128, 64),), block_cycles=5000, overlap_exponent=1.5, backward_score_cycles=0.15, bias_cycles=0.35,
    dropout_cycles=0.15, longest_of_head_first=True, sums_heads=True,
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
    bias_cycles=CUDNN_HOPPER.bias_cycles, dropout_cycles=CUDNN_HOPPER.dropout_cycles,
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

# CUTLASS's memory-efficient kernels. In 16 bits they take these cycles and reach these FLOP a cycle, whatever the
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
    masks_by_count=False, warps_read_all=False, speed=0.73,
)  # fmt: skip
EFFICIENT_IN_16_BITS = EFFICIENT._replace(
    score_cycles=0.24, backward_score_cycles=0.7, flop_per_cycle=(950, 690), wide_speed=(0.78, 0.22), speed=1.0,
)  # fmt: skip
EFFICIENT_BEFORE_AMPERE = EFFICIENT_IN_16_BITS._replace(speed=0.52)

# AMD's kernels in torch are compiled by Triton (AOTriton). From the one shape that was measured, 165 µs for 16 x 16
# causal heads of 559 tokens on MI300X, if half of that is the softmax: right in magnitude, no more.
AOTRITON = FLASH_2._replace(
    tiles=((64, 128, 128), (512, 128, 64)), tiles_on={}, causal_tiles_on={}, holds_tiles=False,
    masks_by_count=False, warps_read_all=False, score_cycles=0.35, backward_score_cycles=1.3, speed=0.44,
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
FLEX = FLASH_2._replace(tiles_on={}, causal_tiles_on={}, holds_tiles=False, masks_by_count=False, warps_read_all=False)
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
# Before torch 2.13 heads of 192 had no entry for Ampere and Ada. Torch 2.15 has others on data-centre Blackwell.
FLEX_TILES_BEFORE_2_13 = {**FLEX_TILES, 8: {64: (128, 64), 128: (128, 64), 256: (32, 64)}}
FLEX_TILES_OF_2_15 = {**FLEX_TILES, 10: {64: (128, 64), 128: (128, 128), 192: (128, 128), 256: (64, 32)}}
FLEX_BACKWARD_TILES_OF_2_15 = {**FLEX_BACKWARD_TILES, 10: ((64, 64, 32), (128, 128, 64), (256, 64, 64))}
FLEX_KEY_SHARE = 4 / 7  # of the backward pass's products, those of blocks that keep keys

# Where blocks differ in length, the SMs run out of work at different times: the last ends so much of the longest block
# after the mean. Simulated for FlashAttention-2's grids with two blocks on an SM: .6 to 1.2, lower for long sequences.
ATTENTION_TAIL = 0.7
# Where each head begins with its longest block, as in FlashAttention-2's backward pass, the last blocks are short: .45
# to .65 with 8 to 32 blocks a head, .47 with 64, .39 with 96, .1 with 128 and .02 with 256, for 16 to 256 heads on 132
# SMs (simulated). This times the root of 1 - blocks / SMs comes within .1 of all.
OF_HEAD_TAIL = 0.6

# Shared memory of an SM where no table has it, and what the system takes of it for each thread block (CUDA C++
# Programming Guide, table of technical specifications).
OTHER_SHARED_MEMORY_KB = 228
BLOCK_RESERVED_KB = 1

# A kernel that splits the keys is taken if the blocks are fewer than this share of those that the device holds; of the
# numbers of slices, the first that fills the last wave .85 as well as the best (FlashAttention's num_splits_heuristic).
FEW_BLOCKS, SLICE_FILL, MOST_SLICES = 0.8, 0.85, 128

# Seconds of the kernel that combines the slices, besides its traffic and the slices themselves: the smallest kernel and
# two trips to memory. A block of it adds up slice after slice, each a trip to the L2 cache.
COMBINE_SECONDS = 4e-6

# Multiples to which head dimensions are padded, up to 128 and above.
HEAD_DIMENSION_MULTIPLES = (32, 64)

# Bytes of an element of dq in addition to those of the op's tensors: FlashAttention's backward sets a copy in fp32 to
# zero, adds to it, and converts it, and another kernel reads the output and its gradient for the row sums. The copy of
# FlashAttention-2 has a multiple of 128 queries (`seqlen_q_rounded` in flash_api.cpp).
DQ_COPY_BYTES, ROW_SUM_BYTES = 12, 4
DQ_COPY_QUERIES = 128
