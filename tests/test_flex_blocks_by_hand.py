"""The blocks of a BlockMask that flex_attention computes, beside a count pair by pair."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest

from flopmeter.trace import flex_blocks

HIGH, WIDE = 16, 32  # of a block
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "a window": lambda b, h, q, k: (q >= k) & (q - k < 40),
    "another for each head": lambda b, h, q, k: q * (h + 1) >= k,
    "another for each sequence": lambda b, h, q, k: k < 30 + 25 * b,
    "only the future": lambda b, h, q, k: (k > q + 50) | (k == 100),
    "none": lambda b, h, q, k: (q < 0) & (k < 0),
    "all": lambda b, h, q, k: q >= 0 * k,
}


def by_pairs(mask_mod, sequences: int, heads: int, queries: int, keys: int):
    """What BlockCount holds, from sets of pairs."""
    computed = pairs = masked = seen_keys = 0
    passes_diagonal = False
    for b in range(sequences):
        for h in range(heads):
            seen = set()
            for top in range(0, queries, HIGH):
                for left in range(0, keys, WIDE):
                    block = [
                        (q, k)
                        for q in range(top, min(top + HIGH, queries))
                        for k in range(left, min(left + WIDE, keys))
                    ]
                    visible = sum(bool(mask_mod(b, h, q, k)) for q, k in block)
                    # torch pads a mask to whole blocks with pairs that nobody sees.
                    is_full = visible == HIGH * WIDE
                    if visible:
                        computed, pairs = computed + 1, pairs + len(block)
                        masked += 0 if is_full else len(block)
                        seen |= {k for _, k in block}
                        passes_diagonal |= left > max(q for q, _ in block)
            seen_keys += len(seen)
    return computed, pairs, masked, seen_keys, passes_diagonal


NO_VALUES = Made(values=None, real=lambda given: given)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(100, 150), (64, 64)])
def test_blocks_are_counted_as_pair_by_pair(name, queries, keys, monkeypatch):
    """However many of them are looked at together."""
    mask = Made(block=(HIGH, WIDE), mask_mod=MASKS[name])
    shape = 2, 3, -(-queries // HIGH), -(-keys // WIDE)
    expected = by_pairs(MASKS[name], 2, 3, queries, keys)
    for most_pairs in (1, 3 * HIGH * WIDE, 2**30):
        monkeypatch.setattr(flex_blocks, "MOST_PAIRS", most_pairs)
        partial, full = flex_blocks._evaluate(mask, (), shape, queries, keys, NO_VALUES)
        found = flex_blocks._count(partial, full, mask.block, queries, keys)
        assert found[2:] == expected
        assert found[:2] == (6, (HIGH, WIDE))
