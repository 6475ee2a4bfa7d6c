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
the next prompt, so n is no whole number; c prompts go into one chunk. More chunks than steps there cannot be. While a
request is at work, for n + (output - 1) / E steps, each of b requests brings n / c chunks; so no more are at work than

    B = c / n (n + (output - 1) / E)

and all others wait for their prefill. T, TPOT and r are those of b or of B, whichever is smaller.

In front of a prefill stand half a step of decoding and the prefills of others, each of S = x + n D / c, or P if prefill
stops decoding. These are the b - 1 requests of which each comes back Z = (output - 1) TPOT after its own, at random; so
the time at prefill is R in

    R = S (1 + q - u / 2),  q = r' R (b - 1) / b,  u = r' S (b - 1) / b,  r' = b / (R + Z)

(those that a request finds there, of which the first is half done: Bard and Schweitzer's approximation of the closed
queue; of many requests it is M/D/1), and

    time to first token          TTFT = T + D / 2 * (b - 1) / b + R - S

The wait for the rest of a step with a chunk in it is part of R: a queue whose server takes holidays of D when nobody
waits has the wait of M/D/1 and D / 2 (Fuhrmann and Cooper 1985). A prompt that shares its chunk (c > 1) begins with the
next step, whoever else waits, as long as the chunk has room. It finds a step of the mean length s, weighted by length,
of which half is left, and runs with all the others that came in that step. With e = p + l - D of a prompt, A of which
come in a step at random, a step takes D + e A, so that

    s = E[step^2] / E[step] = D / (1 - v) + e v / (1 - v^2),  v = e (b - 1) / (TTFT + Z)
    TTFT = T + s (1 / 2 + v)

which is the least wait, as the one above is; TTFT is the larger of the two (within 10 % of a simulation below
saturation, where the first alone was up to 50 % too short, and 20 % too long where chunks are just full).

With pools of their own for prefill and for decoding, decoding is never stopped (x = 0) and does not wait for T,
prefill GPUs are so many that each is at work `PREFILL_LOAD` of the time (M/D/1), and the cache of a prompt goes over a
link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

PREFILL_LOAD = 0.7  # of the time: how busy GPUs that only prefill are kept
HALVINGS = 50  # of an interval in which a wait is looked for: to the last digit


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


def load(work: RequestWork, batch: int) -> Load:
    """The server's load."""
    at_work = min(batch, _room(work))
    step = work.decode(at_work)
    others = (at_work - 1) / at_work
    longer = work.longer(at_work) if work.chunks else 0.0
    own = work.prefill + work.chunks * longer * others
    extra = 0.0 if work.is_apart else max(0.0, work.prefill + work.chunks * (longer - step))
    before = 0.0 if work.is_apart else own  # what a request spends on the GPUs that decode, before they do
    after = work.output - 1
    decoding = max(after * step / work.tokens_per_step + extra * (at_work - 1), work.by_power(at_work) - before)
    rate = at_work / (before + decoding)
    if work.is_apart:
        wait, servers = PREFILL_LOAD * own / (2 * (1 - PREFILL_LOAD)), rate * own / PREFILL_LOAD
    else:
        service = extra + work.chunks * step / work.at_once if work.chunks else own
        wait, servers = _wait_seconds(service, decoding, batch) + step / 2 * others, 0.0
        if work.at_once > 1:
            wait = max(wait, _sharing_seconds(own, step * others, extra, decoding, batch))
    tpot = decoding / after if after else None
    return Load(batch, own + wait + work.transfer, tpot, rate, servers, at_work)


def _room(work: RequestWork) -> float:
    """B above: how many requests can be at work at the same time."""
    if work.is_apart or not work.chunks:
        return math.inf
    steps = work.chunks + (work.output - 1) / work.tokens_per_step
    return steps * work.at_once / work.chunks


def _wait_seconds(service: float, away: float, requests: int) -> float:
    """R - S above: what a request waits for others, of `requests` that are `away` between two services."""
    short = service * requests - away
    found = (short + math.sqrt(short**2 + 4 * service * (away - service * (requests - 1) / 2))) / 2
    return found - service


def _sharing_seconds(own: float, step: float, each: float, away: float, requests: int) -> float:
    """s (1 / 2 + v) above: what a request of `requests` waits for the running step and for those that share its own,
    which grows by `each`. The longer the wait, the fewer come in a step, so that one wait agrees with itself."""
    least, most = 0.0, 2 * (step + each * requests)
    for _ in range(HALVINGS):
        wait = (least + most) / 2
        share = each * (requests - 1) / (own + wait + away)
        if share >= 1 or (step / (1 - share) + each * share / (1 - share**2)) * (0.5 + share) > wait:
            least = wait
        else:
            most = wait
    return least
