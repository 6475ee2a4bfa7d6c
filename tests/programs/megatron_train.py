"""Megatron-Core's GPT of two layers, in fp32, over two ranks of tensor parallelism."""

import os

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
model_parallel_cuda_manual_seed(123)
config = TransformerConfig(
    num_layers=2, hidden_size=512, num_attention_heads=8, use_cpu_initialization=True, pipeline_dtype=torch.float32
)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=1000, max_sequence_length=128).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 1000, (4, 128), device="cuda")
    positions = torch.arange(128, device="cuda")[None].expand(4, -1)
    mask = torch.ones(4, 1, 128, 128, device="cuda", dtype=torch.bool)
    model(tokens, positions, mask, labels=tokens).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
