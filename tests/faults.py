"""Programs with a known fault, each with its mended twin, and what the first advice has to say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter, Report
from flopmeter.models import BUILTINS, training_step
from flopmeter.models.gpt2 import GPT2, GPT2Config

H100, RTX_3090 = "h100-sxm5-80gb", "rtx-3090"
HALF = torch.bfloat16
Run = Callable[[], object]


class Fault(NamedTuple):
    program: Callable[[bool], Run]  # called with whether it is mended
    remedy: str  # what the first advice names
    hardware: str = H100
    mode: str = "eager"
    times: int = 1  # the mended program does so many times the work

    def report(self, *, is_mended: bool) -> Report:
        run = self.program(is_mended)
        with FlopMeter(self.hardware, checks="hold") as meter:
            run()
        return meter.report(mode=self.mode)


class Attention(nn.Module):
    """Causal, with a mask, a softmax and two products, or with one call."""

    def __init__(self, width: int, heads: int, is_fused: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_fused = heads, is_fused

    def forward(self, x):
        _, length, width = x.shape
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            mixed = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        return x + self.out(mixed.transpose(1, 2).contiguous().flatten(2))


def eager_attention(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = nn.Sequential(*(Attention(1024, 16, is_mended) for _ in range(4))).to(HALF)
        x = torch.empty(8, 1024, 1024, dtype=HALF)
    return lambda: model(x).sum().backward()


def fp32_by_accident(is_mended: bool) -> Run:
    model, inputs = BUILTINS["bert-base"](batch=32, dtype=HALF if is_mended else torch.float32)
    return torch.no_grad()(lambda: model(*inputs))


def nchw_under_amp(is_mended: bool) -> Run:
    model, (x,) = BUILTINS["resnet-50"](batch=128, dtype=torch.float32)
    if is_mended:
        model = model.to(memory_format=torch.channels_last)

    def forward():
        with torch.no_grad(), torch.autocast("cuda", HALF):
            model.eval()(x.to(memory_format=torch.channels_last) if is_mended else x)  # each batch is turned

    return forward


def odd_vocabulary(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = GPT2(GPT2Config(layers=12, width=768, heads=12, vocabulary=50304 if is_mended else 50257)).to(HALF)
        tokens = torch.empty(8, 1024, dtype=torch.long)
    return lambda: model.loss(tokens).backward()


def tiny_batch(is_mended: bool) -> Run:
    model, inputs = BUILTINS["bert-base"](batch=64 if is_mended else 1, seq=128)
    return torch.no_grad()(lambda: model(*inputs))


def optimizer_op_by_op(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, dtype=HALF) for _ in range(24)))
        x = torch.empty(8192, 4096, dtype=HALF)
    with FlopMeter(H100):  # its state is there before the step that is metered
        optimizer = torch.optim.AdamW(model.parameters(), fused=is_mended)
        training_step(model, (x,), optimizer)
    return lambda: training_step(model, (x,), optimizer)


def sync_in_the_loop(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, dtype=HALF) for _ in range(4)))
        x = torch.empty(8192, 2048, dtype=HALF)

    def steps():
        for _ in range(8):
            is_fine = torch.isfinite(model(x)).all()
            if not is_mended:
                bool(is_fine)

    return torch.no_grad()(steps)


def needless_checkpoints(is_mended: bool) -> Run:
    with torch.device("meta"):
        make = lambda: nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, dtype=HALF)  # noqa: E731
        layers = nn.ModuleList(make() for _ in range(4))
        x = torch.empty(16, 512, 1024, dtype=HALF, requires_grad=True)

    def step():
        y = x
        for layer in layers:
            y = layer(y) if is_mended else checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()

    return step


def unpinned_copies(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, dtype=HALF) for _ in range(8)))
    batch = torch.empty(2048, 4096, dtype=HALF)
    return torch.no_grad()(lambda: [model(batch.to("meta", non_blocking=is_mended)) for _ in range(8)])


class Windowed(nn.Module):
    """Moves its window's length to the device in each call, as the caches of transformers' sliding windows do."""

    def __init__(self, is_mended: bool):
        super().__init__()
        self.linear = nn.Linear(4096, 4096, dtype=HALF)
        self.register_buffer("length", torch.tensor(512), persistent=False)
        self.is_mended = is_mended

    def forward(self, x):
        return self.linear(x) + (self.length if self.is_mended else torch.tensor(512).to(x.device))


def host_tensor_in_forward(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = nn.Sequential(*(Windowed(is_mended) for _ in range(8)))
        x = torch.empty(2048, 4096, dtype=HALF)
    return torch.no_grad()(lambda: [model(x) for _ in range(8)])


def many_graphs(is_mended: bool) -> Run:
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)).to(HALF).eval() for _ in range(12)
        ]
        x = torch.empty(8192, 1024, dtype=HALF)
    if is_mended:
        return torch.no_grad()(lambda: torch.compile(lambda y: nn.Sequential(*layers)(y))(x))
    parts = [torch.compile(layer.forward) for layer in layers]

    def run():
        y = x
        for part in parts:
            y = part(y)

    return torch.no_grad()(run)


class NormWrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def compiled_in_part(is_mended: bool) -> Run:
    """As where only attention is compiled, for flex_attention, and all else is eager."""
    with torch.device("meta"):
        norms = [NormWrittenOut().to(HALF) for _ in range(6)]
        layers = [nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).to(HALF).eval() for _ in norms]
        x = torch.empty(8192, 1024, dtype=HALF)
    parts = [layer if is_mended else torch.compile(layer.forward) for layer in layers]

    def run(y):
        for norm, part in zip(norms, parts, strict=True):
            y = y + part(norm(y))
        return y

    whole = torch.compile(run) if is_mended else run
    return torch.no_grad()(lambda: whole(x))


def attention_in_fp32(is_mended: bool) -> Run:
    with torch.device("meta"):
        qkv = nn.Linear(1024, 3072, dtype=HALF)
        x = torch.empty(8, 1024, 1024, dtype=HALF)

    def step():
        q, k, v = qkv(x).view(8, 1024, 3, 16, 64).permute(2, 0, 3, 1, 4)
        if not is_mended:
            q, k, v = q.float(), k.float(), v.float()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).to(HALF).sum().backward()

    return step


def mask_for_causal(is_mended: bool) -> Run:
    with torch.device("meta"):
        q, k, v = (torch.empty(8, 16, 2048, 64, dtype=HALF, requires_grad=True) for _ in "qkv")
        mask = torch.empty(2048, 2048, dtype=HALF)
    settings = {"is_causal": True} if is_mended else {"attn_mask": mask}
    return lambda: F.scaled_dot_product_attention(q, k, v, **settings).sum().backward()


def dense_gradient_of_a_table(is_mended: bool) -> Run:
    with torch.device("meta"):
        table = nn.EmbeddingBag(10_000_000, 64, mode="sum", sparse=is_mended)
        tail = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))
        ids = torch.empty(4096, 20, dtype=torch.long)
    optimizer = torch.optim.SGD([*table.parameters(), *tail.parameters()], lr=0.1)

    def step():
        optimizer.zero_grad()
        tail(table(ids)).sum().backward()
        optimizer.step()

    return step


def filled_gradients(is_mended: bool) -> Run:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, dtype=HALF) for _ in range(16)))
        x = torch.empty(1024, 4096, dtype=HALF)

    def step():
        model.zero_grad(set_to_none=is_mended)
        model(x).sum().backward()

    with FlopMeter(H100):
        step()  # the first makes the gradients
    return step


def clipped_one_by_one(is_mended: bool) -> Run:
    model, inputs = BUILTINS["bert-base"](batch=4, seq=128)

    def step():
        model.zero_grad()
        model(*inputs).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=is_mended)

    return step


class Grouped(nn.Module):
    """Attention of 16 heads that share keys and values of 4, copied before the kernel in one of two ways."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.qkv, self.out, self.before = nn.Linear(1024, 1536), nn.Linear(1024, 1024), before

    def forward(self, x):
        parts = self.qkv(x).split((1024, 256, 256), dim=2)
        q, k, v = (self.before(part.unflatten(2, (-1, 64)).transpose(1, 2)) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape != q.shape)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def before_attention(copy: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bool], Run]:
    def program(is_mended: bool) -> Run:
        with torch.device("meta"):
            model = nn.Sequential(*(Grouped((lambda part: part) if is_mended else copy) for _ in range(2))).to(HALF)
            x = torch.empty(8, 2048, 1024, dtype=HALF)
        return lambda: model(x).sum().backward()

    return program


