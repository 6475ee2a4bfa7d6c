"""Tensor parallelism by a config: one rank's share of a model is built from a config with fewer heads, narrower layers.

Not every model of transformers can be split that way. So the share is compared with the whole model: which blocks each
rank would keep whole, and which sums the ranks have to add up.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from flopmeter.ask.serve.cache import ServingError
from flopmeter.ask.serve.language_config import layer_attributes

MOST_UNSPLIT = 0.05  # of a layer without its experts: small projections lie whole on each rank in engines too
MOST_COPIED = 1.5  # all ranks together may hold this many times the model: some hold the same norms and heads
_SPLIT = (
    "num_attention_heads", "num_attention_heads_per_layer", "num_key_value_heads", "intermediate_size",
    "moe_intermediate_size", "vocab_size",
    "vocab_size_per_layer_input",
    "intermediate_size_mlp", "shared_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "dense_intermediate_size", "prefix_dense_intermediate_size",
    "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads",
    "num_heads", "mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups", "mamba_d_ssm",
    "mamba_expand", "expand",
)  # fmt: skip
"""What tensor parallelism splits: heads, the width of MLPs, of each expert and of state spaces, the vocabulary."""
_SHARED = ("num_key_value_heads", "mamba_n_groups", "n_groups")  # fewer of them than ranks: several ranks have the same
_FACTORS = ("mamba_expand", "expand")  # of the width: they need not stay whole


class _Factor(float):
    """A factor with which a whole number becomes a whole number again."""

    def __mul__(self, size: float) -> float:
        product = float(self) * size
        return int(product) if isinstance(size, int) and product.is_integer() else product

    __rmul__ = __mul__


def split_config(config: Any, ranks: int) -> Any:
    """The config of one rank's share. Raises ServingError where a size cannot be divided by the ranks."""
    share = copy.deepcopy(config)
    if ranks == 1:
        return share
    by_layer = layer_attributes(share)
    _state_sizes_of_heads(share, by_layer)
    if by_layer:
        share.per_layer_config = {
            place: {name: _share(name, getattr(layer, name), ranks) for name in by_layer}
            for place, layer in enumerate(share.per_layer_config)
        }
    for name in _SPLIT:
        if name not in by_layer and getattr(share, name, None):
            size = _share(name, getattr(share, name), ranks)
            if isinstance(size, float):
                vars(share)[name] = size  # past a check that it is whole
            else:
                setattr(share, name, size)
    if (getattr(share, "pad_token_id", None) or 0) >= share.vocab_size:
        share.pad_token_id = None  # another rank's
    return share


def _state_sizes_of_heads(config: Any, by_layer: Collection[str]) -> None:
    """Write down what the config leaves to be derived from the number of heads, before that number is split."""
    if getattr(config, "num_attention_heads", None) is None:
        return
    if "num_key_value_heads" not in by_layer and getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = config.num_attention_heads
    if "head_dim" not in by_layer and not getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // config.num_attention_heads


def _share(name: str, size: Any, ranks: int) -> Any:
    """A rank's share of a size of the config, which may be one for each layer; all of it where it is not split."""
    if name not in _SPLIT or not size:
        return size
    if isinstance(size, list):
        return [_share(name, each, ranks) for each in size]
    if name in _SHARED and ranks % size == 0:
        return 1
    if name in _FACTORS and size % ranks:
        return _Factor(size / ranks)
    if size % ranks and not name.startswith("vocab_size"):
        raise ServingError(f"{name} {size} cannot be split over {ranks} GPUs: take a divisor")
    return -(-size // ranks)


def distinct_parameters(model: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in model.parameters()}.values())


def numbers_in_layers(model: Any, config: Any) -> int:
    """Parameters without those of the vocabulary."""
    return sum(tensor.numel() for tensor in distinct_parameters(model) if config.vocab_size not in tensor.shape)


_BLOCK = re.compile(r".*?\.\d+\.[^.]+")  # the path of a block of a layer, at the start of a parameter's


