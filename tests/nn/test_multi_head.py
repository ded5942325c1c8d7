"""Multi-head attention against float64 NumPy, head by head; test_nn_dtypes.py has Flax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import multi_head, run_jit, scrambled
from oracles import normal
from score_cases import slow_unless

from attention_jax import SCORES, alibi_bias, alibi_slopes, causal_mask, padding_mask, relative_bias
from attention_jax.nn import MultiHeadAttention

B, T, S, DX, DY, DO = 2, 5, 7, 11, 13, 17
N, K, D = 6, 2, 3  # heads, of keys, size of each
LENGTHS = [4, 7]
SIZES = {"key_dim": DY, "qkv_dim": N * D, "output_dim": DO, "num_heads": N, "num_key_heads": K}


def make(score="general", **options):
    """A module of unequal sizes, and its parameters in float64."""
    options = {**SIZES, **options}
    return scrambled(lambda: MultiHeadAttention(score, DX, **options, rngs=nnx.Rngs(0)))


def tokens():
    return normal(B, T, DX), normal(B, S, DY, seed=3)


def examples(*arrays):
    return zip(*(np.asarray(array, np.float64) for array in arrays), strict=True)


# Attention itself meets every score in conformance.py.
@pytest.mark.parametrize("score", slow_unless(["general"], SCORES))
def test_every_score_with_lengths_and_what_stands_beyond(score):
    """Values may be other tokens than keys."""
    module, params = make(score, num_key_heads=K if len(score) % 2 else N)
    (x, y), value = tokens(), normal(B, S, DY, seed=4)
    for row, length in enumerate(LENGTHS):
        y[row, length:] = value[row, length:] = np.nan

    @jax.jit
    def call(x, y, value, lengths):
        options = {"mask": padding_mask(lengths), "return_weights": True}
        return module(x, y, value, **options), module(x, module.remember(y, value), **options)

    (output, weights), remembered = call(x, y, value, jnp.array(LENGTHS))
    assert weights.shape == (B, N, T, S)
    for row, (x_row, y_row, values) in enumerate(examples(x, y, value)):
        allowed = np.arange(S) < LENGTHS[row]
        expected, expected_weights = multi_head(score, params, x_row, y_row, allowed, values=values)
        np.testing.assert_allclose(output[row], expected, atol=2e-5)
        np.testing.assert_allclose(weights[row], expected_weights, atol=1e-5)
        np.testing.assert_allclose(remembered[0][row], expected, atol=2e-5)
        np.testing.assert_allclose(remembered[1][row], expected_weights, atol=1e-5)


TABLE = np.random.default_rng(7).random((B, T, S)) < 0.6
TABLE[0, 2] = False  # a query that may attend to nothing
HEAD_TABLE = np.random.default_rng(8).random((B, N, T, S)) < 0.6
HEAD_LENGTHS = np.array([[1, 2, 3, 4, 5, 6], [7, 6, 7, 6, 7, 0]])
DISTANCES = np.arange(S)[None, :] - np.arange(T)[:, None]
CAUSAL = DISTANCES <= 2
BIASES = normal(B, N, T, S, seed=9)
RELATIVE = normal(N, 5, seed=10)
RELATIVE_TABLE = RELATIVE[:, np.clip(DISTANCES, -2, 2) + 2]
ALIBI = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]  # of six heads, as published
SHORT = np.arange(S) < np.array(LENGTHS)[:, None, None, None]  # [B, 1, 1, S]
SHORT_HEADS = np.arange(S) < HEAD_LENGTHS[:, :, None, None]
# What is given as mask and bias, and what both are for each pair: broadcastable to [B, N, T, S].
PAIR_CASES = (
    (lambda: TABLE, TABLE[:, None], lambda: BIASES, BIASES),
    (
        lambda: padding_mask(jnp.array(LENGTHS)) & causal_mask(2),
        SHORT & CAUSAL,
        lambda: alibi_bias(alibi_slopes(N)),
        -np.array(ALIBI)[:, None, None] * np.abs(DISTANCES),
    ),
    (
        lambda: padding_mask(jnp.array(HEAD_LENGTHS)) & HEAD_TABLE, SHORT_HEADS & HEAD_TABLE,
        lambda: relative_bias(jnp.array(RELATIVE)), RELATIVE_TABLE,
    ),
    (lambda: CAUSAL, CAUSAL, lambda: BIASES[0, 0], BIASES[0, 0]),
)  # fmt: skip


def test_masks_and_biases():
    module, params = make("dot", use_bias=True)
    x, y = tokens()
    found = run_jit(
        lambda x, y: [
            module(x, y, mask=mask(), bias=bias(), return_weights=True)
            for mask, _, bias, _ in PAIR_CASES
        ],
        x,
        y,
    )
    for (output, weights), (_, allowed, _, added) in zip(found, PAIR_CASES, strict=True):
        allowed, added = (np.broadcast_to(table, (B, N, T, S)) for table in (allowed, added))
        for row, (x_row, y_row) in enumerate(examples(x, y)):
            expected = multi_head("dot", params, x_row, y_row, allowed[row], added[row])
            np.testing.assert_allclose(output[row], expected[0], atol=2e-5)
            np.testing.assert_allclose(weights[row], expected[1], atol=1e-5)
    output, weights = found[0]  # nothing to attend to: nothing but the last vector is left
    np.testing.assert_array_equal(output[0, 2], module.output.bias[...])
    np.testing.assert_array_equal(weights[0, :, 2], 0)


def test_rotary_keys_have_position_ids_of_their_own():
    """Those of the queries in self attention, else 0, 1, 2, ... or the ids of their `remember`."""
    positions = {"rotary_wavelength": 50.0, "qkv_dim": 4 * N}
    cross, alone = make("dot", **positions), make("dot", **positions, key_dim=DX)
    ids, key_ids = np.array([[2, 3, 5, 8, 13], [0, 1, 4, 9, 16]]), np.arange(S) ** 2

    @jax.jit
    def calls(x, y):
        memory = cross[0].remember(y, position_ids=key_ids)
        others = [cross[0](x, keys, position_ids=ids) for keys in (y, memory)]
        return [*others, alone[0](x, position_ids=ids)]

    x, y = tokens()
    found = calls(x, y)
    for row, (x_row, y_row) in enumerate(examples(x, y)):
        keys = (
            (cross[1], y_row, np.arange(S)),
            (cross[1], y_row, key_ids),
            (alone[1], x_row, ids[row]),
        )
        for output, (params, key, at) in zip(found, keys, strict=True):
            places = {"wavelength": 50.0, "at": ([ids[row]], [at])}
            expected, _ = multi_head("dot", params, x_row, key, **places)
            np.testing.assert_allclose(output[row], expected, atol=2e-5)


def exclusive(output, value):
    along = (output * value).sum(-1, keepdims=True) / (value * value).sum(-1, keepdims=True)
    return output - along * value


def test_output_mod_has_the_output_and_the_own_value_of_each_token():
    """Before the gate. A query without keys keeps its 0, whatever its token is."""
    module, params = make("dot", key_dim=DX, output_gate=True, output_mod=exclusive)
    x, allowed = normal(B, T, DX), TABLE[:, :, :T].copy()
    x[0, 2], allowed[0, :, 2] = np.nan, False
    output = jax.jit(module)(x, mask=allowed)
    np.testing.assert_array_equal(output[0, 2], 0)
    for row, (tokens_of_row,) in enumerate(examples(x)):
        seen = np.nan_to_num(tokens_of_row, nan=1.0)
        expected, _ = multi_head("dot", params, seen, seen, allowed[row], mod=exclusive)
        np.testing.assert_allclose(output[row], expected, atol=2e-5)


# --- parameters ---


def test_every_head_has_parameters_of_its_own():
    def initial():
        module = MultiHeadAttention("general", DX, **SIZES, rngs=nnx.Rngs(0))
        return module.params_of_score["kernel"][...]

    kernels = run_jit(initial)
    assert kernels.shape == (N, D, D)
    assert len({kernel.tobytes() for kernel in kernels}) == N
