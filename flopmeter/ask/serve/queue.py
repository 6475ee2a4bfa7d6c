"""The arithmetic on top of the steps: the latencies and the rate of a server that works on several requests at a time.

A request brings `prompt` tokens and wants `output` tokens, the first of which its prefill gives. With b requests at a
time, a step of decoding gives each of them E tokens in D(b) seconds: E is 1, or with a draft of k tokens that are each
accepted with probability a

    E = (1 - a^(k+1)) / (1 - a),  D(b) = k * draft step + step with k + 1 new tokens     (Leviathan et al. 2023)

A request is at work for T, its own prefill, and then for output - 1 tokens. In that time each of the b - 1 others
finishes once and lets another one begin, whose prefill costs x seconds; by Little's law:

    time per output token        TPOT = D / E + x (b - 1) / (output - 1)
    requests a second            r = b / (T + (output - 1) * TPOT)

No request is faster than the power limit gives the energy of all b.

Prefill as one step of P seconds stops decoding: x = P, and the request's own prefill takes T = P. Cut into n chunks of
p seconds that run in the same steps as decoding, it reads the weights with it. Such a step takes l longer than the
chunk, which is D - d where the device never waits for the host, with d for the step of one sequence alone, whose time
is that of the weights: x = n (p + l - D), and T = n (p + l (b - 1) / b). A last chunk that is not full is shared with
the next prompt, so n is no whole number; c prompts go into one chunk. More chunks than steps there cannot be,
r <= c / T: beyond the b at which the two are equal, more requests only wait, and T, TPOT and r stay as they are there.

In front of a prefill stand half a step of decoding and the prefills of others, each of S = T / c. These are the b - 1
requests of which each comes back Z = (output - 1) TPOT after its own, at random; so the time at prefill is R in

    R = S (1 + q - u / 2),  q = r' R (b - 1) / b,  u = r' S (b - 1) / b,  r' = b / (R + Z)

(those that a request finds there, of which the first is half done: Bard and Schweitzer's approximation of the closed
queue; of many requests it is M/D/1), and

    time to first token          TTFT = T + D / 2 * (b - 1) / b + R - S

With pools of their own for prefill and for decoding, decoding is never stopped (x = 0) and does not wait for T,
prefill GPUs are so many that each is at work `PREFILL_LOAD` of the time (M/D/1), and the cache of a prompt goes over a
link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

PREFILL_LOAD = 0.7  # of the time: how busy GPUs that only prefill are kept
ROOM_PRECISION = 1e-6  # requests


class RequestWork(NamedTuple):
    """One request, in seconds of a server's steps."""

    output: int  # tokens; two and more if prefill is apart
    decode: Callable[[float], float]  # seconds of a decoding step by how many requests share it
    tokens_per_step: float  # E above
    prefill: float  # seconds of all its chunks, or of one step
    chunks: float  # n above; 0: prefill stops decoding
    longer: Callable[[float], float]  # l above, by how many requests share a step
    is_apart: bool = False  # GPUs of their own for prefill
    by_power: Callable[[float], float] = lambda _: 0.0  # least seconds of all b requests under the power limit, by b
    at_once: float = 1.0  # prompts that go into one chunk: c above
    transfer: float = 0.0  # of the prompt's cache, to the GPUs that decode


class Load(NamedTuple):
    """A server that works on `batch` requests at a time."""

    batch: int
    ttft_seconds: float
    tpot_seconds: float | None  # None of one token, which prefill gives
    requests_per_s: float
    prefill_servers: float  # for each that decodes; 0: the same does both
    at_work: float  # of the batch: all others wait for their prefill


def expected_tokens(draft_tokens: int, acceptance: float) -> float:
    """The tokens that one step with a draft is expected to give."""
    if acceptance == 1:
        return draft_tokens + 1.0
    return float((1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance))


class _Turn(NamedTuple):
    """One request of several at work, in seconds."""

    step: float  # of decoding
    own: float  # T above
    before: float  # what it spends on the GPUs that decode, before they do
    decoding: float  # (output - 1) TPOT


def _turn(work: RequestWork, at_work: float) -> _Turn:
    step = work.decode(at_work)
    longer = work.longer(at_work) if work.chunks else 0.0
    own = work.prefill + work.chunks * longer * (at_work - 1) / at_work
    extra = 0.0 if work.is_apart else max(0.0, work.prefill + work.chunks * (longer - step))
    before = 0.0 if work.is_apart else own
    steps = (work.output - 1) * step / work.tokens_per_step + extra * (at_work - 1)
    return _Turn(step, own, before, max(steps, work.by_power(at_work) - before))


def room_for(work: RequestWork, batch: int) -> float:
    """How many of `batch` requests can be at work at the same time. With more of them there would be more chunks than
    steps."""

    def is_crowded(at_work: float) -> bool:
        turn = _turn(work, at_work)
        return at_work * turn.own / work.at_once > turn.own + turn.decoding

    if work.is_apart or not work.chunks or not is_crowded(batch):
        return batch
    least, most = 1.0, float(batch)
    while most - least > ROOM_PRECISION:
        middle = (least + most) / 2
        least, most = (least, middle) if is_crowded(middle) else (middle, most)
    return least


def load(work: RequestWork, batch: int, room: float | None = None) -> Load:
    """The server's load. `room`: that of `batch` requests or more, where it is known."""
    at_work = min(batch, room_for(work, batch) if room is None else room)
    step, own, before, decoding = _turn(work, at_work)
    rate, after = at_work / (before + decoding), work.output - 1
    if work.is_apart:
        wait, servers = PREFILL_LOAD * own / (2 * (1 - PREFILL_LOAD)), rate * own / PREFILL_LOAD
    else:
        wait = _wait_seconds(own / work.at_once, decoding, batch) + step / 2 * (at_work - 1) / at_work
        servers = 0.0
    tpot = decoding / after if after else None
    return Load(batch, own + wait + work.transfer, tpot, rate, servers, at_work)


def _wait_seconds(service: float, away: float, requests: int) -> float:
    """R - S above: what a request waits for others, of `requests` that are `away` between two services."""
    short = service * requests - away
    found = (short + math.sqrt(short**2 + 4 * service * (away - service * (requests - 1) / 2))) / 2
    return found - service
