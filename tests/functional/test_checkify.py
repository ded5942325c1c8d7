"""`checkify` with every check: nothing in attention makes NaN, divides by 0 or reads beyond an end.

What is checked is what runs, also where the result is thrown away afterwards.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import attention_jax as aj
from attention_jax import analysis

B, T, S, D = 2, 5, 7, 3  # in tiles of 2 and 3, both sides are padded
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    jnp.asarray(RNG.normal(size=(B, n, D)), jnp.float32) for n in (T, S, S)
)  # fmt: skip
TABLE = jnp.asarray(RNG.random((B, T, S)) < 0.3).at[:, 1].set(False)
SEGMENTS = aj.segment_mask(jnp.arange(T) // 2, jnp.arange(S) // 2)
PADDING = aj.padding_mask(jnp.array([0, 4]), jnp.array([3, 5]))
WINDOW = aj.window_mask(jnp.array([0.0, 2.0, 30.0, -9.0, 5.0]), 1)
MASK = TABLE & SEGMENTS & PADDING & (WINDOW | aj.token_mask(TABLE[:, 0])) | aj.causal_mask(-1)
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
BIAS = aj.relative_bias(jnp.ones(5)) + jnp.asarray(RNG.normal(size=(T, S)), jnp.float32)


def check(function, *arguments):
    error, _ = checkify.checkify(jax.jit(function), errors=checkify.all_checks)(*arguments)
    assert error.get() is None


def attend(implementation, **options):
    def loss(query, key, value):
        # Rows 0 have no keys; the bias is in tiles that reach beyond T and S.
        output, statistics = aj.attention(
            query, key, value, mask=MASK, implementation=implementation, return_statistics=True,
            block_sizes=aj.BlockSizes(2, 3), **options,
        )  # fmt: skip
        return jnp.sum(output**2) + jnp.sum(statistics.entropy)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_attention_and_its_gradient(implementation):
    check(attend(implementation, bias=BIAS, **DROPOUT), QUERY, KEY, VALUE)
    # What a mask hides may be NaN: nothing is computed from it.
    hidden = aj.padding_mask(jnp.array([4, 4]))

    def padded(query, key):
        return aj.attention(query, key, key, mask=hidden, implementation=implementation).sum()

    check(jax.grad(padded, argnums=(0, 1)), QUERY, KEY.at[:, 4:].set(jnp.nan))


def test_other_forms_of_attention():
    arguments = {"mask": PADDING, "score": "scaled"}

    def all_of_it(query, key, value):
        centers = jnp.array([0.0, 9.0, -9.0, 4.0, 40.0])
        return (
            aj.coverage_attention(query, key, value, coverage_kernel=jnp.ones(D), **arguments)[0],
            aj.monotonic_attention(query, key, value, **arguments)[0],
            aj.local_attention(query, key, value, centers=centers, radius=1, sigma=1.0),
            analysis.attention_summary(aj.attention_weights(query, key, **arguments)).entropy,
        )

    def loss(*tokens):
        return sum(jnp.sum(output) for output in all_of_it(*tokens))

    check(jax.grad(loss, argnums=(0, 1, 2)), QUERY, KEY, VALUE)


def test_captured():
    def loss(query):
        return jnp.sum(aj.attention(query, KEY, VALUE, mask=PADDING) ** 2)

    check(lambda query: analysis.capture_gradients(loss, query).gradients, QUERY)
    check(lambda query: analysis.capture(jax.grad(loss), query).attentions, QUERY)


def test_a_nan_of_the_user_is_reported():
    checked = checkify.checkify(attend("reference"), errors=checkify.all_checks)
    error, _ = checked(QUERY.at[1, 2].set(jnp.nan), KEY, VALUE)
    assert "nan" in error.get()
