"""DeepSpeed's engine around four linear layers; the stage of ZeRO is the argument."""

import sys

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


net = Net()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": int(sys.argv[1])},
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(4):
    x = torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x, x))
    engine.step()
