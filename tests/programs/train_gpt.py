"""A small GPT, trained as people do on one GPU: autocast, pinned memory, gradient clipping, a checkpoint, a log line.

python train_gpt.py [--device cuda] [--dtype bfloat16] [--compile] [--width 64] [--layers 2] [--batch 4] ...
"""

import argparse
import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--vocabulary", type=int, default=128)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--eval-interval", type=int, default=10)
parser.add_argument("--out", default="out")
args = parser.parse_args()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(args.width, 3 * args.width)
        self.c_proj = nn.Linear(args.width, args.width)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, args.heads, c // args.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=args.dropout if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(args.width), nn.LayerNorm(args.width), Attention()
        self.c_fc, self.c_proj = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.length, args.width)
        self.h = nn.ModuleList(Block() for _ in range(args.layers))
        self.ln_f = nn.LayerNorm(args.width)
        self.lm_head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        device = idx.device
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
device_type = "cuda" if "cuda" in args.device else "cpu"
dtype = getattr(torch, args.dtype)
context = nullcontext() if dtype is torch.float32 else torch.amp.autocast(device_type=device_type, dtype=dtype)
data = np.arange(100_000, dtype=np.uint16) % args.vocabulary


def get_batch():
    ix = torch.randint(len(data) - args.length, (args.batch,))
    x = torch.stack([torch.from_numpy(data[i : i + args.length].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + args.length].astype(np.int64)) for i in ix])
    if device_type == "cuda":
        return x.pin_memory().to(args.device, non_blocking=True), y.pin_memory().to(args.device, non_blocking=True)
    return x.to(args.device), y.to(args.device)


model = GPT().to(args.device)
print("parameters on", next(model.parameters()).device, next(model.parameters()).is_cuda)
scaler = torch.amp.GradScaler(device_type, enabled=args.dtype == "float16")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=device_type == "cuda")
raw_model = model
if args.compile:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        with context:
            _, loss = model(*get_batch())
        losses[k] = loss.item()
    model.train()
    return losses.mean()


best = 1e9
X, Y = get_batch()
for step in range(args.steps):
    start = time.time()
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * 0.5 * (1.0 + math.cos(math.pi * step / args.steps))
    if step % args.eval_interval == 0:
        estimate = estimate_loss()
        print(f"step {step}: val loss {estimate:.4f}")
        if estimate < best:
            best = estimate
            os.makedirs(args.out, exist_ok=True)
            state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, os.path.join(args.out, "checkpoint.pt"))
    for _ in range(args.accumulate):
        with context:
            logits, loss = model(X, Y)
            loss = loss / args.accumulate
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(f"step {step}: loss {loss.item() * args.accumulate:.4f} norm {norm:.4f} {1e3 * (time.time() - start):.1f} ms")
print("done")
