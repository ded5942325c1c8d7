"""The tables of scores and normalisers under JAX's own checks.

`checking_leaks` finds functions that close over traced values, `debug_infs` infinities that leave a
compiled program, and strict promotion mixed dtypes.
"""

import chex
import jax
import jax.numpy as jnp
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    MASK_CASES,
    TILE,
    allowed_table,
    cotangents,
    inputs_of,
    poisoned,
)
from normalizer_cases import NORMALIZER_CASES
from score_cases import SCORE_CASES, each_score, slow_unless

import attention_jax as aj

MASK = "dense"  # one query without keys, one key that no query sees


def check_strictly(score_name, normalizer_name, implementation):
    inputs = poisoned(inputs_of(score_name, normalizer_name), allowed_table(MASK))
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs)
    # An infinity that the mask hides would be found as if it were ours.
    arrays = jax.tree.map(lambda leaf: jnp.where(jnp.isinf(leaf), 1e30, leaf), arrays)

    def attend(arrays):
        return aj.attention(
            **arrays, mask=MASK_CASES[MASK].build(), score=SCORE_CASES[score_name].score,
            normalizer=NORMALIZER_CASES[normalizer_name].normalizer, block_sizes=TILE,
            implementation=implementation,
        )  # fmt: skip

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.checking_leaks(), jax.debug_infs(True), strict[0], strict[1]:
        output, pull_back = jax.vjp(attend, arrays)
        (gradients,) = pull_back(jnp.asarray(cotangents()["output"], jnp.float32))
    chex.assert_tree_all_finite((output, gradients))
    assert all(map(jnp.any, jax.tree.leaves((output, gradients))))


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("score_name", each_score(fast=("additive", "own")))
def test_scores(score_name, implementation):
    check_strictly(score_name, "softmax", implementation)


@pytest.mark.parametrize("normalizer_name", slow_unless(("sink", "sparsemax"), NORMALIZER_CASES))
def test_normalizers(normalizer_name):
    check_strictly("dot", normalizer_name, "tiled")
