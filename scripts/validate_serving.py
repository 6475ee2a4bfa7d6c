"""Steps of Llama-3-8B and 70B as sums of measured kernels: DIR has gemm.csv and attention.csv of aiconfigurator.

    python scripts/validate_serving.py DIR

For each model, degree of tensor parallelism and device, the measured products of its projections and the measured
attention of its heads are summed, and beside them what flopmeter predicts for the same kernels. The files have half of
the shapes, drawn by chance, so that no step is there as a whole: a line sums whatever a model's kernels have of
decoding (at most 64 tokens a product), of prefill (at least 1,024) and of what lies between.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate
from validate_attention import attentions
from validate_gemm import gemms
from validation_rows import Line, Row

DEVICES = ("h100-sxm5-80gb", "h200-sxm-141gb", "l40s", "a100-sxm4-80gb")
DECODING, PREFILL = 64, 1024  # tokens of a product: at most, at least
LEAST_KERNELS = 5  # that a line sums


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
            if "cache and plan" not in title:
                yield from ((name, "prefill" if "prefill" in title else "decoding", row) for row in rows)


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
