"""Attention's gradient, station by station: against the complex step in NumPy, and `jax.vjp`."""

import conformance as suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_cases import each_score

from attention_jax import attention
from attention_jax.analysis import attention_gradients

DOUTPUT = suite.cotangents()["output"]  # [B, T, DV]


def check(score_name, mask_name, dtype, tolerance):
    inputs, allowed = suite.inputs_of(score_name), suite.allowed_table(mask_name)
    inputs = suite.poisoned(inputs, allowed)
    doutput = np.where(allowed.any(-1)[..., None], DOUTPUT, np.nan)
    expected = suite.numpy_side(score_name, mask_name, shared=False)[1]
    arrays = {**inputs, "doutput": doutput}
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), arrays)
    mask = suite.MASK_CASES[mask_name].build()
    got = attention_gradients(**arrays, score=suite.SCORE_CASES[score_name].score, mask=mask)
    for name in ("query", "key", "value", "bias", "params"):
        of_name = getattr(got, f"d{name}")
        wide = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
        assert {leaf.dtype for leaf in jax.tree.leaves(of_name)} <= {wide}
        suite.assert_close(f"d{name}", of_name, expected[name], tolerance)
    # A bias of the full shape gets the gradient of the logits as it is.
    suite.assert_close("dlogits", got.dlogits, expected["bias"], tolerance)
    value = np.where(allowed.any(1)[..., None], inputs["value"], 0)
    dweights = np.einsum("btv,bsv->bts", DOUTPUT, value) * allowed
    suite.assert_close("dweights", got.dweights, dweights, tolerance)
    for name in ("dweights", "dlogits"):
        assert not np.any(np.asarray(getattr(got, name))[~allowed]), name


@pytest.mark.parametrize("score_name", each_score(fast=["own"]))
def test_every_score_with_nan_padding(score_name):
    with jax.enable_x64(True):
        check(score_name, suite.MASK_OF_SCORE[score_name], jnp.float64, 1e-12)


def test_narrower_floats_come_back_in_float32():
    """The inputs are exact in bfloat16, and nothing on the way is rounded to it."""
    check("general", "dense", jnp.bfloat16, 2e-5)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_a_hessian_is_the_same_forward_over_reverse(implementation):
    """A compiler got this wrong from 17 keys on, in a batch of tangents of the gradient."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 40, 6))
    kernel = jax.random.normal(jax.random.key(1), (6, 6)) / 2

    def loss(kernel):
        output = attention(query @ kernel, key, value, implementation=implementation)
        return jnp.sum(jnp.sin(output))

    expected = jax.jacrev(jax.jacrev(loss))(kernel)
    suite.assert_close("hessian", jax.hessian(loss)(kernel), expected, 2e-5)
