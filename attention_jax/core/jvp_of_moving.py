"""Forward mode with respect to some of the arrays that a function takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    given = jax.tree.leaves(tangents, is_leaf=_is_none)
    # A pytree may have a None of its own, which does not count as an array.
    places = [leaf is not None for leaf in jax.tree.leaves(primals, is_leaf=_is_none)]
    given = [tangent for tangent, counts in zip(given, places, strict=True) if counts]
    moving = [index for index, tangent in enumerate(given) if tangent is not None]
    if not moving:
        return function(*primals), None
    of_leaves, leaves = of_moving(function, primals, moving)
    return jax.jvp(of_leaves, (leaves,), ([given[index] for index in moving],))


def of_moving(
    function: Callable[..., Any], primals: Any, moving: Sequence[int]
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """The function as one of a list of some leaves of its arguments, and these leaves.

    Args:
        function: takes `primals`.
        primals: a tuple of pytrees of arrays.
        moving: the numbers of the leaves, as `jax.tree.leaves` counts them.
    """
    leaves, structure = jax.tree.flatten(primals)

    def of_leaves(moved: list[Any]) -> Any:
        every = list(leaves)
        for index, leaf in zip(moving, moved, strict=True):
            every[index] = leaf
        return function(*jax.tree.unflatten(structure, every))

    return of_leaves, [leaves[index] for index in moving]


def _is_none(leaf: Any) -> bool:
    return leaf is None
