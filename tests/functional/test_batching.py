"""Batch axes: what one example gives, for every example; axes of size 1 and 0; `jax.vmap`."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, DK, DQ, DV, S, T, assert_close, quick_jit
from oracles import normal, softmax, softmax_gradient
from score_cases import SCORE_CASES, each_score, numpy_params

import attention_jax as aj
from attention_jax.positions.contract import as_bias

B, N = 2, 3
QUERY, KEY, VALUE = normal(B, N, T, DQ), normal(B, N, S, DK), normal(B, N, S, DV)


def in_float64(kernel, bias):
    """Weights [B, N, T, S] and output of the general score; the arguments broadcast."""
    query, key, value, kernel = (np.float64(x) for x in (QUERY, KEY, VALUE, kernel))
    projected = query @ np.broadcast_to(kernel, (B, N, DQ, DK))
    weights = softmax(projected @ key.swapaxes(-1, -2) + bias)
    return weights, weights @ value


@pytest.mark.parametrize(("implementation", "axes"), [("tiled", (B, 1)), ("reference", (N,))])
def test_parameters_of_each_head_or_example(implementation, axes):
    kernel = normal(*axes, DQ, DK)
    options = {"score": "general", "params": {"kernel": kernel}, "implementation": implementation}
    output = aj.attention(QUERY, KEY, VALUE, **options)
    assert_close("output", output, in_float64(kernel, 0)[1], 2e-6)


BIAS_SHAPES = [
    (), (S,), (T, 1), (T, S), (N, 1, 1), (N, 1, S), (B, 1, T, 1), (B, 1, T, S), (1, N, T, S),
    (B, N, 1, S), (B, N, T, S),
]  # fmt: skip


def test_bias_of_every_shape_and_its_gradient():
    """A sum of biases of all shapes, each an argument of its own."""
    biases = [normal(*shape) / 4 for shape in BIAS_SHAPES]
    kernel = normal(DQ, DK)
    cotangent = np.float64(normal(B, N, T, DV))

    @quick_jit
    def run(biases):
        def attend(biases):
            bias = functools.reduce(operator.add, map(as_bias, biases))
            return aj.attention(
                QUERY, KEY, VALUE, score="general", params={"kernel": kernel}, bias=bias,
                implementation="tiled",
            )  # fmt: skip

        output, pull_back = jax.vjp(attend, biases)
        return output, pull_back(jnp.asarray(cotangent, jnp.float32))[0]

    output, gradients = run(biases)
    weights, expected = in_float64(kernel, sum(np.float64(bias) for bias in biases))
    assert_close("output", output, expected, 2e-6)
    # Summed over the axes that share a bias.
    dlogits = softmax_gradient(weights, np.einsum("bntv,bnsv->bnts", cotangent, np.float64(VALUE)))
    for bias, gradient in zip(biases, gradients, strict=True):
        padded = (1,) * (4 - bias.ndim) + bias.shape
        shared = tuple(axis for axis, size in enumerate(padded) if size == 1)
        dbias = dlogits.sum(shared, keepdims=True).reshape(bias.shape)
        if padded[-1] == 1:  # softmax does not see a constant of the row
            assert np.abs(gradient).max(initial=0) < 2e-5
            assert gradient.shape == bias.shape
        else:
            assert_close(f"gradient of bias {bias.shape}", gradient, dbias, 2e-5)


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
def test_gradients_without_queries_keys_or_examples(implementation):
    params = aj.Additive().init(jax.random.key(0), DK, DK)

    @quick_jit
    def gradients(params):
        def total(params, batch, target, source):
            shapes = (*batch, target, DK), (*batch, source, DK), (*batch, source, DV)
            output, statistics = aj.attention(
                *(normal(*shape) for shape in shapes), score="additive", params=params,
                mask=aj.causal_mask(), return_statistics=True, implementation=implementation,
            )  # fmt: skip
            assert output.shape == (*batch, target, DV)
            return output.sum() + statistics.entropy.sum()

        sizes = ((), 0, S), ((), T, 0), ((3, 0, 1), T, S)
        return [jax.grad(total)(params, *size) for size in sizes]

    for leaf in jax.tree.leaves(gradients(params)):
        np.testing.assert_array_equal(leaf, 0)


def test_dropout_keys_with_axes_are_shared_where_an_axis_is_one():
    rngs, values = jax.random.split(jax.random.key(0), (B, 1)), jnp.eye(S)

    @quick_jit
    def dropped(query, key, rngs):
        return aj.attention(
            query, key, values, score="general", params={"kernel": jnp.ones((DQ, DK))},
            dropout_rate=0.5, dropout_rng=rngs, implementation="tiled",
        )  # fmt: skip

    kept = np.asarray(dropped(QUERY, KEY, rngs)) != 0
    assert np.all(kept == kept[:, :1])
    assert np.any(kept[0] != kept[1])
    np.testing.assert_array_equal(np.asarray(dropped(QUERY[1], KEY[1], rngs[1])) != 0, kept[1])


# --- few tokens and few features: a compiler treats products of such sizes apart ---


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
