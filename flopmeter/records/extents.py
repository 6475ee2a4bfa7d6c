"""How many elements of a storage some strided regions cover together, each element counted once. The count follows from
shapes and strides; no element is visited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from math import gcd, prod
from typing import NamedTuple

_ORIGINS = 8  # how many starts of a grid's rows are tried; for slices of one tensor the first is right

Dim = tuple[int, int]  # (step, count): count elements, each a step after the one before


class Extent(NamedTuple):
    """The elements start + i·step + j·step' + ... of a storage, with ascending steps."""

    start: int
    dims: tuple[Dim, ...]

    @property
    def stop(self) -> int:
        return self.start + _span(self.dims)


@lru_cache(maxsize=4096)
def dims_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Dim, ...]:
    """The fewest dimensions that cover the same elements. Expanded dimensions are left out; a dimension that continues
    another one, or slides over it, is merged with it."""
    dims: list[Dim] = []
    for step, count in sorted((abs(s), n) for n, s in zip(shape, stride, strict=True) if s and n != 1):
        if dims and step % dims[-1][0] == 0 and step // dims[-1][0] <= dims[-1][1]:
            last, reached = dims[-1]
            dims[-1] = (last, reached + (count - 1) * (step // last))
        else:
            dims.append((step, count))
    return tuple(dims)


@lru_cache(maxsize=4096)
def count_one(dims: tuple[Dim, ...]) -> int:
    """Elements of one region without empty dimensions. Exact, except if three dimensions overlap and none of their
    steps divides another: then an upper bound."""
    clusters: list[list[Dim]] = []  # of dimensions that overlap; each fits between two steps of the next
    for dim in dims:
        if not clusters or dim[0] >= _span(_all(clusters)):
            clusters.append([dim])
            continue
        clusters[-1].append(dim)
        while len(clusters) > 1 and gcd(*(step for step, _ in clusters[-1])) < _span(_all(clusters[:-1])):
            last = clusters.pop()
            clusters[-1] += last
    return prod(_count_overlapping(cluster) for cluster in clusters)


def _count_overlapping(dims: Sequence[Dim]) -> int:
    """For two dimensions: i·a + j·b is the same element as (i + b/g)·a + (j - a/g)·b, where g is gcd(a, b)."""
    if len(dims) == 1:
        return dims[0][1]
    divisor = gcd(*(step for step, _ in dims))
    if len(dims) == 2:
        (a, m), (b, n) = dims
        return m * n - max(0, m - b // divisor) * max(0, n - a // divisor)
    return min(prod(count for _, count in dims), 1 + (_span(dims) - 1) // divisor)


def count_union(extents: Iterable[Extent]) -> int:
    """Elements that at least one of the regions covers. Exact if the regions are rectangles of one grid, such as slices
    of a tensor and of its reshapes; else no less than the union and no more than the sum."""
    total, stop = 0, 0
    group: list[Extent] = []
    for extent in sorted(set(extents)):
        if group and extent.start >= stop:  # no region before it reaches as far as this one
            total += _count_group(group)
            group = []
        stop = max(stop, extent.stop) if group else extent.stop
        group.append(extent)
    return total + _count_group(group)


def _count_group(group: Sequence[Extent]) -> int:
    """Elements of regions whose spans overlap."""
    if len(group) < 2:
        return sum(count_one(extent.dims) for extent in group)
    whole = max(extent.stop for extent in group) - group[0].start
    pitch = max(extent.dims[-1][0] for extent in group if extent.dims)
    if pitch == 1:
        return whole
    for origin in islice({extent.start % pitch: extent.start for extent in reversed(group)}.values(), _ORIGINS):
        rows = [_rows(extent, origin, pitch) for extent in group]
        if all(rows):
            return _count_rows([row for of_one in rows for row in of_one])
    return min(sum(count_one(extent.dims) for extent in group), whole)


class _Rows(NamedTuple):
    """`height` rows of a grid, in each of which the same elements are covered."""

    first: int
    height: int
    covered: Extent


def _rows(extent: Extent, origin: int, pitch: int) -> list[_Rows]:
    """The region as rectangles of a grid with rows of length `pitch`; [] if more than three would be needed."""
    has_rows = bool(extent.dims) and extent.dims[-1][0] == pitch
    below, count = (extent.dims[:-1], extent.dims[-1][1]) if has_rows else (extent.dims, 1)
    first, start = divmod(extent.start - origin, pitch)
    if start + _span(below) <= pitch:
        return [_Rows(first, count, Extent(start, below))]
    *inner, (step, lines) = below  # the row's end cuts between two lines, or not at all
    in_head = (pitch - start - _span(inner)) // step + 1
    again = start + in_head * step - pitch  # where it starts in the rows after the first
    if pitch % step or in_head < 1 or again < 0:
        return []
    per_row = pitch // step
    full, in_tail = divmod(lines - in_head, per_row)
    pieces = [_Rows(first, count, _lines(start, inner, step, in_head))]
    if full:
        pieces.append(_Rows(first + 1, full + count - 1, _lines(again, inner, step, per_row)))
    if in_tail:
        pieces.append(_Rows(first + 1 + full, count, _lines(again, inner, step, in_tail)))
    return pieces


def _count_rows(rows: Sequence[_Rows]) -> int:
    bounds = sorted({bound for row in rows for bound in (row.first, row.first + row.height)})
    return sum(
        (stop - start) * count_union(row.covered for row in rows if row.first <= start < row.first + row.height)
        for start, stop in pairwise(bounds)
    )


def _lines(start: int, inner: Sequence[Dim], step: int, count: int) -> Extent:
    return Extent(start, (*inner, (step, count)) if count > 1 else tuple(inner))


def _span(dims: Iterable[Dim]) -> int:
    return 1 + sum(step * (count - 1) for step, count in dims)


def _all(clusters: Iterable[Sequence[Dim]]) -> list[Dim]:
    return [dim for cluster in clusters for dim in cluster]
