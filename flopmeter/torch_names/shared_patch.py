"""A patch that several meters need at a time, of one thread or of many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack


class SharedPatch:
    """A context: the first user makes the patch, the last one undoes it. `install` returns what undoes it."""

    def __init__(self, install: Callable[[], ExitStack]) -> None:
        self._install, self._undo = install, ExitStack()
        self._users, self._lock = 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._undo = self._install()
            self._users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo.close()
