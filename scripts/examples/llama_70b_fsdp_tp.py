"""A training step of Llama 3 70B: tensor and sequence parallel within a node, FSDP2 across nodes.

    python scripts/examples/llama_70b_fsdp_tp.py [LAYERS [RANKS]]        (80 layers, 1024 ranks; about a minute)

torch's own code runs as one of the ranks, on meta tensors. The layout is that of torchtitan's Llama 3.
"""

import sys
from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

from flopmeter import FlopMeter
from flopmeter.distributed import world
from flopmeter.models.llama import LLAMA_3_70B, Llama

HARDWARE, GPUS_PER_NODE, LENGTH = "h100-sxm5-80gb", 8, 8192
WHOLE, SPLIT = Replicate(), Shard(1)  # the sequence
BLOCK = {
    "norm1": tp.SequenceParallel(),
    "attention": tp.PrepareModuleInput(input_layouts=(SPLIT, None, None), desired_input_layouts=(WHOLE, None, None)),
    **{f"attention.{name}": tp.ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": tp.RowwiseParallel(output_layouts=SPLIT),
    "norm2": tp.SequenceParallel(),
    "mlp": tp.PrepareModuleInput(input_layouts=(SPLIT,), desired_input_layouts=(WHOLE,)),
    **{f"mlp.{name}": tp.ColwiseParallel() for name in ("gate", "up")},
    "mlp.down": tp.RowwiseParallel(output_layouts=SPLIT),
}
OUTSIDE = {
    "token": tp.RowwiseParallel(input_layouts=WHOLE, output_layouts=SPLIT),
    "norm": tp.SequenceParallel(),
    "head": tp.ColwiseParallel(input_layouts=SPLIT, use_local_output=False),
}


def main(layers: int = 80, ranks: int = 1024) -> None:
    with torch.device("meta"):
        model = Llama(replace(LLAMA_3_70B, layers=layers))
    with world(ranks, {"dp": ranks // GPUS_PER_NODE, "tp": GPUS_PER_NODE}) as mesh:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        tp.parallelize_module(model, mesh["tp"], OUTSIDE)
        for block in model.blocks:
            tp.parallelize_module(block, mesh["tp"], BLOCK)
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        with FlopMeter(HARDWARE) as meter, tp.loss_parallel():
            model.loss(torch.empty(1, LENGTH, dtype=torch.long, device="meta")).backward()
            optimizer.step()
    print(meter.report(), f"{LENGTH / GPUS_PER_NODE / meter.report().seconds:.0f} tokens/s a GPU", sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
