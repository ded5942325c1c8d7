"""Stands for training where tests need checkpoints and no learning."""

import jax
import jax.numpy as jnp
import numpy as np


def scaled_at_each_step(_task, _feed, _layout, state, records, _interruption):
    """Stands for training: each checkpoint has larger parameters than the one before."""
    start = jax.tree.map(np.asarray, state.params)
    for step in (2, 4, 6):
        params = jax.tree.map(lambda leaf, n=step: jnp.asarray(leaf * np.float32(1 + n / 6)), start)
        state = state._replace(step=jnp.full_like(state.step, step), params=params)
        records.checkpoints.save(step, state)
    return state
