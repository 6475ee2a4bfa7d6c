"""Says on the terminal what a command is doing, once it has taken two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 2.0
TICK_SECONDS = 1.0
_CLEAR = "\r\x1b[K"  # clears the line of a terminal


class Progress:
    """One line on stderr that says what runs and for how long; nothing in the first two seconds, nothing in a pipe."""

    def __init__(self, what: str):
        self._text = what
        self._done = threading.Event()
        self._teller: threading.Thread | None = None

    def over(self, steps: Sequence[T]) -> Iterable[T]:
        """The steps, counted while they are taken: the `progress` of compare, sweep, serving and calibrate."""
        what = self._text
        for number, step in enumerate(steps, 1):
            self._text = f"{what}: {number} of {len(steps)}"
            yield step
        self._text = what

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._teller = threading.Thread(target=self._tell, daemon=True)
            self._teller.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Clears the line before a result is printed. A second call does nothing."""
        self._done.set()
        if self._teller is not None:
            self._teller.join()

    def _tell(self) -> None:
        began = time.monotonic()
        if self._done.wait(PATIENCE_SECONDS):
            return
        for line in self._lines(began):
            sys.stderr.write(_CLEAR + line)
            sys.stderr.flush()

    def _lines(self, began: float) -> Iterator[str]:
        while True:
            yield f"{self._text} · {time.monotonic() - began:.0f} s"
            if self._done.wait(TICK_SECONDS):
                yield ""
                return
