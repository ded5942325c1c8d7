"""One decision for a batch: what it decides, and that it has no batch axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.core.batches import all_over_batch, any_over_batch

FLAGS = np.array([[1, 0, 0, 1], [0, 0, 1, 1]], bool)


def test_without_vmap_the_flags_themselves():
    for decide in (any_over_batch, all_over_batch, jax.jit(any_over_batch)):
        np.testing.assert_array_equal(decide(jnp.asarray(FLAGS)), FLAGS)


@pytest.mark.parametrize("decide", [any_over_batch, all_over_batch])
def test_under_vmap_one_answer_without_a_batch_axis(decide):
    """Also where some of several axes map the flags; `out_axes=None` refuses what has one."""
    expected = (np.any if decide is any_over_batch else np.all)(FLAGS, 0)
    for mapped in (
        jax.vmap(decide, out_axes=None),
        jax.jit(jax.vmap(decide, out_axes=None)),
        jax.vmap(jax.jit(decide), out_axes=None),
    ):
        np.testing.assert_array_equal(mapped(FLAGS), expected)
    np.testing.assert_array_equal(jax.vmap(decide, 1, None)(FLAGS.T), expected)
    both = jax.vmap(jax.vmap(decide, out_axes=None), out_axes=None)
    np.testing.assert_array_equal(both(np.stack([FLAGS] * 3)), expected)
    inner = jax.vmap(lambda x, flags: decide(flags), (0, None), None)
    outer_only = jax.vmap(inner, (None, 0), None)
    np.testing.assert_array_equal(outer_only(np.ones(7), FLAGS), expected)


def test_a_branch_stays_a_branch_and_a_loop_is_not_masked():
    def decide(x, flag):
        return jax.lax.cond(any_over_batch(flag), jnp.sin, jnp.cos, x)

    def loop(x, count):
        at_most = any_over_batch(jnp.arange(5) < count).sum()
        return jax.lax.fori_loop(0, at_most, lambda i, x: jnp.sin(x), x)

    x, flags, counts = np.ones(2, np.float32), FLAGS[:, 0], np.array([1, 3])
    jaxpr = str(jax.make_jaxpr(jax.vmap(decide))(x, flags))
    assert "cond[" in jaxpr
    assert "select_n" not in jaxpr
    np.testing.assert_allclose(jax.vmap(decide)(x, flags), np.sin(x), rtol=1e-6)
    assert "reduce_or" not in str(jax.make_jaxpr(jax.vmap(loop))(x, counts)).split("while[")[1]
    np.testing.assert_allclose(jax.vmap(loop)(x, counts), np.sin(np.sin(np.sin(x))), rtol=1e-6)


def test_derivatives_scan_and_checkpoint_pass_it():
    def decide(x, flag):
        return jax.lax.cond(any_over_batch(flag), jnp.sin, jnp.cos, x)

    x, flags = jnp.array([0.3, 0.7]), jnp.array([False, True])

    def total(x):
        return jax.vmap(jax.checkpoint(decide))(x, flags).sum()

    np.testing.assert_allclose(jax.grad(total)(x), np.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(total)(x), np.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(decide))(x, flags), np.cos(x), rtol=1e-6)

    def step(carry, flag):
        return carry, jax.vmap(decide, (0, None))(x, flag)

    _, scanned = jax.lax.scan(step, 0, flags)
    np.testing.assert_allclose(scanned, [np.cos(x), np.sin(x)], rtol=1e-6)
