"""Attention under JAX's own checks.

`checkify` with every check finds NaN, a division by 0 and a read beyond an end in all that runs,
also where the result is thrown away afterwards. `checking_leaks` finds functions that close over
traced values, `debug_infs` infinities that leave a compiled program, and strict promotion mixed
dtypes.
"""

import chex
import conformance as suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from normalizer_cases import NORMALIZER_CASES
from score_cases import SCORE_CASES, each_score, slow_unless

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
    return suite.quick_jit(checkify.checkify(function, errors=checkify.all_checks))


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
@pytest.mark.parametrize("implementation", suite.ALL_IMPLEMENTATIONS)
def test_all_options_and_their_gradient(implementation):
    attended = attend(implementation, bias=BIAS, return_statistics=True, **DROPOUT)
    error, _ = checked(attended)(QUERY, KEY, VALUE)
    assert error.get() is None


@pytest.mark.parametrize("implementation", slow_unless(["tiled"], suite.ALL_IMPLEMENTATIONS))
def test_nan_in_padding_is_clean_and_a_nan_of_the_user_is_reported(implementation):
    key, query = KEY.copy(), QUERY.copy()
    key[:, 4:], query[1, 2] = np.nan, np.nan
    program = checked(attend(implementation, mask=TABLE & PADDING))
    assert program(QUERY, key, VALUE)[0].get() is None
    assert "nan" in program(query, key, VALUE)[0].get()


# --- the tables of scores and normalisers ---

DENSE = "dense"  # one query without keys, one key that no query sees


def check_strictly(score_name, normalizer_name, implementation):
    inputs = suite.poisoned(
        suite.inputs_of(score_name, normalizer_name), suite.allowed_table(DENSE)
    )
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs)
    # An infinity that the mask hides would be found as if it were ours.
    arrays = jax.tree.map(lambda leaf: jnp.where(jnp.isinf(leaf), 1e30, leaf), arrays)

    def attend(arrays):
        return aj.attention(
            **arrays, mask=suite.MASK_CASES[DENSE].build(), score=SCORE_CASES[score_name].score,
            normalizer=NORMALIZER_CASES[normalizer_name].normalizer, block_sizes=suite.TILE,
            implementation=implementation,
        )  # fmt: skip

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.checking_leaks(), jax.debug_infs(True), strict[0], strict[1]:
        output, pull_back = jax.vjp(attend, arrays)
        (gradients,) = pull_back(jnp.asarray(suite.cotangents()["output"], jnp.float32))
    chex.assert_tree_all_finite((output, gradients))
    assert all(map(jnp.any, jax.tree.leaves((output, gradients))))


@pytest.mark.parametrize("implementation", suite.ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("score_name", each_score(fast=("additive", "own")))
def test_scores(score_name, implementation):
    check_strictly(score_name, "softmax", implementation)


@pytest.mark.parametrize("normalizer_name", slow_unless(("sink", "sparsemax"), NORMALIZER_CASES))
def test_normalizers(normalizer_name):
    check_strictly("dot", normalizer_name, "tiled")
