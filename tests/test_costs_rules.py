"""The table of rules as a whole: every entry is exercised, and none is dead."""

from __future__ import annotations

import functools

import pytest
import torch
from costs_support import integer_sweep, meta_sweep, sweep
from test_costs_by_hand import BY_HAND
from test_costs_cases import ALL, call_of_case
from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.costs import RULES, find_rule
from flopmeter.costs.arithmetic.optimizer import FOREACH
from flopmeter.costs.arithmetic.pointwise import PER_ELEMENT
from flopmeter.costs.data_movement.movement import no_kernel
from flopmeter.costs.rules import rule
from flopmeter.records import Call, TensorSpec
from flopmeter.trace.handling import _handling, is_composite

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten
FOREACH_DATABASES = (
    "foreach_unary_op_db", "foreach_binary_op_db", "foreach_pointwise_op_db", "foreach_reduce_op_db",
    "foreach_other_op_db",
)  # fmt: skip

# The fused attention ops, which test_costs_attention.py prices one by one.
ATTENTION = [
    f"_scaled_dot_product_{kind}{suffix}"
    for kind in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
    for suffix in ("", "_backward")
] + [f"_{kind}_attention_{way}" for kind in ("flash", "efficient") for way in ("forward", "backward")]  # fmt: skip
ATTENTION.append("_native_multi_head_attention")
# Those of newer torches, which test_attention_backends.py, test_grouped.py and test_new_operators.py price.
NEWER = (
    "_cudnn_attention_forward", "_cudnn_attention_backward", "_scaled_grouped_mm_v2", "_scaled_addmm",
    "_cudnn_attention_forward_no_dropout_inplace", "_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward",
    "_philox_normal", "_philox_uniform", "_philox_randint", "_philox_key_split", "_philox_key_fold_in",
    "_philox_normal_", "_philox_uniform_",
    # which test_fake_quantize.py and test_costs_composed.py price
    "_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine",
    "_fake_quantize_learnable_per_tensor_affine_backward", "_fake_quantize_learnable_per_channel_affine_backward",
    "_fused_moving_avg_obs_fq_helper", "affine_grid_generator",
)  # fmt: skip

# Not exercised: each shares its rule with ops that are, and has the same arguments.
NOT_REACHED = {
    "aten._flash_attention_forward_no_dropout_inplace",
    "aten._reshape_alias_copy", "aten._sample_dirichlet",
    "aten.lift_fresh_copy", "aten.softmax", "aten.log_softmax",  # the last two with `out=`: test_costs_lists.py
    "aten._standard_gamma", "aten._unique", "aten.native_channel_shuffle", "aten._foreach_zero",
    "aten._foreach_powsum", "aten._new_zeros_with_same_feature_meta",
    "aten.bincount",  # test_timing_sorting.py
    "aten.binomial", "aten.poisson", "aten.unique_dim",
}  # fmt: skip
REACHED_BY_NEW_SAMPLES = {"aten._histogramdd_from_bin_tensors"}  # torch 2.15's sweep has it


@functools.cache
def reached() -> frozenset[object]:
    calls = [call_of_case(name) for name in ALL] + [call for call, _, _ in BY_HAND.values()]
    failing = {swept.entry for swept in meta_sweep() if swept.error is not None}
    on_meta = {swept.entry for swept in meta_sweep()} - failing
    sweeps = (
        meta_sweep(),
        integer_sweep(),
        sweep("cpu", torch.float32, samples=1, without=on_meta),
        sweep("meta", torch.float32, samples=1, databases=FOREACH_DATABASES),
    )
    calls += [call for swept in sweeps for samples in swept for call in samples.calls]
    keys = {key for call in calls for key in (call.func, call.func.overloadpacket)}
    return frozenset(keys | {getattr(aten, name) for name in (*ATTENTION, *NEWER) if hasattr(aten, name)})


def is_aten(key: OpOverload | OpOverloadPacket) -> bool:
    """Collectives need a process group: test_distributed_costs.py exercises their rules."""
    return str(key).startswith("aten.")


def functional_form(key: OpOverload | OpOverloadPacket) -> object:
    name = key.__name__ if is_aten(key) else ""
    return getattr(aten, name[:-1], None) if name.endswith("_") else None


def test_every_rule_is_exercised_by_the_cases_or_the_sweep():
    missing = {
        str(key)
        for key, its_rule in RULES.items()
        if is_aten(key) and its_rule is not no_kernel and key not in reached() and functional_form(key) not in reached()
    }
    assert missing - REACHED_BY_NEW_SAMPLES == {
        name for name in NOT_REACHED if hasattr(aten, name.removeprefix("aten."))
    }


def test_metadata_costs_nothing():
    assert all(its_rule(call_of_case("unsafe_split")) == () for its_rule in RULES.values() if its_rule is no_kernel)


def test_an_in_place_op_has_the_rule_of_its_functional_form():
    """So that exercising one exercises both. Draws differ: bernoulli reads its probabilities; masked_fill clones."""
    for key, its_rule in RULES.items():
        functional = functional_form(key)
        if functional in RULES and functional not in (aten.bernoulli, aten.normal, aten.masked_fill):
            assert RULES[functional] is its_rule, key
            for table in (PER_ELEMENT, FOREACH):
                assert table.get(functional) == table.get(key), key


def test_no_rule_is_for_an_op_that_never_arrives():
    """A composite op decomposes before the recorder sees it, under inference_mode too."""
    dead = set()
    for key in RULES:
        overloads = [key] if isinstance(key, OpOverload) else [getattr(key, name) for name in key.overloads()]
        if all(_handling(overload).is_composite for overload in overloads if "out" not in overload._overloadname):
            dead.add(str(key))
    # A kernel of its own on CUDA, and two that arrive with a given `out=`.
    assert dead <= {"aten._fused_rms_norm", "aten.softmax", "aten.log_softmax"}


def test_every_foreach_op_has_a_rule():
    names = [name for name in dir(aten) if name.startswith("_foreach_")]
    assert [name for name in names if getattr(aten, name) not in RULES] == []


def test_an_op_has_one_rule():
    with pytest.raises(ValueError, match="has a rule already"):
        rule(aten.mm)(lambda call: ())


def test_every_op_in_place_whose_functional_form_torch_tags_as_pointwise_has_a_rule():
    """Torch does not tag all forms in place: gcd_, lcm_ and abs_ are not."""
    number = TensorSpec((4,), (1,), torch.float32, 0, 0, "meta")
    schemas = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    names = {name for namespace, _, name in schemas if namespace == "aten"}
    forms = [name for name in names if name.endswith("_") and not name.endswith("__") and name[:-1] in names]
    checked, uncovered = 0, set()
    for name in forms:
        if not any(torch.Tag.pointwise in form.tags for form in overloads_of(name[:-1])):
            continue
        for form in overloads_of(name):
            if not is_composite(form):
                checked += 1
                if find_rule(Call(form, (), {}, (number,), (number,))) is None:
                    uncovered.add(str(form))
    assert uncovered == set()
    assert checked > 100


def overloads_of(name: str) -> list[OpOverload]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if overload != "t"]  # TorchScript's lists
