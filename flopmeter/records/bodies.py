"""What kernels that are generated for one program do inside, which no schema tells. The records compare by value."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from torch._ops import OpOverload

from flopmeter.records.tensors import TensorSpec


class BodyOp(NamedTuple):
    """An op inside of a kernel, on one element: the fields of a `Call`."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class BlockCount(NamedTuple):
    """The blocks of scores that a BlockMask leaves to compute, summed over all its squares of queries x keys."""

    squares: int  # sequences x heads of the mask; those of the queries share them
    block: tuple[int, int]  # queries and keys of one
    computed: int  # blocks
    pairs: int  # (query, key) pairs in them; a block at the edge has fewer than `block`
    masked_pairs: int  # of those, in partial blocks, on which mask_mod runs
    seen_keys: int  # in columns of blocks of which some are computed
    passes_diagonal: bool  # some queries see keys of later blocks than their own


class FlexBody(NamedTuple):
    """What a flex_attention kernel does with each score, and with how many."""

    blocks: BlockCount
    score: tuple[BodyOp, ...]  # score_mod on one score; its gradient too in the backward pass
    mask: tuple[BodyOp, ...]  # mask_mod on one pair
    splits_keys: bool  # the template for few queries, flex_decoding


ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas")
"""Operations of TTIR that read and write where they work."""


class TritonOp(NamedTuple):
    """An operation of Triton's intermediate language (TTIR), in all programs of a launch, the masked lanes included."""

    name: str  # 'arith.mulf', 'tt.dot', ...
    dtype: str
    number: int  # of elements, or of multiply-adds of a product
    dot: tuple[int, int, int] | None = None  # m, n and k of a product


class TritonBody(NamedTuple):
    """What the programs of a Triton kernel do."""

    kernel: str
    programs: int  # of the grid
    ops: tuple[TritonOp, ...]
    unknown: tuple[str, ...]  # why it is not known how often other ops run; empty: `ops` is complete
    is_longest: bool = False  # at a branch on a value in memory, `ops` has those of the longer way
    moves_unknown: bool = False  # it loads and stores more than `ops` has, how much depends on values in memory

    def times(self, factor: Fraction) -> TritonBody:
        """So many times the programs."""
        ops = tuple(op._replace(number=int(op.number * factor)) for op in self.ops)
        return self._replace(programs=int(self.programs * factor), ops=ops)
