"""Many processes, one run: who writes, and how they come to one mind.

Each process runs the same program on its own devices, and `jax.distributed` makes one machine of
them. What only one can do (logs, the folder) the first does; what all must do together (go on,
stop, give up) they agree on here. With one process everything here is free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from attention_jax.core.one_line import one_line


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Which process this is; all left out where the cluster says it (SLURM, TPU pods, Open MPI).

    Attributes:
        coordinator: "host:port" of the first process, which all others can reach.
        process_count: how many processes there are.
        process_index: which of them this is, from 0.
    """

    coordinator: str | None = None
    process_count: int | None = None
    process_index: int | None = None

    def __post_init__(self) -> None:
        given = [value is not None for value in dataclasses.astuple(self)]
        if any(given) and not all(given):
            raise ValueError(
                "coordinator, process_count and process_index must be given together, or none of"
                f" them for a cluster that JAX knows; got {dataclasses.asdict(self)}"
            )
        if self.coordinator is None or self.process_count is None or self.process_index is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator must be host:port; got {self.coordinator!r}")
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"process_index must be from 0 to process_count - 1 = {self.process_count - 1};"
                f" got {self.process_index}"
            )


_SILENCE = 30  # seconds after which a process that says nothing is taken for dead


def join(distribution: Distribution) -> None:
    """Meets the other processes; to be called before anything else asks JAX for its devices.

    From here on, where one process dies, JAX ends the others too, within half a minute; one that
    fails alone waits as long for them before it ends.

    Raises:
        ValueError: no cluster is known and none was described, or the others cannot be reached.
    """
    try:
        jax.distributed.initialize(
            distribution.coordinator,
            distribution.process_count,
            distribution.process_index,
            heartbeat_timeout_seconds=_SILENCE,
            shutdown_timeout_seconds=_SILENCE,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"distributed: the processes of this run cannot be joined: {one_line(error)}. Give"
            " coordinator, process_count and process_index, the first the same everywhere"
        ) from error


def are_lost(error: Exception) -> bool:
    """Whether an error says that other processes of the run cannot be reached."""
    signs = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "Gloo", "heartbeat", "Connection closed by peer")
    return jax.process_count() > 1 and any(sign in str(error) for sign in signs)


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def largest(number: int) -> int:
    """The largest of all processes' numbers; all must call it, and wait for each other in it."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.asarray(number, np.int32))))


def check_same(settings: str) -> None:
    """Raises ValueError, on all processes, unless all of them have the same settings.

    Programs that differ would send each other arrays of other sizes, and crash.
    """
    digest = zlib.crc32(settings.encode()) >> 1  # 31 bits
    if largest(digest) != -largest(-digest):
        raise ValueError(
            "the processes of this run have different settings: start all with the same command"
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What fails on one process fails on all, so that none waits for one that has left.

    What stands under it must not wait for the others itself.

    Raises:
        ValueError: another process could not do its part; its own error says more.
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
        raise ValueError("another process of this run could not go on: see what it says")
