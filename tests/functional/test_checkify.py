"""`checkify` with every check: nothing in attention makes NaN, divides by 0 or reads beyond an end.

What is checked is what runs, also where the result is thrown away afterwards.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, quick_jit
from jax.experimental import checkify
from score_cases import slow_unless

import attention_jax as aj

B, T, S, D = 2, 5, 7, 3  # in tiles of 2 and 3, both sides are padded
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=(B, n, D)).astype(np.float32) for n in (T, S, S))
TABLE = RNG.random((B, T, S)) < 0.3
TABLE[:, 1] = False
SEGMENTS = aj.segment_mask(np.arange(T) // 2, np.arange(S) // 2)
PADDING = aj.padding_mask(np.array([0, 4]), np.array([3, 5]))
WINDOW = aj.window_mask(np.float32([0, 2, 30, -9, 5]), 1)
MASK = TABLE & SEGMENTS & PADDING & (WINDOW | aj.token_mask(TABLE[:, 0])) | aj.causal_mask(-1)
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
BIAS = aj.relative_bias(np.ones(5, np.float32)) + RNG.normal(size=(T, S)).astype(np.float32)


def checked(function):
    return quick_jit(checkify.checkify(function, errors=checkify.all_checks))


def attend(implementation, mask=MASK, **options):
    def loss(query, key, value):
        # Rows 0 have no keys; the bias is in tiles that reach beyond T and S.
        results = aj.attention(
            query, key, value, mask=mask, implementation=implementation,
            block_sizes=aj.BlockSizes(2, 3), **options,
        )  # fmt: skip
        output, *statistics = jax.tree.leaves(results)
        return jnp.sum(output**2) + sum(jnp.sum(entropy) for entropy in statistics[1:2])

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
def test_all_options_and_their_gradient(implementation):
    attended = attend(implementation, bias=BIAS, return_statistics=True, **DROPOUT)
    error, _ = checked(attended)(QUERY, KEY, VALUE)
    assert error.get() is None


@pytest.mark.parametrize("implementation", slow_unless(["tiled"], ALL_IMPLEMENTATIONS))
def test_nan_in_padding_is_clean_and_a_nan_of_the_user_is_reported(implementation):
    key, query = KEY.copy(), QUERY.copy()
    key[:, 4:], query[1, 2] = np.nan, np.nan
    program = checked(attend(implementation, mask=TABLE & PADDING))
    assert program(QUERY, key, VALUE)[0].get() is None
    assert "nan" in program(query, key, VALUE)[0].get()
