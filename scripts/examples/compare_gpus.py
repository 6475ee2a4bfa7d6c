"""One model on three GPUs: GPT-2 reading eight sequences, in bf16.

    python scripts/examples/compare_gpus.py

Nothing but flopmeter is needed. The same from a shell, with devices of your own choice:

    flopmeter compare gpt2-124m --batch 8 --hardware l4,a100-sxm4-80gb,h100-sxm5-80gb
"""

from __future__ import annotations

import torch

from flopmeter import compare
from flopmeter.models import BUILTINS

GPUS = ("l4", "a100-sxm4-80gb", "h100-sxm5-80gb")
BATCH, LENGTH = 8, 1024


def main() -> None:
    model, inputs = BUILTINS["gpt2-124m"](batch=BATCH, seq=LENGTH)

    @torch.no_grad()
    def read() -> None:
        model(*inputs)

    print(compare(read, GPUS, items=BATCH * LENGTH, unit="tokens"))


if __name__ == "__main__":
    main()
