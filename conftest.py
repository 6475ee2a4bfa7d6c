"""What holds for every test: which files are none, and that a seed gives the same examples in each run."""

from hypothesis.internal.conjecture import providers

collect_ignore_glob = ["tests/programs/*"]  # scripts that tests run, which import more than the tests need

# Hypothesis mixes in constants of whichever modules are imported by then, so its examples depend on the tests that a
# worker ran before. Without them a seed gives the same examples in each run.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants
