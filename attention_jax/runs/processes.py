"""Runs of many processes: which process writes files, and how the processes agree.

Each process runs the same program on its own devices, and `jax.distributed` connects them. The
first process writes logs and files. Decisions to continue, stop or fail are taken together, with
the functions of this module. With one process they cost nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from attention_jax.core.programs import one_line


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Which process this is. JAX finds out by itself on SLURM, TPU pods and with Open MPI.

    Attributes:
        coordinator: "host:port" of the first process; all others must reach it.
        process_count: the number of processes.
        process_index: the index of this process, from 0.
    """

    coordinator: str | None = None
    process_count: int | None = None
    process_index: int | None = None

    def __post_init__(self) -> None:
        coordinator, count, index = dataclasses.astuple(self)
        given = [value is not None for value in (coordinator, count, index)]
        if not any(given):
            return
        if not all(given):
            raise ValueError(
                "coordinator, process_count and process_index must be given together, or left out"
                f" on a cluster that JAX recognises; got {dataclasses.asdict(self)}"
            )
        if not re.fullmatch(r".+:\d+", coordinator):
            raise ValueError(f"coordinator must be host:port; got {coordinator!r}")
        if not 0 <= index < count:
            raise ValueError(
                f"process_index must be from 0 to process_count - 1 = {count - 1}; got {index}"
            )


_TIMEOUT = 30  # seconds without a heartbeat after which a process counts as dead


def join(distribution: Distribution) -> None:
    """Connects to the other processes; must be called before JAX is asked for its devices.

    From then on, if one process dies, JAX ends the others within half a minute. A process that
    fails waits for the others for up to half a minute before it ends.

    Raises:
        ValueError: JAX recognises no cluster and none was described, or the other processes cannot
            be reached.
    """
    try:
        jax.distributed.initialize(
            distribution.coordinator,
            distribution.process_count,
            distribution.process_index,
            heartbeat_timeout_seconds=_TIMEOUT,
            shutdown_timeout_seconds=_TIMEOUT,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"distributed: the processes of this run cannot be joined: {one_line(error)}. Give"
            " coordinator, process_count and process_index, with the same coordinator everywhere"
        ) from error


def are_lost(error: Exception) -> bool:
    """Whether an error means that other processes of the run cannot be reached."""
    signs = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "Gloo", "heartbeat", "Connection closed by peer")
    return jax.process_count() > 1 and any(sign in str(error) for sign in signs)


def is_first() -> bool:
    """Whether this process writes the files."""
    return jax.process_index() == 0


def largest(number: int) -> int:
    """The largest of all processes' numbers. All must call it, and wait for each other."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.asarray(number, np.int32))))


def check_same(settings: str) -> None:
    """Raises ValueError, on all processes, unless all have the same settings.

    Otherwise they would exchange arrays of different sizes, and crash.
    """
    digest = zlib.crc32(settings.encode()) >> 1  # 31 bits
    if largest(digest) != -largest(-digest):
        raise ValueError(
            "the processes of this run have different settings: start all with the same command"
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Fails on all processes if the block fails on one, so that no process waits for another.

    The block itself must not wait for other processes.

    Raises:
        ValueError: the block failed on another process, which reports the reason.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = largest(int(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise ValueError("another process of this run failed: see its error")
