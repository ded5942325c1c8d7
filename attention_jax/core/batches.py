"""Predicates for a whole batch, where `jax.vmap` would have one for each example.

Under `jax.vmap`, a `lax.cond` whose predicate differs between examples runs both branches, and a
loop whose bound differs copies its carry. A predicate for the whole batch (whether any example
needs the branch) avoids both.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Array = jax.Array


@custom_vmap
def any_over_batch(flags: Array) -> Array:
    """`flags` unchanged; under `jax.vmap`, whether each flag is set in any example of the batch.

    Args:
        flags: bool, any shape.

    Returns:
        bool of the same shape, without a batch axis: the same for all examples.
    """
    return flags


@any_over_batch.def_vmap
def _any_over_batch_rule(axis_size, in_batched, flags):
    return any_over_batch(jnp.any(flags, axis=0) if in_batched[0] else flags), False


def all_over_batch(flags: Array) -> Array:
    """`flags` unchanged; under `jax.vmap`, whether each flag is set in all examples."""
    return ~any_over_batch(~flags)
