"""One decision for a whole batch, where `jax.vmap` would take one for each example.

Under `jax.vmap` a `lax.cond` whose predicate differs between examples runs both branches, and a
loop whose bound differs copies what it carries. A decision that is right for the whole batch (do
it, if any example needs it) keeps them what they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Array = jax.Array


@custom_vmap
def any_over_batch(flags: Array) -> Array:
    """`flags` themselves; under `jax.vmap`, whether any example of the batch has each set.

    Args:
        flags: bool, any shape.

    Returns:
        bool of the same shape, the same for all examples: it has no batch axis.
    """
    return flags


@any_over_batch.def_vmap
def _any_over_batch_rule(axis_size, in_batched, flags):
    del axis_size
    return any_over_batch(jnp.any(flags, axis=0) if in_batched[0] else flags), False


def all_over_batch(flags: Array) -> Array:
    """The same with "all" in place of "any"."""
    return ~any_over_batch(~flags)
