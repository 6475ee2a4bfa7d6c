"""A GPT of Transformer Engine's layers, in bf16 or in a recipe of low precision."""

import argparse

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe

WORDS, WIDTH, HEADS, LENGTH, BATCH = 1024, 256, 4, 128, 4

parser = argparse.ArgumentParser()
parser.add_argument("--recipe")
parser.add_argument("--layers", type=int, default=2)
args = parser.parse_args()


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.bfloat16, device="cuda")
        options = {"params_dtype": torch.bfloat16, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        layers = (
            te.TransformerLayer(WIDTH, 4 * WIDTH, HEADS, layer_number=i + 1, **options) for i in range(args.layers)
        )
        self.layers = nn.ModuleList(layers)
        self.head = te.LayerNormLinear(WIDTH, WORDS, bias=False, params_dtype=torch.bfloat16)
        self.angles = te.RotaryPositionEmbedding(WIDTH // HEADS)(LENGTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return self.head(x)


model = Gpt()
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-4, master_weights=True)
precision = getattr(recipe, args.recipe)() if args.recipe else None
for _ in range(10):
    tokens = torch.randint(0, WORDS, (LENGTH + 1, BATCH), device="cuda")
    with te.fp8_autocast(enabled=precision is not None, fp8_recipe=precision):
        logits = model(tokens[:-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
