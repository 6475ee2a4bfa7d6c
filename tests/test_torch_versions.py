"""Other versions of torch than the one at hand: what they lack, and what their users are told."""

import re
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # it defines ops

import flopmeter.distributed  # noqa: F401  (the costs of its ops)
from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.torch_names import private
from flopmeter.trace import streams

HIDDEN_OPS = Path(__file__).with_name("hidden_ops.py")


def test_a_torch_that_lacks_any_operators_still_imports_and_meters():
    """Every operator that flopmeter names is gone in half of twelve runs, and all at once where the program does
    not run them."""
    done = subprocess.run([sys.executable, str(HIDDEN_OPS)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    hidden = re.search(r"(\d+) operators hidden", done.stdout)
    assert hidden is not None
    assert int(hidden[1]) > 1000, "so many are named in its tables"


def test_a_module_is_found_that_its_package_does_not_import():
    """torch 2.11 leaves symmetric memory to the program, so that every command ended in an error there."""
    names = {
        (name.module, name.attribute)
        for name in private.NAMES[private.WORLDS]
        if not name.on_instances and ismodule(name.value)
    }
    assert ("torch.distributed", "_symmetric_memory") in names
    code = (
        "from flopmeter.torch_names.private import PrivateName\n"
        f"for module, attribute in {sorted(names)!r}:\n"
        "    PrivateName(module, attribute, '').value\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_ops_of_fsdp2_have_costs_whoever_imports_them_first():
    """A table that is filled before they are defined would hold none, and say nothing."""
    code = (
        "import flopmeter.distributed, torch; from flopmeter.costs import RULES;"
        "print(*{name for name in torch._C._dispatch_get_all_op_names() if name.startswith('fsdp::')}"
        " - {str(op).replace('.', '::') for op in RULES})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_stream_on_meta_tells_its_number_and_its_device_as_torchs_own_does():
    """FSDP2 of torch 2.15 passes them to an op."""
    meta, own = streams.MetaStream(), torch.Stream(device="cpu")
    for attribute in ("stream_id", "device_index", "device_type"):
        assert type(getattr(meta, attribute)) is type(getattr(own, attribute)) is int, attribute
    assert meta.stream_id not in (streams.MetaStream().stream_id, streams.default_stream().stream_id)


@pytest.mark.skipif(not hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"), reason="an op of torch 2.15")
def test_gradients_of_two_types_are_packed_by_a_kernel_for_each():
    """bf16 [6, 2] and [3], fp32 [2], for four ranks into fp32: [8, 2] + [4] + [4] = 24 numbers, 7 of them padding."""
    bf16, fp32 = ({"device": "meta", "dtype": dtype} for dtype in (torch.bfloat16, torch.float32))
    gradients = [torch.empty(6, 2, **bf16), torch.empty(2, **fp32), torch.empty(3, **bf16)]
    with FlopMeter(strict=True) as meter:
        torch.ops.fsdp.chunk_cat_mixed_dtype(gradients, dim=0, num_chunks=4, out=torch.empty(4, 6, **fp32))
    costs = [kernel.cost for kernel in kernels_of(meter.trace)]
    assert [(cost.bytes_read, cost.bytes_written) for cost in costs] == [(2 * 15, 4 * (15 + 7)), (4 * 2, 4 * 2)]


@pytest.mark.skipif(not hasattr(torch.ops.aten, "shallow_copy_data_"), reason="an op of torch 2.15")
def test_taking_over_the_memory_of_another_tensor_is_no_kernel():
    with FlopMeter() as meter:
        torch.ops.aten.shallow_copy_data_(torch.empty(8, device="meta"), torch.empty(8, device="meta"))
    assert meter.report().kernels == []
