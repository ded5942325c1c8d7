"""The optimiser of the reversal task, against its formulas."""

import jax
import numpy as np
import pytest
from attention_jax.tasks.reversal.task import ReversalConfig, optimizer

from attention_jax.training.loop import LoopConfig


def config(**settings):
    return ReversalConfig(loop=LoopConfig(steps=10), learning_rate=0.5, **settings)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam counts in int32 and multiplies floats by it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_optimizer_clips_and_decays_to_zero():
    made = optimizer(config(clip_norm=1.0, weight_decay=0.0))
    updated = jax.jit(made.update)
    params = {"w": np.zeros(3, np.float32)}
    gradient = {"w": np.array([300.0, 0.0, -400.0], np.float32)}
    first, state = updated(gradient, jax.jit(made.init)(params), params)
    # Adam's first step is the sign of the gradient, times the rate.
    np.testing.assert_allclose(first["w"], [-0.5, 0.0, 0.5], atol=1e-5)
    (mu,) = [
        s.mu for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")
    ]
    np.testing.assert_allclose(mu["w"], [0.06, 0.0, -0.08], rtol=1e-5)  # of the clipped gradient
    for step in range(1, 11):
        update, state = updated(gradient, state, params)
        rate = 0.5 * (1 + np.cos(np.pi * step / 10)) / 2
        np.testing.assert_allclose(update["w"], [-rate, 0.0, rate], atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_every_parameter_decays_by_the_rate_times_the_weight_decay(weight_decay):
    made = optimizer(config(weight_decay=weight_decay))
    params = {"w": np.array([4.0, -2.0, 0.0], np.float32)}
    zero = {"w": np.zeros(3, np.float32)}
    state = jax.jit(made.init)(params)
    for step in range(3):
        rate = 0.5 * (1 + np.cos(np.pi * step / 10)) / 2
        update, state = jax.jit(made.update)(zero, state, params)
        np.testing.assert_allclose(update["w"], -rate * weight_decay * params["w"], atol=1e-6)
