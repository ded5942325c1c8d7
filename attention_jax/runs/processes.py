"""Several processes of one run, joined by `jax.distributed`: the first writes, all decide together.

A process cannot train on alone: it would wait for the others inside a compiled call. So every
process calls the functions here that exchange something, in the same order. In a program of one
process they return at once, and do not touch a device.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from attention_jax.core.errors import one_line


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes files and prints."""
    return not several() or jax.process_index() == 0


def exchanged(text: str) -> list[str]:
    """Sends a text to all processes; returns the text of each process, in their order."""
    if not several():
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(mine.size))
    if not lengths.any():
        return [""] * len(lengths)
    rows = multihost_utils.process_allgather(np.resize(mine, lengths.max()))
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Waits at its end for all processes, and raises the error of one process in all of them.

    The code inside must not call a function that exchanges something.

    Raises:
        ValueError: another process failed; the message begins with its number.
    """
    try:
        yield
    except Exception as error:
        if several():
            message = f"process {jax.process_index()}: {one_line(error)}"
            exchanged(message)
            if isinstance(error, ValueError):
                error.args = (message,)
        raise
    for message in filter(None, exchanged("")):
        raise ValueError(message)


def first_does(action: Callable[[], object]) -> None:
    """Calls the action in the first process; an error of it is raised in all processes."""
    with together():
        if is_first():
            action()


def whole(tree: Any) -> Any:
    """Copies arrays from the devices of all processes to NumPy arrays, whole in each process."""
    return multihost_utils.process_allgather(tree, tiled=True) if several() else tree


def from_first(tree: Any, like: Any) -> Any:
    """Spreads the arrays of the first process over the devices of all processes.

    Args:
        tree: the arrays, or None for None in all processes; not read in the other processes.
        like: shapes, dtypes and shardings.
    """
    if not several() or not exchanged("" if tree is None else "there")[0]:
        return tree

    def spread(leaf: jax.ShapeDtypeStruct, value: Any) -> jax.Array:
        host = np.asarray(value) if is_first() else np.zeros(leaf.shape, leaf.dtype)
        # A sum, as in JAX's own broadcast, would turn -0.0 into 0.0.
        found = multihost_utils.process_allgather(host)[0]
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda part: found[part])

    return jax.tree.map(spread, like, tree if is_first() else like)


def check_equal(values: dict[str, Any]) -> None:
    """Raises ValueError unless all processes have the same values, JSON, under each name.

    Different machines may round the numbers of a user's score differently.
    """
    of_all = [json.loads(text) for text in exchanged(json.dumps(values))]
    for index, other in enumerate(of_all):
        for name in {**of_all[0], **other}:
            if of_all[0].get(name) != other.get(name) and not name.endswith("numbers"):
                raise ValueError(
                    f"{name} must be equal in all processes; got {of_all[0].get(name)!r} in"
                    f" process 0 and {other.get(name)!r} in process {index}"
                )
