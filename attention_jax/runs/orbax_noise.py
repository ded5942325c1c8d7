"""What Orbax says beside its exceptions, silenced: the exceptions we tell ourselves."""

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
    """Its logs, and the traces of reads and writes that it abandons when one fails; for good."""
    for narrator in ("absl", "asyncio"):
        logging.getLogger(narrator).setLevel(logging.CRITICAL)
    _silence_what_is_abandoned()


@contextlib.contextmanager
def without_unawaited_reads() -> Iterator[None]:
    """Silences warnings of reads that were begun when another failed, and are never waited for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        except Exception:
            gc.collect()  # here, and not where the warnings would be heard
            raise


@functools.cache
def _silence_what_is_abandoned() -> None:
    shown = sys.unraisablehook

    # On threads of their own, whenever they please: hundreds of traces, whose one error we tell.
    def hook(what: Any) -> None:
        code = getattr(what.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and str(what.exc_value) != "Event loop is closed":
            shown(what)

    sys.unraisablehook = hook
