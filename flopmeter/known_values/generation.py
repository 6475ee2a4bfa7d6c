"""Text generation of Hugging Face models goes on to its last token.

Works around: the sampled token is unknown, and so is whether it ends a sequence, which generate() asks at each step.
Until: programs to meter say min_new_tokens=max_new_tokens themselves, or transformers does not ask a meta tensor.

While a meter is open, transformers' end-of-sequence check still runs its ops, but its result is assumed to
be False: every sequence goes on to `max_new_tokens`, as `min_new_tokens=max_new_tokens` asks for. So does beam search,
which also asks whether a beam that still runs may beat one that has ended: none has. The assumption is counted, so that
the report prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from flopmeter.known_values.replay import Knowledge
from flopmeter.known_values.values import no_modes
from flopmeter.torch_names.imported import entered_once_imported
from flopmeter.torch_names.private import EARLY_STOP, FINISHED_BEAMS

RULE = "generation: no sequence ends before max_new_tokens"
_MODULE = "transformers.generation.stopping_criteria"


@contextmanager
def sequences_go_on(known: Knowledge) -> Iterator[None]:
    """In this context transformers finds no end of a sequence in new tokens."""
    with (
        entered_once_imported(_MODULE, lambda: _sequences_go_on(known)),
        entered_once_imported(EARLY_STOP.module, lambda: _beams_go_on(known)),
    ):
        yield


@contextmanager
def _sequences_go_on(known: Knowledge) -> Iterator[None]:
    criteria = sys.modules[_MODULE].EosTokenCriteria
    has_ended = criteria.__call__

    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        ended = has_ended(self, *args, **kwargs)
        _assume(known, ended, False, "EosTokenCriteria", even_if_known=True)  # tokens that take turns are no answer
        return ended

    with mock.patch.object(criteria, "__call__", asked):
        yield


@contextmanager
def _beams_go_on(known: Knowledge) -> Iterator[None]:
    """In beam search all sequences end at once: no beam has ended before, and each holds equally many tokens."""
    if not all(name.present() for name in (EARLY_STOP, FINISHED_BEAMS)):
        yield
        return
    may_improve, update = EARLY_STOP.value, FINISHED_BEAMS.value

    def checked(*args: Any, **kwargs: Any) -> Any:
        improves = may_improve(*args, **kwargs)
        _assume(known, improves, True, "beam search")
        return improves

    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequences, scores, beams, finished = update(self, *args, **kwargs)
        at_end = kwargs["next_token_hits_stopping_criteria"]
        if known.knows_all([at_end]):
            with no_modes():
                is_end = bool(known.values.read(at_end).all())
            _assume(known, finished, is_end, "beam search")
            _assume(known, beams, 0 if is_end else -1, "beam search")  # the beam of each token; -1 where there is none
        return sequences, scores, beams, finished

    with EARLY_STOP.replaced(staticmethod(checked)), FINISHED_BEAMS.replaced(updated):
        yield


def _assume(known: Knowledge, tensor: Any, value: int, asker: str, even_if_known: bool = False) -> None:
    """Gives an unknown tensor on meta this value everywhere."""
    if isinstance(tensor, Tensor) and tensor.is_meta and (even_if_known or not known.knows_all([tensor])):
        with no_modes():
            known.set_all(tensor, value)
        known.assume.note(RULE, asker)
