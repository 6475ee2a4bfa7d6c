"""What holds for every test: which files are none, that a seed gives the same examples in each run, and that a search
fails by what it finds alone."""

from hypothesis import settings
from hypothesis.internal.conjecture import providers

collect_ignore_glob = ["tests/programs/*"]  # scripts that tests run, which import more than the tests need

# Hypothesis mixes in constants of whichever modules are imported by then, so its examples depend on the tests that a
# worker ran before. Without them a seed gives the same examples in each run.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

# An example that took longer on a busy machine, or was the first to load a profile, is no fault.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")