def repeated(part: torch.Tensor) -> torch.Tensor:
    return part if part.shape[1] == 16 else part.repeat_interleave(4, dim=1)


def mask_repeated_for_all(is_mended: bool) -> Run:
    """Which sequences all share: the mask goes through memory once for each of them."""
    with torch.device("meta"):
        q = torch.empty(4, 16, 2048, 64, dtype=HALF)
        masks = [torch.empty(2048, 2048, dtype=torch.bool) for _ in range(4)]

    def step():
        y = q
        for mask in masks:
            all_masks = mask.expand(4, 1, -1, -1)
            y = F.scaled_dot_product_attention(y, y, y, all_masks if is_mended else all_masks.contiguous())

    return step


def one_hot_product(is_mended: bool) -> Run:
    with torch.device("meta"):
        table = nn.Embedding(32000, 512, dtype=HALF)
        tail = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(HALF)
        ids = torch.empty(8, 512, dtype=torch.long)

    def step():
        rows = table(ids) if is_mended else F.one_hot(ids, 32000).to(HALF) @ table.weight
        tail(rows).sum().backward()

    return step


def a_pass_for_each_loss(is_mended: bool) -> Run:
    with torch.device("meta"):
        body = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(6))).to(HALF)
        heads = nn.ModuleList(nn.Linear(2048, 512, dtype=HALF) for _ in range(2))
        x = torch.empty(8192, 2048, dtype=HALF)

    def step():
        body.zero_grad()
        heads.zero_grad()
        features = body(x)
        first, second = (head(features).square().mean() for head in heads)
        if is_mended:
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
            second.backward()

    return step


