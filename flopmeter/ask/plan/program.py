"""The training program that is metered: torch's own parallel code around the model, as torchtitan applies it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flopmeter.ask.plan.experts import experts_of, split_experts
from flopmeter.ask.plan.splits import Recompute, Split
from flopmeter.ask.plan.subject import Subject
from flopmeter.device.cluster import Cluster
from flopmeter.device.hardware import Hardware
from flopmeter.meter import Mode
from flopmeter.report.quantities import figure
from flopmeter.torch_names import distributed as private
from flopmeter.torch_names.operators import Overloads, Packets, aten_overloads

LEAST_TOLD = 0.005  # of a model's parameters, whose idleness is told
MOST_NAMED = 3
PARAMETERS, REDUCED = torch.bfloat16, torch.float32  # the types in which matmuls run, and in which gradients are summed


class Where(NamedTuple):
    """The device, links and options that the program is metered with."""

    length: int  # tokens of a sequence
    hardware: Hardware
    cluster: Cluster
    mode: Mode
    meter_options: Mapping[str, Any]


def split_layers(
    subject: Subject, model: nn.Module, mesh: DeviceMesh, recompute: Recompute, expert_ranks: Sequence[int]
) -> None:
    """Tensor parallelism over mesh['tp'], experts over these global ranks, and recomputation of layers, in place."""
    split_experts(model, expert_ranks)
    if mesh["tp"].size() > 1:
        with _staying_tied(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Parallelize plan key")  # of another kind of layer
            parallelize_module(model, mesh["tp"], dict(subject.tensor_parallel(model)))
    for block in subject.layers_of(model):
        if recompute != "none":
            options: dict[str, Any] = {"context_fn": _selective} if recompute == "selective" else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


@contextmanager
def _staying_tied(model: nn.Module) -> Iterator[None]:
    """In this context parameters are split; those that were one, such as an embedding and a head that are tied, are one
    again afterwards if both are split alike."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield
    for first, *others in names.values():
        kept: Any = model.get_parameter(first)
        for name in others:
            other: Any = model.get_parameter(name)
            if getattr(kept, "placements", None) == getattr(other, "placements", None):
                path, _, own = name.rpartition(".")
                setattr(model.get_submodule(path), own, kept)


def shard(subject: Subject, model: nn.Module, mesh: DeviceMesh, split: Split) -> None:
    """FSDP2 around each layer, then around what is left: over fsdp x cp ranks, and copies over dp."""
    shards = "fsdp"
    if split.cp > 1:
        shards = "shards"
        getattr(mesh["fsdp", "cp"], private.FLATTEN)(shards)
    of_fsdp = mesh[shards] if split.dp == 1 else mesh["dp", shards]
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=PARAMETERS, reduce_dtype=REDUCED)}
    if split.gather == "step":  # else torch's own choice: layers are, what is outside of them is not
        options["reshard_after_forward"] = False
    of_experts = of_fsdp if split.ep == 1 else _mesh_of_experts(split)
    blocks: list[Any] = [*subject.layers_of(model)]
    for block in blocks:
        for experts in experts_of(block) if split.ep > 1 else ():
            fully_shard(experts, mesh=of_experts, **options)
        fully_shard(block, mesh=of_fsdp, **options)
    fully_shard(model, mesh=of_fsdp, **options)
    for block, following in pairwise(blocks) if split.ep > 1 else ():
        block.set_modules_to_forward_prefetch([following, *experts_of(following)])
        following.set_modules_to_backward_prefetch([block, *experts_of(block)])


def _mesh_of_experts(split: Split) -> DeviceMesh:
    """A mesh of the ranks that this rank's experts are sharded over, and of their copies over dp."""
    ranks = [[copy + rank for rank in split.expert_shards] for copy in split.group("dp")]
    names = ("dp", "of_experts") if split.dp > 1 else ("of_experts",)
    return DeviceMesh("meta", ranks if split.dp > 1 else ranks[0], mesh_dim_names=names)


def backward(subject: Subject, model: nn.Module, mesh: DeviceMesh, tokens: Tensor) -> None:
    """Forward and backward pass of a microbatch, tokens [batch, length] of which this rank has its part."""
    with _parted(mesh, tokens), loss_parallel() if mesh["tp"].size() > 1 else nullcontext():
        subject.loss(model, tokens).backward()


@contextmanager
def _parted(mesh: DeviceMesh, tokens: Tensor) -> Iterator[None]:
    if mesh["cp"].size() == 1:
        yield
        return
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
        yield


def optimizer_step(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Gradients clipped to a norm, then AdamW. Parameters of each mesh are a group: torch's lists take one mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()])

    def step() -> None:
        for group in groups.values():
            nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def without_gradients(model: nn.Module) -> Iterator[str]:
    """After a backward pass: a note on large parts that it has not reached, as what reads images is by token ids."""
    idle = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    numel = sum(model.get_parameter(name).numel() for name in idle)
    if numel > LEAST_TOLD * sum(each.numel() for each in model.parameters()):
        reached = [name for name, each in model.named_parameters() if each.grad is not None]
        parts = dict.fromkeys(_outermost(name, reached) for name in idle)
        yield (
            f"token ids do not reach {', '.join([*parts][:MOST_NAMED])} ({figure(numel / 1e9)} B parameters): no pass"
            " of theirs counts, but their gradients and optimizer state do"
        )


def _outermost(name: str, others: Sequence[str]) -> str:
    """The outermost module around a parameter that has none of the others in it."""
    path = name.split(".")
    around = (".".join(path[:depth]) for depth in range(1, len(path)))
    return next((each for each in around if not any(other.startswith(f"{each}.") for other in others)), name)


def give_gradients(parameters: Iterable[Tensor]) -> None:
    """As a backward pass leaves them, to those that are trained."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _selective() -> Any:
    """torchtitan's selective recomputation: attention, sums over ranks and every second product are kept."""
    products: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = func in _PRODUCTS
        products[context.is_recompute] += is_product
        is_kept = func in _KEPT and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_PRODUCTS = (aten_overloads.mm.default, aten_overloads._scaled_mm.default)  # a policy sees torchao's in fp8 as mm
_KEPT = (
    *_PRODUCTS,
    aten_overloads._scaled_dot_product_flash_attention.default,
    aten_overloads._scaled_dot_product_cudnn_attention.default,
    aten_overloads._scaled_dot_product_efficient_attention.default,
    Overloads(Packets("_c10d_functional")).reduce_scatter_tensor.default,
)
