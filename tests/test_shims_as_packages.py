"""Shims as programs look at packages: reloaded, imported again, asked for what their kernels could not load."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import flopmeter
from flopmeter.run.session import Wishes


def test_a_program_may_reload_a_shim_or_import_it_again_as_unsloth_does():
    with flopmeter.cuda("h100-sxm5-80gb", wishes=Wishes(shims=("bitsandbytes",))):
        package = importlib.import_module("bitsandbytes.nn")
        assert importlib.reload(package) is package
        del sys.modules["bitsandbytes.nn"]
        assert importlib.import_module("bitsandbytes.nn").Linear4bit is package.Linear4bit
        torch.ones(1, device="cuda")
    assert "bitsandbytes.nn" not in sys.modules


def test_bitsandbytes_compiled_functions_look_as_where_they_could_not_be_loaded():
    with flopmeter.cuda("h100-sxm5-80gb", wishes=Wishes(shims=("bitsandbytes",))):
        functional = importlib.import_module("bitsandbytes.functional")
        with pytest.raises(AttributeError, match="cdequantize_blockwise_fp32"):
            functional.lib.cdequantize_blockwise_fp32  # noqa: B018
        assert functional.get_ptr(None) is None
        torch.ones(1, device="cuda")
