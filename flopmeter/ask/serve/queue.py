"""The arithmetic on top of the steps: what a server that works on several requests at a time gives each of them.

A request brings `prompt` tokens and wants `output` tokens. With b requests at a time, a step of decoding gives each of
them E tokens in D(b) seconds: E is 1, or with a draft of k tokens that are each accepted with probability a

    E = (1 - a^(k+1)) / (1 - a),  D(b) = k * draft step + step with k + 1 new tokens     (Leviathan et al. 2023)

In the time in which it makes one token, each request lets b / output others begin, whose prefill costs x seconds:

    time per output token        TPOT = D / E + x * b / output
    requests a second            r = b / (output * TPOT)

TPOT is no less than the time in which the power limit gives the energy of what is done in it.

Prefill as one step of P seconds stops decoding: x = P, and the request's own prefill takes T = P. Cut into n chunks of
p seconds that run in the same steps as decoding, it reads the weights with it, which is d of each, the step of one
sequence alone: x = n (p - d), and T = n (p + (D - d) (b - 1) / b). In front of it stand half a step of decoding and
the prefills of others: of random arrivals (M/D/1), but no more than all others at once.

    time to first token          TTFT = T + D / 2 * (b - 1) / b + min(rho T / 2 (1 - rho), (b - 1) T),  rho = r T / c

where c is how many prompts go into one chunk.

With pools of their own for prefill and for decoding, decoding is never stopped (x = 0), prefill GPUs are so many that
rho is `PREFILL_LOAD`, and the cache of a prompt goes over a link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

PREFILL_LOAD = 0.7  # of the time: how busy GPUs that only prefill are kept


class RequestWork(NamedTuple):
    """One request, in seconds of a server's steps."""

    output: int  # tokens
    decode: Callable[[float], float]  # seconds of a decoding step by how many requests share it
    tokens_per_step: float  # E above
    prefill: float  # seconds of all its chunks, or of one step
    chunks: int  # 0: prefill stops decoding
    alone: float  # d above
    is_apart: bool = False  # GPUs of their own for prefill
    by_power: Callable[[int], float] = lambda _: 0.0  # least seconds a token under the power limit, by the batch
    at_once: int = 1  # prompts that go into one chunk: c above
    transfer: float = 0.0  # of the prompt's cache, to the GPUs that decode


class Load(NamedTuple):
    """A server that works on `batch` requests at a time."""

    batch: int
    ttft_seconds: float
    tpot_seconds: float
    requests_per_s: float
    prefill_servers: float  # for each that decodes; 0: the same does both


def expected_tokens(draft_tokens: int, acceptance: float) -> float:
    """The tokens that one step with a draft is expected to give."""
    if acceptance == 1:
        return draft_tokens + 1.0
    return float((1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance))


def load(work: RequestWork, batch: int) -> Load | None:
    """The server's load; None if prefill alone needs more than the server has."""
    step = work.decode(batch)
    extra = max(0.0, work.prefill - work.chunks * work.alone)
    if work.is_apart:
        extra = 0.0
    others = (batch - 1) / batch
    own = work.prefill + work.chunks * max(0.0, step - work.alone) * others
    tpot = step / work.tokens_per_step + extra * batch / work.output
    tpot = max(tpot, work.by_power(batch))
    rate = batch / (work.output * tpot)
    rho = PREFILL_LOAD if work.is_apart else rate * own / work.at_once
    if rho >= 1 and work.chunks:
        return None  # more chunks than steps: the server does nothing but prefill, and its queue only grows
    waits = rho * own / (2 * (1 - rho)) if rho < 1 else math.inf
    wait = waits if work.is_apart else min(waits, (batch - 1) * own) + step / 2 * others
    servers = rate * own / PREFILL_LOAD if work.is_apart else 0.0
    return Load(batch, own + wait + work.transfer, tpot, rate, servers)
