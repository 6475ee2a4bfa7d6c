"""Steps of Llama-3-8B and 70B as sums of measured kernels: DIR has gemm.csv and attention.csv of aiconfigurator.

    python scripts/validate_serving.py DIR

For each model, degree of tensor parallelism and device, the measured products of its projections and the measured
attention of its heads are summed, and beside them what flopmeter predicts for the same kernels. The files have half of
the shapes, drawn by chance, so that no step is there as a whole. A line of the first table sums whatever a model's
kernels have of decoding (at most 64 tokens a product), of prefill (at least 1,024) and of what lies between. The second
table has whole steps: each kernel of a layer, and beside its prediction that times what the measured kernels nearest
to it in shape take of theirs, so that each kernel weighs what it weighs in a step. It has a line for each library whose
attention was measured; on A100 and L40S `flopmeter serve` prices vLLM's, and `flash_attention` is another one there
(SGLang's build of FlashAttention-3 for Ampere).
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate
from validate_attention import attentions
from validate_gemm import gemms
from validation_rows import Line, Row

DEVICES = ("h100-sxm5-80gb", "h200-sxm-141gb", "l40s", "a100-sxm4-80gb")
DECODING, PREFILL = 64, 1024  # tokens of a product: at most, at least
LEAST_KERNELS = 5  # that a line sums
STEPS = {"decoding": ((1, 1024), (8, 4096), (32, 1024), (64, 2048), (128, 1024)), "prefill": ((1, 2048), (4, 2048))}
"""Sequences, and tokens that each has in the cache (decoding) or brings (prefill)."""
NEAREST = 3  # measured kernels that tell about one of a step


class Model(NamedTuple):
    """What of a config the shapes of its kernels depend on."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int = 128

    def products(self, ranks: int) -> set[tuple[int, int]]:
        """(n, k) of the projections on one of so many ranks."""
        heads, kv_heads, hidden = self.heads // ranks, max(1, self.kv_heads // ranks), self.hidden // ranks
        mixed = heads * self.head_dim
        return {(mixed + 2 * kv_heads * self.head_dim, self.width), (self.width, mixed),
                (2 * hidden, self.width), (self.width, hidden)}  # fmt: skip


