"""Attention of few tokens and few features: a compiler treats products of such sizes apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import assert_close
from score_cases import SCORE_CASES, each_score, numpy_params

import attention_jax as aj

SIZES = (1, 2, 3, 5, 7)
# B, T, S, D, Dv. The gradients of the first two ended the process: XLA could not emit a batch of
# small products. D is at least 1.
SHAPES = (
    *((2, 3, 3, 4, 4), (5, 2, 3, 3, 7), (2, 3, 20, 4, 4)),
    *((0, 2, 3, 5, 1), (2, 0, 3, 5, 1), (2, 3, 0, 5, 1), (2, 3, 5, 1, 0)),
)


@pytest.mark.parametrize("name", each_score(fast=("additive", "own", "scaled")))
def test_outputs_and_gradients_of_all_implementations_agree(name):
    """Each axis has each size, in other combinations for each score; all in one program."""
    rng = np.random.default_rng(sum(map(ord, name)))
    score = SCORE_CASES[name].score
    permuted = np.stack([rng.permutation(SIZES) for _ in range(5)], axis=1).tolist()
    shapes = [*SHAPES, *permuted]

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    examples = [
        (numpy_params(score, d, d), normal(b, t, d), normal(b, s, d), normal(b, s, dv))
        for b, t, s, d, dv in shapes
    ]

    def results(implementation):
        def attend(params, *tokens):
            return aj.attention(*tokens, score=score, params=params, implementation=implementation)

        def of_example(example):
            output, pull_back = jax.vjp(attend, *example)
            return output, pull_back(jnp.ones_like(output))

        return {
            str(shape): of_example(example) for shape, example in zip(shapes, examples, strict=True)
        }

    both = jax.jit(lambda: (results("tiled"), results("reference")))()
    assert_close("", *both, 2e-4, terms=1.0)  # yat of one key: 1e-4
