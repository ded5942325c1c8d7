"""Processes that are killed, or asked to stop."""

from __future__ import annotations

import math
import random
import signal
import time

from .findings import Findings
from .processes import (
    EVERY,
    TEMPORARY,
    Place,
    result,
    steps_to_lose,
    stop,
    wait_until_begun,
    wait_until_saving,
)

LONG = ("--steps", "16000", "--log-every", "8000", "--checkpoint-every", "8000")
AT_ONCE = 3.0  # seconds


def killed(place: Place, rng: random.Random, found: Findings) -> None:
    """kill -9 again and again, until the run comes to its end between two."""
    workdir, wanted = place.fresh(), result(place.undisturbed())
    while True:
        process = place.start(workdir, "--resume")
        # One in four while it restores and compiles; saves begin at once after that.
        (wait_until_begun if rng.random() < 0.25 else wait_until_saving)(process, workdir)
        time.sleep(rng.uniform(0, 2))
        ended = stop(process, signal.SIGKILL)
        if ended.status != -signal.SIGKILL:
            break
        found.steps_lost(steps_to_lose(workdir), allowed=2 * EVERY)
        half = any(TEMPORARY in path.name for path in (workdir / "checkpoints").iterdir())
        found.ended("killed within a save" if half else "killed between saves")
        found.expect(ended.err == "", f"said {ended.err!r}")
    found.said(ended, status=0)
    found.same(result(workdir), wanted)
    left = [path.name for path in (workdir / "checkpoints").iterdir() if TEMPORARY in path.name]
    found.expect(not left, f"left {left}")
    found.ended("runs resumed to the end", times=0)


def killed_at_the_start(place: Place, rng: random.Random, found: Findings) -> None:
    """kill -9 before or while the folder is made, and then the same command with --resume."""
    workdir, wanted = place.fresh(), result(place.undisturbed())
    process = place.start(workdir)
    if rng.random() < 0.7:
        while process.poll() is None and not workdir.exists():
            time.sleep(0.0005)
        time.sleep(rng.choice([0, 0.001, 0.01, 0.1]) * rng.random())
    else:
        time.sleep(rng.uniform(0, 5))
    stop(process, signal.SIGKILL)
    there = sorted(path.name for path in workdir.iterdir()) if workdir.exists() else []
    found.said(place.run(workdir, "--resume"), status=0)
    found.same(result(workdir), wanted)
    found.ended(f"resumed from {'no more than ' + there[-1] if there else 'nothing'}")


def asked_to_stop(place: Place, rng: random.Random, found: Findings) -> None:
    """SIGTERM or SIGINT once, then --resume."""
    workdir, wanted = place.fresh(), result(place.undisturbed())
    number = rng.choice([signal.SIGTERM, signal.SIGINT])
    process = place.start(workdir)
    (wait_until_begun if rng.random() < 0.3 else wait_until_saving)(process, workdir)
    time.sleep(rng.uniform(0, 4))
    ended = stop(process, number)
    if ended.status == 0:
        found.ended("came after the last step")
    else:
        line = "stopped by a signal; --resume goes on from here"
        found.said(ended, status=128 + number, line=line)
        found.steps_lost(steps_to_lose(workdir), allowed=0)
        found.said(place.run(workdir, "--resume"), status=0)
        found.ended(f"{number.name}: saved, exit {ended.status}, resumed")
    found.same(result(workdir), wanted)


def asked_twice(place: Place, rng: random.Random, found: Findings) -> None:
    """A second signal within a compiled call of several seconds."""
    workdir, wanted = place.fresh(), result(place.undisturbed(*LONG), 16000)
    first, second = (rng.choice([signal.SIGTERM, signal.SIGINT]) for _ in range(2))
    process = place.start(workdir, *LONG)
    wait_until_begun(process, workdir)
    time.sleep(rng.uniform(0, 3))
    process.send_signal(first)
    time.sleep(rng.uniform(0.05, 0.5))
    asked = time.monotonic()
    ended = stop(process, second)
    took = time.monotonic() - asked
    # Killed by it, or, if Python had not yet looked at the first, ended by the thread that waits.
    found.said(ended, status=-second if ended.status < 0 else 128 + second)
    found.expect(took < AT_ONCE, f"took {took:.1f} s to end")
    found.steps_lost(steps_to_lose(workdir), allowed=2 * 8000)
    found.said(place.run(workdir, *LONG, "--resume"), status=0)
    found.same(result(workdir, 16000), wanted)
    found.ended(f"ended within {max(math.ceil(took), 1)} s, resumed")
