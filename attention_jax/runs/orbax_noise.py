"""Silences what Orbax prints in addition to its exceptions, which `checkpoints.py` reports."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


def silence_narration() -> None:
    """Silences, for the whole process, its logs and the traces of reads and writes it abandons."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    _silence_abandoned_coroutines()


@contextlib.contextmanager
def without_unawaited_reads() -> Iterator[None]:
    """Silences warnings about reads that Orbax started and does not await after another failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        except Exception:
            gc.collect()  # triggers the warnings while they are silenced
            raise


@functools.cache
def _silence_abandoned_coroutines() -> None:
    original = sys.unraisablehook

    # One failed read can print hundreds of traces, from other threads and at any time.
    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            original(unraisable)

    sys.unraisablehook = hook
