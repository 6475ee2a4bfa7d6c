"""What a run does as the program imports modules."""

from __future__ import annotations

import importlib
import sys

import pytest

from flopmeter.torch_names.imported import no_folder_instead_of

PACKAGE = "flopmeter_is_not_installed"


def test_a_folder_beside_the_script_is_not_taken_for_a_package_that_is_not_installed(tmp_path, monkeypatch):
    """As the folders `triton` of NVIDIA's examples: torch asks for Triton, and would look there for its parts."""
    (tmp_path / PACKAGE).mkdir()
    with no_folder_instead_of(PACKAGE):
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(PACKAGE)
        assert importlib.util.find_spec(PACKAGE) is None
    assert importlib.import_module(PACKAGE).__file__ is None
    try:
        with no_folder_instead_of(PACKAGE), pytest.raises(ModuleNotFoundError):
            importlib.import_module(PACKAGE)
        assert PACKAGE in sys.modules
    finally:
        del sys.modules[PACKAGE]


def test_a_package_that_is_installed_stays():
    with no_folder_instead_of("json"):
        assert importlib.import_module("json").dumps
