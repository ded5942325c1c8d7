"""Forward mode with respect to some of the arrays that a function takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def partial_jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`jax.jvp` with respect to the perturbed arrays only.

    Args:
        function: takes `primals`.
        primals: a tuple of pytrees of arrays.
        tangents: the same, with None for each array that is not perturbed.

    Returns:
        (the result, its tangent); the tangent is None if no array is perturbed.
    """

    def leaves_with_none(tree: Any) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

    # Where the primals themselves have a None, it is no array, and has no tangent.
    pairs = zip(leaves_with_none(primals), leaves_with_none(tangents), strict=True)
    leaf_tangents = [tangent for leaf, tangent in pairs if leaf is not None]
    perturbed = [i for i, tangent in enumerate(leaf_tangents) if tangent is not None]
    if not perturbed:
        return function(*primals), None
    on_leaves, leaves = function_of_leaves(function, primals, perturbed)
    return jax.jvp(on_leaves, (leaves,), ([leaf_tangents[i] for i in perturbed],))


def function_of_leaves(
    function: Callable[..., Any], arguments: Any, indices: Sequence[int]
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """(the function of a list of some leaves of its arguments, these leaves).

    Args:
        function: takes `arguments`.
        arguments: a tuple of pytrees of arrays.
        indices: the indices of the leaves in `jax.tree.leaves(arguments)`.
    """
    leaves, structure = jax.tree.flatten(arguments)

    def on_leaves(replacements: list[Any]) -> Any:
        all_leaves = list(leaves)
        for index, leaf in zip(indices, replacements, strict=True):
            all_leaves[index] = leaf
        return function(*jax.tree.unflatten(structure, all_leaves))

    return on_leaves, [leaves[index] for index in indices]
