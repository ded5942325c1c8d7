"""Disks without room, and disks and folders that cannot be written."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .findings import Ended, Findings
from .processes import (
    EVERY,
    Place,
    end,
    every_byte,
    result,
    saved_steps,
    steps_to_lose,
    wait_until_begun,
    wait_until_saving,
)

AS_OTHERS = ("setpriv", "--bounding-set=-dac_override")  # for root, who may write anywhere
REFUSED = r"error: (checkpoint of step \d+ could not be saved in|file|workdir) .+"


class SkippedError(Exception):
    """The machine does not allow this fault."""


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in memory."""
    folder.mkdir()
    mounted = _mount("-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", str(folder))
    if not mounted:
        raise SkippedError("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _mount(*words: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0
    return False


def full_disk(place: Place, rng: random.Random, found: Findings) -> None:
    """The disk fills up, to the last byte or nearly; later there is room again."""
    with small_disk(place.fresh(), "12m") as disk:
        workdir, filler = disk / "run", disk / "filler"
        process = place.start(workdir)
        moment = rng.choice([None, wait_until_begun, wait_until_saving, wait_until_saving])
        if moment is not None:
            moment(process, workdir)
            time.sleep(rng.uniform(0, 3))
        _fill(filler, leave=rng.choice([0, 0, 0, 4096, 40_960, 2**20]))
        ended = end(process)
        filler.unlink()
        _refused_then_resumed(place, workdir, ended, found)


def _fill(path: Path, leave: int) -> None:
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(file.tell() - leave, 0))


def limited_files(place: Place, rng: random.Random, found: Findings) -> None:
    """No file may grow beyond a few bytes, as under `ulimit -f`: what is written is cut off."""
    workdir = place.fresh()
    process = place.start(workdir)
    wait_until_saving(process, workdir)
    time.sleep(rng.uniform(0, 3))
    limit = int(2 ** rng.uniform(0, 11))
    with contextlib.suppress(ProcessLookupError):  # it has ended by now
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    found.case += f", {limit} bytes"
    _refused_then_resumed(place, workdir, end(process), found)


def taken_away(place: Place, rng: random.Random, found: Findings) -> None:
    """A folder that could be written can no longer be, before a run goes on or while it does."""
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        raise SkippedError("root may write anywhere, and there is no setpriv to change that")
    under = AS_OTHERS if os.getuid() == 0 else ()
    workdir = place.fresh()
    process = place.start(workdir, under=under)
    wait_until_saving(process, workdir)
    time.sleep(rng.uniform(0, 2))
    meanwhile = rng.random() < 0.6
    if not meanwhile:
        process.kill()
        end(process)
    folder = rng.choice([workdir, workdir / "checkpoints"])
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    before = every_byte(workdir)
    ended = end(process if meanwhile else place.start(workdir, "--resume", under=under))
    folder.chmod(mode)
    found.case += f", {folder.name}"
    if not meanwhile:
        found.expect(every_byte(workdir) == before, "something changed on disk")
    _refused_then_resumed(place, workdir, ended, found, under=under)


def read_only_disk(place: Place, rng: random.Random, found: Findings) -> None:
    """A run is to begin, or to go on, on a disk that is mounted read-only."""
    with small_disk(place.fresh(), "12m") as disk:
        workdir = disk / "run"
        if rng.random() < 0.7:
            process = place.start(workdir)
            wait_until_saving(process, workdir)
            process.kill()
            end(process)
        before = every_byte(disk)
        if not _mount("-o", "remount,ro", str(disk)):
            raise SkippedError("no file system can be mounted again here")
        ended = place.run(workdir, "--resume")
        found.expect(every_byte(disk) == before, "something changed on disk")
        _mount("-o", "remount,rw", str(disk))
        _refused_then_resumed(place, workdir, ended, found)


def _refused_then_resumed(
    place: Place, workdir: Path, ended: Ended, found: Findings, **options: Any
) -> None:
    """One line, and nothing lost but what came after the last save."""
    wanted = result(place.undisturbed())
    if ended.status == 0:
        found.ended("came too late, or was small enough")
    else:
        found.said(ended, status=2, line=REFUSED)
        found.steps_lost(steps_to_lose(workdir), allowed=2 * EVERY)
        begun = "with steps saved" if saved_steps(workdir) else "before the first save"
        found.said(place.run(workdir, "--resume", **options), status=0)
        found.ended(f"one line {begun}, later resumed")
    found.same(result(workdir), wanted)
