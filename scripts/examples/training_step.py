"""A training step as one writes it: autocast, activation checkpointing, gradient clipping, AdamW; eager and compiled.

    python scripts/examples/training_step.py

The program is run once, on meta tensors. Each mode is another report of the same trace.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter
from flopmeter.meter import Mode

MODES: tuple[Mode, ...] = ("eager", "compiled")
BATCH, LENGTH, WIDTH, DEPTH = 8, 512, 1024, 6


def main() -> None:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 16, batch_first=True) for _ in range(DEPTH))
        x = torch.empty(BATCH, LENGTH, WIDTH)
    optimizer = torch.optim.AdamW(layers.parameters())

    with FlopMeter("h100-sxm5-80gb") as meter:
        with torch.autocast("cuda", torch.bfloat16):
            hidden = x
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            loss = hidden.float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    reports = [meter.report(mode=mode) for mode in MODES]
    phases = [{row.name: row.seconds * 1e3 for row in report.rows("phase")} for report in reports]
    rows = [(f"{phase}, device ms", *(times[phase] for times in phases)) for phase in phases[0]]
    rows.append(("predicted, ms", *(report.seconds * 1e3 for report in reports)))
    rows.append(("MFU, %", *(100 * report.mfu for report in reports)))
    rows.append(("HFU, with the recomputed forward, %", *(100 * report.hfu for report in reports)))
    print(tabulate(rows, headers=("a training step", *MODES), floatfmt=".2f"))


if __name__ == "__main__":
    main()
