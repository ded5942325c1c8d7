"""Rows of softmax: statistics, sinks and extreme logits in tiles of any size; `masked_softmax`.

In attention, the logits are a bias, so that they are exactly these numbers.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import S, T, allowed_table
from derivative_cases import check_derivatives
from oracles import normal, softmax, softmax_gradient
from quick_compilation import quick_jit

import attention_jax as aj

ROWS, KEYS, DV = 5, 11, 3
RNG = np.random.default_rng(6)
LOGITS, VALUES = RNG.normal(size=(ROWS, KEYS)) * 5, RNG.normal(size=(KEYS, DV))
LOWEST = np.finfo(np.float32).min  # what many take for minus infinity

every_implementation = pytest.mark.parametrize(
    ("implementation", "block"), [("reference", KEYS), ("tiled", 4)]
)


def attend(logits, sink, implementation, block, values=VALUES):
    """(output, statistics) of rows with these logits."""
    rows, keys = logits.shape
    return aj.attention(
        jnp.zeros((rows, 1), logits.dtype),
        jnp.zeros((keys, 1), logits.dtype),
        jnp.asarray(values, logits.dtype),
        score="dot",
        bias=logits,
        normalizer=aj.Softmax(sink=sink is not None),
        normalizer_params={} if sink is None else {"sink": jnp.asarray(sink, logits.dtype)},
        implementation=implementation,
        block_sizes=aj.BlockSizes(3, block),
        return_statistics=True,
    )


def in_numpy(logits, sink=None):
    """The same in longdouble, row by row, over what is finite; a row without keys has no sink."""
    output, statistics = np.zeros((len(logits), DV)), []
    for i, row in enumerate(np.asarray(logits, np.longdouble)):
        if np.isneginf(row).all():
            statistics.append([-np.inf, 0, -np.inf])
            continue
        row = row if sink is None else np.append(row, np.longdouble(sink))
        weights = np.exp(row - row.max())
        logsumexp = np.log(weights.sum()) + row.max()
        weights = weights / weights.sum()
        entropy = -sum(w * np.log(w) for w in weights if w > 0)
        output[i] = weights[:KEYS] @ VALUES
        statistics.append([logsumexp, entropy, row.max()])
    return output, np.array(statistics, np.float64).T


def extreme_rows():
    """No key; none in the first tile, or only there; overflow; and logits of 1e4."""
    logits = LOGITS.copy()
    logits[0] = -np.inf
    logits[1, :4] = -np.inf
    logits[2, 4:] = -np.inf
    logits[3, :4] = LOWEST
    logits[3, 4] = -LOWEST / 2
    logits[4, [0, 7]] = 1e4, 1e4 - 1
    return logits.astype(np.float32)


@every_implementation
@pytest.mark.parametrize("sink", [-0.5, 200.0, -np.inf])
def test_rows_in_tiles_of_any_size(implementation, block, sink):
    with jax.enable_x64(True):
        output, statistics = attend(jnp.asarray(LOGITS), sink, implementation, block)
    expected, expected_statistics = in_numpy(LOGITS, sink)
    np.testing.assert_allclose(output, expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(statistics, expected_statistics, rtol=1e-13, atol=1e-13)

    narrow = extreme_rows()
    output, statistics = attend(jnp.asarray(narrow), sink, implementation, block)
    expected, expected_statistics = in_numpy(narrow, sink)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    np.testing.assert_allclose(statistics, expected_statistics, rtol=1e-6, atol=2e-6)


@every_implementation
def test_a_nan_is_not_hidden(implementation, block):
    logits = jnp.asarray(LOGITS, jnp.float32).at[1, 6].set(jnp.nan)
    output, statistics = attend(logits, 0.5, implementation, block)
    for array in (output[:, 0], *statistics):
        np.testing.assert_array_equal(np.isnan(array), np.arange(ROWS) == 1)


def test_derivatives_of_extreme_rows_are_finite():
    """Also where a cotangent of a row without keys is NaN."""
    logits, values = jnp.asarray(extreme_rows()).at[3].set(0), jnp.asarray(VALUES, jnp.float32)
    rows = {"output": (ROWS, DV), "logsumexp": ROWS, "entropy": ROWS, "max_logit": ROWS}
    cotangents = [jnp.ones(shape, jnp.float32).at[0].set(jnp.nan) for shape in rows.values()]

    def attended(logits, sink, values):
        output, statistics = attend(logits, sink, "tiled", 4, values)
        return [output, *statistics]

    @quick_jit
    def pulled_back(cotangents, *arrays):
        return jax.vjp(attended, *arrays)[1](cotangents)

    gradients = pulled_back(cotangents, logits, jnp.float32(0), values)
    chex.assert_tree_all_finite(gradients)
    assert not gradients[0][0].any()
    assert gradients[0][1:, 4:].any()


# --- masked_softmax: -inf as a mask, masked tangents, derivatives of both orders ---

TABLE = allowed_table("dense")[0]  # its row 2 is all False


logits_of = functools.partial(normal, T, S, dtype=float)


def test_minus_infinity_is_a_mask_and_so_is_a_row_of_it():
    logits = jnp.asarray(np.where(TABLE, logits_of(), -np.inf), jnp.float32)

    def total(logits):
        return (aj.masked_softmax(logits) ** 2).sum()

    weights, gradient = jax.jit(lambda x: (aj.masked_softmax(x), jax.grad(total)(x)))(logits)
    np.testing.assert_allclose(weights, softmax(logits_of(), TABLE), atol=3e-7)
    assert np.isfinite(gradient).all()
    assert (gradient[~TABLE] == 0).all()
    assert np.abs(gradient[TABLE]).max() > 0.1


def test_masked_tangents_are_never_read():
    clean = jnp.asarray(logits_of(), jnp.float32)
    dirty = jnp.where(TABLE, clean, jnp.nan)
    tangent = jnp.asarray(logits_of(seed=4), jnp.float32)
    push = jax.jit(lambda x, t: jax.jvp(lambda x: aj.masked_softmax(x, TABLE), (x,), (t,))[1])
    expected = push(clean, jnp.where(TABLE, tangent, 0))
    got = push(dirty, jnp.where(TABLE, tangent, jnp.nan))
    np.testing.assert_array_equal(got, expected)
    by_formula = softmax_gradient(softmax(logits_of(), TABLE), logits_of(seed=4))
    np.testing.assert_allclose(got, by_formula, atol=1e-6)


def test_gradients_of_two_orders_in_both_modes():
    with jax.enable_x64(True):
        check_derivatives(lambda logits: aj.masked_softmax(logits, TABLE, axis=0), logits_of())