def keep_width_of_heads(model: Any, whole: Any) -> None:
    """Restores the width of heads. Attention whose heads are as wide as the hidden size over their number, whatever the
    config says, came out with wider heads where there are fewer of them."""
    for own, all_of_it in zip(model.modules(), whole.modules(), strict=True):
        width, wide = getattr(all_of_it, "head_dim", None), getattr(own, "head_dim", None)
        projections: list[Any] = [getattr(own, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        if width == wide or not all(type(each) is nn.Linear for each in projections):
            continue
        derived = {name: value for name, value in vars(all_of_it).items() if isinstance(value, int | float)}
        vars(own).update({name: value for name, value in derived.items() if not name.startswith("num_")})
        for layer in projections[:3]:
            layer.out_features = layer.out_features * width // wide
        projections[3].in_features = projections[3].in_features * width // wide
        for layer in projections:
            layer.weight = nn.Parameter(layer.weight.new_empty(layer.out_features, layer.in_features))
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.new_empty(layer.out_features))


def unsplit_block(model: Any, whole: Any) -> str | None:
    """The first block of a layer, such as its attention or its MLP, in which each rank keeps every matrix whole, or
    whose split matrices give parts that none of its others takes. A block of one matrix, such as a router, may be
    whole."""
    sizes, layers = Counter[str](), Counter[str]()
    flat: dict[str, list[str]] = {}  # how matrices are cut
    stacked: dict[str, list[str]] = {}  # and those of experts
    for (name, own), all_of_it in zip(model.named_parameters(), whole.parameters(), strict=True):
        if own.ndim > 1 and not name.endswith("bias") and (match := _BLOCK.match(name)):
            block, cut = match.group(), _cut(own, all_of_it)
            (flat if own.ndim == 2 else stacked).setdefault(block, []).append(cut)
            if own.ndim == 2:
                sizes[block] += own.numel()
                layers[_layer_of(block)] += own.numel()
    for block, each in flat.items():
        cuts = {*each, *stacked.get(block, ())}
        is_torn = "outputs" in cuts and "inputs" not in cuts
        is_large = len(each) > 1 and sizes[block] > MOST_UNSPLIT * layers[_layer_of(block)]
        if is_large and (is_torn or set(each) == {"none"}):
            return block
    return None


def _cut(own: Tensor, whole: Tensor) -> str:
    """Whether a rank has a part of a matrix's inputs, of its outputs, or all of it. Stacked experts may lie either way
    round, so that of each layer of them one is taken to have a part of its inputs."""
    if own.shape[-1] < whole.shape[-1]:
        return "inputs"
    return "none" if own.shape == whole.shape else "outputs"


def _layer_of(block: str) -> str:
    return block.rpartition(".")[0]


class Summed(NamedTuple):
    """What the ranks add up each time that a block of a layer runs."""

    block: str  # its path in the model
    size: int  # numbers of a token


def summed_in_blocks(model: Any, whole: Any, width: int) -> tuple[Summed, ...]:
    """There is one sum in each block whose weights are split by columns, such as attention and MLP, as wide as the
    model; and one of its own for a projection to another width, whose result the block goes on with, such as `x_proj`
    of Mamba (as in vLLM's MambaMixer). Biases of stacked experts, [experts, outputs], are no projections. Blocks that
    share weights count each."""
    found = dict[tuple[int, int], Summed]()
    weights = (each.named_parameters(remove_duplicate=False) for each in (model, whole))
    for (name, own), (_, all_of_it) in zip(*weights, strict=True):
        is_split = own.ndim > 1 and own.shape[-1] < all_of_it.shape[-1] and not name.endswith("bias")
        if is_split and (match := _BLOCK.match(name)):
            summed = Summed(match.group(), own.shape[0] if own.ndim == 2 else width)
            found.setdefault((id(model.get_submodule(summed.block)), summed.size), summed)
    return tuple(found.values())


@contextlib.contextmanager
def counting_runs(model: Any, blocks: Collection[str]) -> Iterator[Counter[str]]:
    """In this context, how often each of these blocks runs: models that loop over layers run them several times."""
    runs = Counter[str]()

    def count(block: str, *_: Any) -> None:
        runs[block] += 1

    with contextlib.ExitStack() as undo:
        for each in blocks:
            undo.enter_context(model.get_submodule(each).register_forward_pre_hook(functools.partial(count, each)))
        yield runs


@contextlib.contextmanager
def running(model: Any, names: list[str]) -> Iterator[None]:
    """In this context, `names` has the paths of the modules that are running, the innermost last; those in which an
    error was raised stay."""
    with contextlib.ExitStack() as undo:
        for path, module in model.named_modules():
            undo.enter_context(module.register_forward_pre_hook(lambda *_, path=path: names.append(path)))
            undo.enter_context(module.register_forward_hook(lambda *_: (names.pop(), None)[1]))
        yield
