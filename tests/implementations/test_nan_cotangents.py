"""NaN and inf cotangents of a query without keys reach nothing, in any function or module.

A user divides by a norm that is 0 there, or takes a logarithm, and leaves the row out of the loss
afterwards. The other side of each comparison is the same loss written safely: its cotangent is 0 at
these rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx

import attention_jax as aj
from attention_jax import nn

T, S, D = 5, 7, 4
RNG = np.random.default_rng(4)
TILE = aj.BlockSizes(2, 3)
EMPTY = np.array([3, 4])  # rows without keys; after them, monotonic walks have ended
TABLE = np.tril(np.ones((T, S), bool))
TABLE[EMPTY] = False
MASK = jnp.asarray(TABLE)


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = drawn(2, T, D), drawn(2, S, D), drawn(2, S, D)


def of_attention(implementation, score, **options):
    params = aj.get_score(score).init(jax.random.key(0), D, D)

    def run(params, query, key, value, bias):
        return aj.attention(
            query, key, value, score=score, params=params, mask=MASK, bias=bias,
            implementation=implementation, block_sizes=TILE, **options,
        )  # fmt: skip

    return run, (params, QUERY, KEY, VALUE, drawn(T, S))


def of_ring():
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    params = aj.get_score("general").init(jax.random.key(0), D, D)
    table = jnp.pad(MASK, ((0, 1), (0, 1)))

    def run(params, query, key, value):
        query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0))) for x in (query, key, value))
        return aj.ring_attention(
            query, key, value, mesh=mesh, score="general", params=params, mask=table,
            block_sizes=TILE,
        )[:, :T]  # fmt: skip

    return run, (params, QUERY, KEY, VALUE)


def of_local():
    def run(query, key, value, centers, sigma):
        return aj.local_attention(
            query, key, value, centers=centers, radius=2, sigma=sigma, mask=MASK,
            implementation="tiled", block_sizes=TILE,
        )  # fmt: skip

    return run, (QUERY, KEY, VALUE, jnp.arange(T, dtype=jnp.float32) + 0.25, jnp.float32(1.5))


def of_masked_softmax():
    return (lambda logits: aj.masked_softmax(logits, MASK)), (drawn(2, T, S),)


def of_coverage():
    def run(query, key, value, kernel):
        found = aj.coverage_attention(query, key, value, coverage_kernel=kernel, mask=MASK)
        return found.output, found.weights, found.loss

    return run, (QUERY, KEY, VALUE, drawn(D))


def of_monotonic():
    def run(query, key, value, offset):
        return aj.monotonic_attention(query, key, value, offset=offset, mask=MASK)

    return run, (QUERY, KEY, VALUE, jnp.float32(0.5))


def of_module(module, *more, **options):
    definition, state = nnx.split(module)

    def run(state, *tokens):
        return nnx.merge(definition, state)(*tokens, *more, mask=MASK, **options)

    return run, (state, QUERY, KEY)


def of_cross_attention():
    config = nn.ModelConfig(score="additive", dim=D, num_heads=2)
    module = nn.CrossAttention(config, rngs=nnx.Rngs(0))
    run, arguments = of_module(module)
    return (lambda *a: run(*a)[0]), arguments


def rngs():
    return nnx.Rngs(0)


CASES = {
    "attention reference": lambda: of_attention("reference", "additive"),
    "attention tiled": lambda: of_attention("tiled", "additive"),
    "attention with statistics": lambda: of_attention("tiled", "scaled", return_statistics=True),
    "attention with entmax": lambda: of_attention("tiled", "scaled", normalizer="entmax"),
    "attention with sigmoid": lambda: of_attention("reference", "scaled", normalizer="sigmoid"),
    "masked_softmax": of_masked_softmax,
    "ring_attention": of_ring,
    "local_attention": of_local,
    "coverage_attention": of_coverage,
    "monotonic_attention": of_monotonic,
    "nn.Attention": lambda: of_module(
        nn.Attention("general", D, D, implementation="tiled", rngs=rngs())
    ),
    "nn.LocalPAttention": lambda: of_module(
        nn.LocalPAttention("general", D, D, radius=2, rngs=rngs())
    ),
    "nn.CoverageAttention": lambda: of_module(nn.CoverageAttention("additive", D, D, rngs=rngs())),
    "nn.MonotonicAttention": lambda: of_module(
        nn.MonotonicAttention("additive", D, D, rngs=rngs())
    ),
    "nn.MultiHeadAttention": lambda: of_module(
        nn.MultiHeadAttention("general", D, num_heads=2, use_bias=True, rngs=rngs())
    ),
    "nn.CrossAttention": of_cross_attention,
}


SLOW = ("local_attention", "ring_attention")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES],
)
def test_cotangents_of_a_row_without_keys_reach_nothing(name):
    run, arguments = CASES[name]()

    @quick_jit
    def both(arguments, cotangent):
        result, pull_back = jax.vjp(run, *arguments)
        cotangent = jax.tree.unflatten(jax.tree.structure(result), cotangent)
        return result, pull_back(cotangent)

    def cotangent(poison):
        rng = np.random.default_rng(5)
        arrays = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
        for array in arrays:
            array[:, EMPTY] = poison
        return arrays

    leaves = jax.tree.leaves(jax.eval_shape(run, *arguments))
    result, expected = both(arguments, cotangent(0))
    got = [both(arguments, cotangent(poison))[1] for poison in (np.nan, np.inf)]
    np.testing.assert_array_equal(jax.tree.leaves(result)[0][:, EMPTY], 0)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected))
    for gradients in got:
        for one, other in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_finite_cotangents_pass_a_projection_of_empty_rows():
    """With biases the output of an empty row is not 0, and its gradient belongs to the bias."""
    module = nn.MultiHeadAttention("scaled", D, num_heads=2, use_bias=True, rngs=nnx.Rngs(0))
    run, arguments = of_module(module)
    cotangent = jnp.zeros((2, T, D)).at[:, EMPTY].set(3.0)
    gradient = jax.jit(lambda *a: jax.vjp(run, *a)[1](cotangent)[0])(*arguments)
    np.testing.assert_array_equal(gradient["output"]["bias"][...], 12.0)
    np.testing.assert_array_equal(gradient["output"]["kernel"][...], 0.0)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_a_row_without_keys_has_no_tangent_whatever_other_rows_see(implementation):
    value = jnp.asarray(VALUE[0]).at[1].set(jnp.nan)  # which other queries see

    def attend(query, value):
        return aj.attention(
            query, KEY[0], value, mask=MASK, implementation=implementation, return_statistics=True
        )

    tangents = (jnp.ones_like(QUERY[0]), jnp.ones_like(value))
    _, (output, statistics) = jax.jvp(attend, (jnp.asarray(QUERY[0]), value), tangents)
    for tangent in (output, statistics.logsumexp, statistics.entropy):
        assert not np.any(tangent[EMPTY])
