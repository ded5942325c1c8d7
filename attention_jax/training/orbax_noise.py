"""What Orbax says beside its exceptions, silenced: the exceptions we tell ourselves."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any


def silence_narration() -> None:
    """Its logs, and the traces of writes that it abandons when one fails; for good."""
    for narrator in ("absl", "asyncio"):
        logging.getLogger(narrator).setLevel(logging.CRITICAL)
    _silence_abandoned_writes()


@contextlib.contextmanager
def without_abandoned_reads() -> Iterator[None]:
    """Silences reads that Orbax abandons when one fails: pages of traces, whose error we tell."""
    shown, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that nobody awaits
            try:
                yield
            except Exception:
                time.sleep(0.1)  # for those on other threads
                gc.collect()
                raise
    finally:
        sys.unraisablehook = shown


@functools.cache
def _silence_abandoned_writes() -> None:
    """The same of writes, which go on beside the training and end when they please: for good."""
    shown = sys.unraisablehook

    def hook(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            shown(what)

    sys.unraisablehook = hook