MODELS = {
    "Llama-3-8B": (Model(4096, 14336, 32, 8, 32), (1, 2, 4)),
    "Llama-3-70B": (Model(8192, 28672, 64, 8, 80), (1, 2, 4, 8)),
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/validate_serving.py DIR")
    folder = Path(sys.argv[1])
    sums: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for name, phase, row in _kernels(folder):
        for key in ((name, phase, row.gpu), (name, phase, "all")):
            sums[key].append((row.measured, row.predicted))
    shown = []
    for (name, phase, gpu), pairs in sorted(sums.items()):
        measured, predicted = (sum(column) for column in zip(*pairs, strict=True))
        if len(pairs) >= LEAST_KERNELS:
            shown.append(
                (name, phase, gpu, len(pairs), 1e3 * measured, 1e3 * predicted, 100 * (predicted / measured - 1))
            )
    headers = ("model", "phase", "device", "kernels", "measured ms", "predicted ms", "error %")
    print(tabulate(shown, headers, floatfmt=("", "", "", "", ".2f", ".2f", "+.1f")))
    of_steps = ("model", "phase", "device", "attention of", "steps", "mean %", "least %", "most %", "products alone %")
    print(tabulate(list(_steps(folder)), of_steps, floatfmt=("", "", "", "", "", "+.1f", "+.1f", "+.1f", "+.1f")))


def _steps(folder: Path) -> Iterator[tuple[object, ...]]:
    """How far the steps of each model, phase, device and library of attention are off, on all degrees of tensor
    parallelism."""
    for device in DEVICES:
        near = _Nearest(folder, device)
        for (name, (model, degrees)), (phase, sizes) in itertools.product(MODELS.items(), STEPS.items()):
            errors, of_products = defaultdict[str, list[float]](list), list[float]()
            for ranks, (sequences, tokens) in itertools.product(degrees, sizes):
                rows = sequences if phase == "decoding" else sequences * tokens
                products = [near.product(rows, *shape) for shape in sorted(model.products(ranks))]
                of_products.append(_error(products))
                heads = model.heads // ranks, max(1, model.kv_heads // ranks)
                for library, attention in near.attention(phase, sequences, tokens, *heads, model.head_dim):
                    errors[library].append(_error([*products, attention]))
            alone = statistics.fmean(of_products)
            for library, found in errors.items():
                yield (
                    name, phase, device, library, len(found), statistics.fmean(found), min(found), max(found), alone
                )  # fmt: skip


def _error(kernels: list[tuple[float, float]]) -> float:
    """In percent, of their sum."""
    return 100 * (sum(predicted for predicted, _ in kernels) / sum(measured for _, measured in kernels) - 1)


class _Nearest:
    """Kernels of steps on one device: predicted, and as the measured ones that are nearest in shape say."""

    def __init__(self, folder: Path, device: str):
        lines = {name: list(csv.DictReader((folder / f"{name}.csv").open())) for name in ("gemm", "attention")}
        self._products = [line for line in lines["gemm"] if (line["gpu"], line["kind"]) == (device, "bfloat16")]
        self._attention = [line for line in lines["attention"] if line["gpu"] == device]
        self._known: dict[tuple[str, ...], Row | None] = {}

    def product(self, m: int, n: int, k: int) -> tuple[float, float]:
        own = self._products[0] | {"m": str(m), "n": str(n), "k": str(k), "ms": "1"}
        return self._as_nearest(own, self._products, ("m", "n", "k"))

    def attention(
        self, phase: str, sequences: int, tokens: int, heads: int, kv_heads: int, head_dim: int
    ) -> Iterator[tuple[str, tuple[float, float]]]:
        """For each library whose kernel it is."""
        named = {"decoding": "generation", "prefill": "context"}[phase]
        same = {"phase": named, "head_dim": str(head_dim), "window_size": "0"}
        new, cached = (1, tokens) if phase == "decoding" else (tokens, 0)
        sizes = {
            "batch_size": sequences,
            "isl": new,
            "step": cached,
            "num_heads": heads,
            "num_key_value_heads": kv_heads,
        }
        for source in sorted({line["kernel_source"] for line in self._attention}):
            lines = [
                line
                for line in self._attention
                if line["kernel_source"] == source
                and all(line[key] == value for key, value in same.items() if key != "window_size")
                and not float(line["window_size"])
            ]
            own = {"gpu": self._products[0]["gpu"], "kernel_source": source, "ms": "1", **same}
            own |= {key: str(value) for key, value in sizes.items()}
            if self._row(own) is not None and len(lines) >= LEAST_KERNELS:
                yield source, self._as_nearest(own, lines, tuple(sizes))

    def _as_nearest(self, own: Line, lines: list[Line], sizes: tuple[str, ...]) -> tuple[float, float]:
        """Its predicted seconds, and these times measured over predicted of the nearest."""

        def distance(line: Line) -> float:
            return sum(abs(log((1 + float(line[size])) / (1 + float(own[size])))) for size in sizes)

        nearest = [row for row in map(self._row, sorted(lines, key=distance)[: 2 * NEAREST]) if row is not None]
        ratios = [row.measured / row.predicted for row in nearest[:NEAREST]]
        row = self._row(own)
        assert row is not None
        return row.predicted, row.predicted * statistics.fmean(ratios)

    def _row(self, line: Line) -> Row | None:
        """None for a kernel that is too short to have been measured, or of another library."""
        key = tuple(line.values())
        if key not in self._known:
            tables = attentions([line]) if "kernel_source" in line else gemms([line])
            rows = [row for title, rows in tables.items() if _is_as_measured(title) for row in rows]
            self._known[key] = rows[0] if rows else None
        return self._known[key]


def _kernels(folder: Path) -> Iterator[tuple[str, str, Row]]:
    """Each measured kernel that a model runs, once for each model and phase."""
    products, attention = (list(csv.DictReader((folder / f"{name}.csv").open())) for name in ("gemm", "attention"))
    for name, (model, degrees) in MODELS.items():
        shapes = set().union(*(model.products(ranks) for ranks in degrees))
        heads = {(model.heads // ranks, max(1, model.kv_heads // ranks)) for ranks in degrees}
        own = [line for line in products if _is_product(line, shapes)]
        for phase in ("decoding", "between", "prefill"):
            lines = [line for line in own if _phase(int(line["m"])) == phase]
            yield from ((name, phase, row) for row in gemms(lines)["GEMM, bf16"])
        for title, rows in attentions([line for line in attention if _is_attention(line, model, heads)]).items():
            if _is_as_measured(title):
                yield from ((name, "prefill" if "prefill" in title else "decoding", row) for row in rows)


def _is_as_measured(title: str) -> bool:
    """A row of attention holds the whole call of a framework, which also writes the cache and plans the slices."""
    return "attention" not in title or "cache and plan" in title


def _is_product(line: Line, shapes: set[tuple[int, int]]) -> bool:
    return line["gpu"] in DEVICES and line["kind"] == "bfloat16" and (int(line["n"]), int(line["k"])) in shapes


def _is_attention(line: Line, model: Model, heads: set[tuple[int, int]]) -> bool:
    own = int(line["num_heads"]), int(line["num_key_value_heads"])
    is_whole = line["phase"] != "encoder" and not float(line["window_size"]) and int(line["head_dim"]) == model.head_dim
    return line["gpu"] in DEVICES and is_whole and own in heads


def _phase(tokens: int) -> str:
    return "decoding" if tokens <= DECODING else "prefill" if tokens >= PREFILL else "between"


if __name__ == "__main__":
    main()