class WideNorm(nn.LayerNorm):
    def forward(self, x):
        wide = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return wide.to(x.dtype)


def casts_around_norms(is_mended: bool) -> Run:
    norm = nn.LayerNorm if is_mended else WideNorm
    with torch.device("meta"):
        parts = (part for _ in range(4) for part in (norm(1024), nn.Linear(1024, 1024), nn.ReLU()))
        model, x = nn.Sequential(*parts).to(HALF), torch.empty(16384, 1024, dtype=HALF)
    return lambda: model(x).sum().backward()


def scores_of_all_tokens(is_mended: bool) -> Run:
    """Of which the last one of each prompt is wanted, in fp32."""
    with torch.device("meta"):
        body, head = nn.Linear(2048, 2048, dtype=HALF), nn.Linear(2048, 50304, bias=False, dtype=HALF)
        x = torch.empty(4, 1024, 2048, dtype=HALF)

    @torch.no_grad()
    def step():
        hidden = body(x)
        (head(hidden[:, -1:]).float() if is_mended else head(hidden).float()[:, -1:]).softmax(-1).argmax(-1)

    return step


def loop_over_cells(kind: str, layers: int) -> Callable[[bool], Run]:
    def program(is_mended: bool) -> Run:
        with torch.device("meta"):
            cells = nn.ModuleList(getattr(nn, f"{kind}Cell")(256, 256) for _ in range(layers))
            whole, x = getattr(nn, kind)(256, 256, layers, batch_first=True), torch.empty(64, 16, 256)

        def outputs():
            if is_mended:
                return whole(x)[0]
            made, states = [], [torch.zeros(64, 256, device="meta") for _ in cells]
            memory = [torch.zeros(64, 256, device="meta") for _ in cells]
            for step in x.unbind(1):
                for place, cell in enumerate(cells):
                    if kind == "LSTM":
                        states[place], memory[place] = cell(step, (states[place], memory[place]))
                    else:
                        states[place] = cell(step, states[place])
                    step = states[place]
                made.append(step)
            return torch.stack(made, 1)

        return lambda: outputs().sum().backward()

    return program


