"""Attention's gradient, station by station: against the complex step in NumPy, and `jax.vjp`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_SCORES,
    MASK_CASES,
    MASK_OF_SCORE,
    SCORE_CASES,
    B,
    allowed_table,
    assert_close,
    cotangents,
    inputs_of,
    named,
    numpy_example,
    poisoned,
)
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.analysis import attention_gradients
from attention_jax.pairwise.biases import ShiftedBias
from attention_jax.pairwise.position_functions import Shifts

DOUTPUT = cotangents()["output"]  # [B, T, DV]


@functools.cache
def numpy_gradients(score_name, mask_name):
    """Of <DOUTPUT, output>, each with B in front, parameters too; a bias [B, T, S] gets dlogits."""
    inputs, allowed = inputs_of(score_name), allowed_table(mask_name)
    examples = []
    for b in range(B):
        example = {name: inputs[name][b] for name in ("query", "key", "value", "bias")}
        example["params"] = inputs["params"]
        cotangent = {name: np.zeros_like(array[b]) for name, array in cotangents().items()}
        cotangent["output"] = DOUTPUT[b]
        pair = SCORE_CASES[score_name].pair
        examples.append(numpy_example(pair, example, allowed[b], cotangent)[1])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


def library_gradients(score_name, mask, inputs, doutput, dtype):
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), inputs)
    return attention_gradients(
        **arrays,
        doutput=jnp.asarray(doutput, dtype),
        score=SCORE_CASES[score_name].score,
        mask=mask,
    )


def check(score_name, mask_name, dtype, tolerance, as_table=False):
    inputs, allowed = inputs_of(score_name), allowed_table(mask_name)
    inputs = poisoned(inputs, allowed)
    doutput = np.where(allowed.any(-1)[..., None], DOUTPUT, np.nan)
    expected = numpy_gradients(score_name, mask_name)
    mask = jnp.asarray(allowed) if as_table else MASK_CASES[mask_name].build()
    got = jax.device_get(library_gradients(score_name, mask, inputs, doutput, dtype))
    for name in ("query", "key", "value", "bias", "params"):
        of_name = named(getattr(got, f"d{name}"))
        assert of_name.keys() == named(expected[name]).keys()
        for path, array in of_name.items():
            assert array.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
            assert_close(f"d{name}{path}", array, named(expected[name])[path], tolerance)
    # A bias of the full shape gets the gradient of the logits as it is.
    assert_close("dlogits", got.dlogits, expected["bias"], tolerance)
    value = np.where(allowed.any(1)[..., None], inputs["value"], 0)
    dweights = np.einsum("btv,bsv->bts", DOUTPUT, value) * allowed
    assert_close("dweights", got.dweights, dweights, tolerance)
    for name in ("dweights", "dlogits"):
        assert not np.any(np.asarray(getattr(got, name))[~allowed]), name


@pytest.mark.parametrize("score_name", ALL_SCORES)
def test_every_score_with_nan_padding(score_name):
    with jax.enable_x64(True):
        check(score_name, MASK_OF_SCORE[score_name], jnp.float64, 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrower_floats_come_back_in_float32(dtype):
    """The inputs are exact in bfloat16, and nothing on the way is rounded to it."""
    check("general", "dense", dtype, 2e-5)


def test_two_keys_by_hand():
    # q = 1, keys 0 and ln 3: weights 1/4 and 3/4. dweights = (2, 6), their mean 5, so dlogits =
    # (1/4 * -3, 3/4 * 1); dq = 3/4 ln 3; dk = dlogits q; dv = weights * 2.
    key = jnp.log(jnp.array([[1.0], [3.0]]))
    got = attention_gradients(
        jnp.ones((1, 1)), key, jnp.array([[1.0], [3.0]]), jnp.array([[2.0]]), score="dot"
    )
    expected = {
        "dvalue": [[0.5], [1.5]],
        "dweights": [[2.0, 6.0]],
        "dlogits": [[-0.75, 0.75]],
        "dquery": [[0.75 * np.log(3)]],
        "dkey": [[-0.75], [0.75]],
    }
    for name, array in expected.items():
        np.testing.assert_allclose(getattr(got, name), array, rtol=1e-6, err_msg=name)
    assert got.dparams == {}
    assert got.dbias is None


# --- biases ---


def test_biases_as_functions_of_position():
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        query, key, value = (rng.normal(size=(2, n, 4)) for n in (5, 7, 7))
        doutput = rng.normal(size=(2, 5, 4))
        parts = rng.random(2), rng.normal(size=5), rng.normal(size=(1, 7))

        def bias_of(slopes, table, dense):
            # Integers, the shifts, among the leaves.
            shifts = Shifts(queries=jnp.array([1]), keys=jnp.array([0]))
            shifted = ShiftedBias(aj.relative_bias(table), shifts)
            return aj.alibi_bias(slopes) + shifted + dense

        def attend(*parts):
            return aj.attention(query, key, value, bias=bias_of(*parts), implementation="reference")

        expected = jax.jit(lambda *parts: jax.vjp(attend, *parts)[1](doutput))(*parts)
        got = attention_gradients(query, key, value, doutput, bias=bias_of(*parts)).dbias
        assert got.left.right.shifts.queries is None
        assert_close("slopes", got.left.left.slopes, expected[0], 1e-13)  # one for each example
        assert_close("table", got.left.right.bias.table.sum(0), expected[1], 1e-13)
        assert_close("dense", got.right.table.sum(0), expected[2], 1e-13)


# --- extremes ---


# --- transformations, errors ---


def test_jit_vmap_and_derivatives():
    inputs = jax.tree.map(lambda leaf: leaf.astype(np.float32), inputs_of("additive"))
    params, doutput = inputs.pop("params"), DOUTPUT.astype(np.float32)

    def gradients(arrays, doutput):
        score = SCORE_CASES["additive"].score
        return attention_gradients(**arrays, doutput=doutput, params=params, score=score)

    together = jax.device_get(gradients(inputs, doutput))
    mapped = jax.jit(jax.vmap(gradients))(inputs, doutput)
    looped = jax.device_get(
        [gradients({n: x[b] for n, x in inputs.items()}, doutput[b]) for b in range(B)]
    )
    looped = jax.tree.map(lambda *leaves: np.stack(leaves), *looped)
    for others in (mapped, looped):
        for path, array in named(others).items():
            assert_close(path, array, named(together)[path], 1e-5)
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        point = tuple(rng.normal(size=(n, 2)) for n in (2, 3, 3, 2))
        check_grads(
            jax.jit(lambda *point: attention_gradients(*point)[:5]), point, order=1, atol=1e-6,
            rtol=1e-6,
        )  # fmt: skip
