"""Forward mode with respect to some of the arrays that a function takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def jvp_of_moving(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`jax.jvp`, for only those arrays that move.

    Args:
        function: takes `primals`.
        primals: a tuple of pytrees of arrays.
        tangents: the same, with None for each array that does not move.

    Returns:
        (the result, its tangent), the tangent None if nothing moves.
    """
    leaves, structure = jax.tree.flatten(primals, is_leaf=_is_none)
    given = jax.tree.leaves(tangents, is_leaf=_is_none)
    moving = [index for index, tangent in enumerate(given) if tangent is not None]
    if not moving:
        return function(*primals), None

    def of_moving(*moved):
        every = list(leaves)
        for index, leaf in zip(moving, moved, strict=True):
            every[index] = leaf
        return function(*jax.tree.unflatten(structure, every))

    return jax.jvp(
        of_moving, [leaves[index] for index in moving], [given[index] for index in moving]
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None
