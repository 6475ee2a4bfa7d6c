"""Text generation: time to the first token, time per token after it, tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flopmeter.ask.checks import check_callable, check_whole, is_whole
from flopmeter.device.hardware import AnyHardware
from flopmeter.launch.modes import mode_called
from flopmeter.meter import FlopMeter, Mode
from flopmeter.report.report import Report


class Generation(NamedTuple):
    """What generating text costs. The reports are those of one new token and of all of them."""

    first_token_seconds: float
    token_seconds: float  # each token after the first, on average
    tokens_per_s: float  # of all sequences together, after the first token
    first_token: Report
    whole: Report


def time_generation(
    generate: Callable[[int], object],
    new_tokens: int,
    hardware: AnyHardware,
    *,
    sequences: int = 1,
    mode: Mode = "eager",
    **meter_options: Any,
) -> Generation:
    """Meter `generate(n)`, which makes n new tokens for each of `sequences` sequences, for 1 and `new_tokens`.

        time_generation(
            lambda n: model.generate(on_meta(ids), min_new_tokens=n, max_new_tokens=n, do_sample=False),
            new_tokens=64, hardware="h100-sxm5-80gb", sequences=len(ids))

    The tokens that a model on meta samples are unknown; flopmeter assumes that none ends its sequence, and
    the reports say so. Raises ValueError for fewer than two new tokens.
    """
    check_callable("time_generation runs a function of how many tokens to make", generate)
    if not is_whole(new_tokens, 2):
        raise ValueError(f"expected at least two new tokens, to tell the first from the rest; got {new_tokens!r}")
    check_whole(sequences=sequences)
    mode_called(mode)
    reports = []
    for tokens in (1, new_tokens):
        with FlopMeter(hardware, **meter_options) as meter:
            generate(tokens)
        reports.append(meter.report(mode=mode))
    first, whole = reports
    token_seconds = (whole.seconds - first.seconds) / (new_tokens - 1)
    return Generation(first.seconds, token_seconds, sequences / token_seconds, first, whole)