def cache_grown_by_cat(is_mended: bool) -> Run:
    """Six tokens of eight sequences after 8,000 others, in two layers."""
    with torch.device("meta"):
        layers = [nn.Linear(1024, 3072, dtype=HALF) for _ in range(2)]
        x = torch.empty(8, 1, 1024, dtype=HALF)
        caches = [[torch.empty(8, 16, 8000 + 6 * is_mended, 64, dtype=HALF) for _ in "kv"] for _ in layers]

    def extended(cache, part, token):
        if not is_mended:
            return torch.cat([cache, part], 2)
        cache[:, :, 8000 + token : 8001 + token] = part
        return cache

    @torch.no_grad()
    def steps():
        held = [list(pair) for pair in caches]
        for token in range(6):
            y = x
            for layer, pair in zip(layers, held, strict=True):
                q, *new = (part.unflatten(2, (16, 64)).transpose(1, 2) for part in layer(y).chunk(3, 2))
                pair[:] = [extended(cache, part, token) for cache, part in zip(pair, new, strict=True)]
                k, v = (cache[:, :, : 8001 + token] for cache in pair)
                y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return steps


def layer_called_for_each_step(kind: str) -> Callable[[bool], Run]:
    def program(is_mended: bool) -> Run:
        with torch.device("meta"):
            table, layer = nn.Embedding(1000, 256), getattr(nn, kind)(256, 256, batch_first=True)
            words = torch.zeros(64, 32, dtype=torch.long)

        def outputs():
            x = table(words)
            if is_mended:
                return layer(x)[0]
            made, state = [], None
            for place in range(32):
                out, state = layer(x[:, place : place + 1], state)
                made.append(out)
            return torch.cat(made, 1)

        def step():
            table.zero_grad()
            layer.zero_grad()
            outputs().square().mean().backward()

        return step

    return program


FAULTS = {
    "contiguous copies before attention": Fault(before_attention(torch.Tensor.contiguous), "no .contiguous()"),
    "heads repeated for attention": Fault(
        before_attention(repeated), "scaled_dot_product_attention(..., enable_gqa=True)", "a100-sxm4-80gb"
    ),
    "a mask repeated for all sequences": Fault(mask_repeated_for_all, "no .contiguous()"),
    "a one-hot product": Fault(one_hot_product, "nn.Embedding"),
    "a backward pass for each loss": Fault(a_pass_for_each_loss, "one backward() of the sum of the losses"),
    "casts around norms": Fault(casts_around_norms, "bfloat16 there too"),
    "scores of all tokens": Fault(scores_of_all_tokens, "take the rows that are read before the product"),
    "a loop over LSTM cells": Fault(loop_over_cells("LSTM", 1), "nn.LSTM over the whole sequence"),
    "a loop over two GRU cells": Fault(loop_over_cells("GRU", 2), "nn.GRU over the whole sequence"),
    "a cache grown by cat": Fault(cache_grown_by_cat, "write each step's part into memory for all of them"),
    "an LSTM called for each step": Fault(layer_called_for_each_step("LSTM"), "nn.LSTM over the whole sequence"),
    "a GRU called for each step": Fault(layer_called_for_each_step("GRU"), "nn.GRU over the whole sequence"),
    "attention in fp32": Fault(attention_in_fp32, "bfloat16 there too"),
    "a mask for is_causal": Fault(mask_for_causal, "is_causal=True"),
    "dense gradient of a table": Fault(dense_gradient_of_a_table, "Embedding(sparse=True)"),
    "gradients filled with zeros": Fault(filled_gradients, "zero_grad(set_to_none=True)"),
    "clipped one by one": Fault(clipped_one_by_one, "torch._foreach_ functions"),
    "eager attention": Fault(eager_attention, "F.scaled_dot_product_attention"),
    "fp32 by accident": Fault(fp32_by_accident, "bfloat16: model.to(torch.bfloat16)"),
    "NCHW under AMP": Fault(nchw_under_amp, "model.to(memory_format=torch.channels_last)", RTX_3090),
    "vocabulary of 50257": Fault(odd_vocabulary, "pad 50257 to 50304"),
    "tiny batch": Fault(tiny_batch, "64 times the batch", times=64),
    "no fused optimizer": Fault(optimizer_op_by_op, "the optimizer's fused=True"),
    "sync in the loop": Fault(sync_in_the_loop, "keep the values on the device"),
    "recompute without need": Fault(needless_checkpoints, "no checkpointing"),
    "unpinned copies": Fault(unpinned_copies, "DataLoader(pin_memory=True)"),
    "a tensor of the host in forward": Fault(
        host_tensor_in_forward, "the tensor made on the device, or moved there once"
    ),
    "compiled in part": Fault(compiled_in_part, "torch.compile on these, too", mode="compiled"),
    "compile with breaks": Fault(many_graphs, "compile it as one", mode="compiled"),
}
