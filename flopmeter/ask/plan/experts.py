"""Experts split over ranks: each rank has some of them, and tokens travel to the rank of their expert and back.

The modules are those of transformers: named `experts`, with parameters [experts, ...], called with tokens [tokens,
width], the experts picked for each and their weights [tokens, picked]. The exchange is that of DeepSpeed-MoE and
torchtitan: tokens are sorted by expert, counts go through one all-to-all, tokens through a second one, results through
a third.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flopmeter.torch_names import distributed as private


def experts_of(model: nn.Module) -> list[Any]:
    """The modules of experts that can be split."""
    return list(_experts(model).values())


def holders_of_experts(model: nn.Module) -> list[str]:
    """The names of the modules around them, which route tokens."""
    return [name.rpartition(".")[0] for name in _experts(model)]


def _experts(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if _is_experts(name, module)}


def _is_experts(name: str, module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if name.rpartition(".")[2] != "experts" or not isinstance(count, int) or not own:
        return False
    takes = len(inspect.signature(module.forward).parameters)  # 3; Llama 4 gives all experts all tokens instead
    return takes == len(("tokens", "picked", "weights")) and all(each.shape[0] == count for each in own)


def with_routing(ep: int, meter_options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of FlopMeter. How many tokens travel follows from a law: of equal shares, unless somebody says it."""
    return {"routing": "balanced", **meter_options} if ep > 1 else meter_options


def keep_part(experts: Any, ranks: int) -> None:
    """In place: the module has one of `ranks` equal parts of its experts."""
    experts.num_experts //= ranks
    for parameter in experts.parameters():
        parameter.data = parameter.data[: experts.num_experts].clone()


def split_experts(model: nn.Module, ranks: Sequence[int]) -> None:
    """In place: this rank keeps its part of the experts of each layer. `ranks`: global, this one among them."""
    if len(ranks) == 1:
        return
    group = dist.new_group(list(ranks))
    for module in experts_of(model):
        module.forward = partial(_exchanged, module.forward, module.num_experts, group)
        keep_part(module, len(ranks))


def _exchanged(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], every: int, group: Any, tokens: Tensor, picked: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """`run`: this rank's experts; `every`: how many all ranks have together."""
    ranks, each = group.size(), picked.shape[-1]
    order = picked.flatten().argsort(stable=True)
    sent = torch.bincount(picked.flatten(), minlength=every)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent_of, received_of = (counts.view(ranks, -1).sum(1).tolist() for counts in (sent, received))
    exchange = private.functional_collectives.all_to_all_single_autograd
    arrived = exchange(tokens[order // each], received_of, sent_of, group)
    own = torch.arange(every // ranks, device=tokens.device).repeat(ranks).repeat_interleave(received)
    made = run(arrived, own[:, None], torch.ones_like(own, dtype=weights.dtype)[:, None])
    back = exchange(made, sent_of, received_of, group)
    weighted = back * weights.flatten()[order, None].to(back.dtype)
    return torch.zeros_like(tokens).index_add_(0, order // each, weighted)
