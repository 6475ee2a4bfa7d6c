"""One table of number types: what each stage knows of a type is what the table says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flopmeter import FlopMeter, load_hardware
from flopmeter.device.hardware import HardwareError
from flopmeter.records.dtypes import DTYPES, item_bytes_of, name_of

ROOT = Path(__file__).parents[1]
KNOWN = [(name, dtype) for name, entry in DTYPES.items() for dtype in entry.in_torch]


@pytest.mark.parametrize(("name", "dtype"), KNOWN, ids=str)
def test_an_element_is_as_long_as_torch_says(name, dtype):
    in_a_byte = 2 if dtype is torch.float4_e2m1fn_x2 else 1
    assert item_bytes_of(name) == dtype.itemsize / in_a_byte


def test_a_type_without_an_entry_is_as_torch_has_it():
    assert name_of(torch.uint32) == "uint32"
    assert item_bytes_of("uint32") == 4
    assert name_of(torch.complex64) == "fp32", "the rates of its parts"


def test_every_other_type_that_an_entry_names_has_an_entry():
    for entry in DTYPES.values():
        assert {entry.opmath, entry.real} - {""} <= set(DTYPES), entry.name


@pytest.mark.parametrize("name", [name for name, entry in DTYPES.items() if "vector" in entry.units])
def test_element_wise_work_runs_at_the_rate_of_its_opmath_type(name):
    device = load_hardware("h100-sxm5-80gb")
    try:
        assert device.vector_peak(name) == device.vector_peak(DTYPES[name].opmath or name)
    except HardwareError:
        assert name not in device.vector_tflop_per_s


ENTRY = 'Dtype("new8", 1, {torch.float8_e8m0fnu: ("c10::New",)}, _BOTH, opmath="fp32"),'
ASKED = """
import torch
from flopmeter.cli import COMMANDS
from flopmeter.cli.command import parser_of
from flopmeter.cli.hardware_table import SHOWN_DTYPES
from flopmeter.device.hardware import load_hardware
from flopmeter.measured.calibration import MATMUL_DTYPES
from flopmeter.measured.rebuild import CPP_NAMES
from flopmeter.records.dtypes import item_bytes_of, name_of
from flopmeter.timing import bandwidth

device = load_hardware("h100-sxm5-80gb").replace(matrix_tflop_per_s={"new8": 5.0})
assert device.contraction_peak("new8").flop_per_s == 5e12
assert device.vector_peak("new8") == device.vector_peak("fp32")
assert name_of(torch.float8_e8m0fnu) == "new8" and item_bytes_of("new8") == 1
assert MATMUL_DTYPES["new8"] is CPP_NAMES["c10::New"] is torch.float8_e8m0fnu
assert "new8" in SHOWN_DTYPES and "new8" in bandwidth._NARROW
parser_of(COMMANDS).parse_args(["table", "bert-base", "--dtype", "new8", "--autocast", "new8"])
"""


def test_a_new_type_is_one_entry(tmp_path):
    for folder in ("flopmeter", "hardware"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "flopmeter" / "records" / "dtypes.py"
    source = table.read_text(encoding="utf-8").replace("torch.float8_e8m0fnu: (),", "")
    table.write_text(source.replace("_ENTRIES = (", f"_ENTRIES = ({ENTRY}"), encoding="utf-8")
    run = subprocess.run([sys.executable, "-c", ASKED], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_groups_of_fp8_where_no_kernel_takes_them_are_an_error_as_on_the_device():
    rows, columns = torch.empty(64, 32, device="meta").to(torch.float8_e4m3fn), torch.empty(4, 16, 32, device="meta")
    scales = torch.ones(64, device="meta"), torch.ones(4, 16, device="meta")
    with FlopMeter("a100-sxm4-80gb") as meter:
        ends = torch.tensor([16, 32, 48, 64], device="meta", dtype=torch.int32)
        torch._scaled_grouped_mm(rows, columns.to(rows.dtype).mT, *scales, ends, out_dtype=torch.bfloat16)
    with pytest.raises(HardwareError, match=r"_scaled_grouped_mm for compute capability 9\.0"):
        meter.report()
