"""README.md is a doctest with the torch that it was written with: others need other memory (cuBLAS's, since 2.15)."""

import pytest
from hypothesis.internal.conjecture import providers

from flopmeter.torch_names.dispatcher import running_version

collect_ignore_glob = ["tests/programs/*"]  # scripts that tests run, which import more than the tests need

# Hypothesis mixes in constants of whichever modules are imported by then, so its examples depend on the tests that a
# worker ran before. Without them a seed gives the same examples in each run.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "README.md" and running_version() != (2, 13):
            item.add_marker(pytest.mark.skip(reason="shows what torch 2.13 does"))
