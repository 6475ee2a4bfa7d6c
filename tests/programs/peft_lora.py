"""LoRA on a small causal language model, with peft; trained by hand."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=500,
)  # fmt: skip
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).cuda()
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
for step in range(8):
    tokens = torch.randint(0, 500, (2, 32), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
