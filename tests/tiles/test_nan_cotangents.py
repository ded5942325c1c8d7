"""What a mask hides reaches nothing: cotangents of queries without keys, tokens of no allowed pair.

A user divides by a norm that is 0 in a row without keys, or takes a logarithm, and leaves the row
out of the loss afterwards: its cotangent is NaN or infinite. The other side of each comparison is
the same loss written safely: its cotangent is 0 at these rows.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx
from oracles import normal
from score_cases import numpy_params, slow_unless

import attention_jax as aj
from attention_jax import nn

T, S, D = 5, 7, 4
TILE = aj.BlockSizes(2, 3)
EMPTY = np.array([3, 4])  # rows without keys; after them, monotonic walks have ended
TABLE = np.tril(np.ones((T, S), bool))
TABLE[EMPTY] = False
MASK = jnp.asarray(TABLE)


TOKENS = QUERY, KEY, VALUE = normal(2, T, D), normal(2, S, D), normal(2, S, D, seed=1)
UNREAD = ~TABLE.any(1), ~TABLE.any(0), ~TABLE.any(0)
ADDITIVE = numpy_params(aj.Additive(), D, D)


def attend(*tokens, params=None, bias=None, implementation="tiled", **options):
    return aj.attention(
        *tokens, params=params, bias=bias, mask=MASK, block_sizes=TILE,
        implementation=implementation, **options,
    )  # fmt: skip


def ring(*tokens):
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0))) for x in tokens)
    mask = jnp.pad(MASK, ((0, 1), (0, 1)))
    return aj.ring_attention(query, key, value, mesh=mesh, mask=mask, block_sizes=TILE)[:, :T]


def local(*tokens_centers_sigma):
    *tokens, centers, sigma = tokens_centers_sigma
    return aj.local_attention(
        *tokens, centers=centers, radius=2, sigma=sigma, mask=MASK, implementation="tiled",
        block_sizes=TILE,
    )  # fmt: skip


def additive(implementation):
    def run(query, key, value, params, bias):
        return attend(
            query, key, value, params=params, bias=bias, score="additive",
            implementation=implementation,
        )  # fmt: skip

    return run, ADDITIVE, normal(T, S)


# Name -> (a function of query, key, value and further arrays, the further arrays)
FUNCTIONS = {
    "attention in reference": additive("reference"),
    "attention in tiles": additive("tiled"),
    "statistics": (functools.partial(attend, return_statistics=True),),
    "entmax": (functools.partial(attend, normalizer="entmax"),),
    "sigmoid": (functools.partial(attend, normalizer="sigmoid", implementation="reference"),),
    "masked_softmax": (lambda *x: aj.masked_softmax(x[3], MASK), normal(2, T, S)),
    "ring": (ring,),
    "local": (local, jnp.arange(T, dtype=jnp.float32) + 0.25, jnp.float32(1.5)),
    "coverage": (
        lambda *x: aj.coverage_attention(*x[:3], coverage_kernel=x[3], mask=MASK)[:2], normal(D)
    ),
    "monotonic": (
        lambda *x: aj.monotonic_attention(*x[:3], offset=x[3], mask=MASK), jnp.float32(0.5)
    ),
}  # fmt: skip
FAST = ("attention in reference", "statistics", "entmax", "masked_softmax", "coverage", "monotonic")


def of_module():
    heads = nn.MultiHeadAttention("general", D, num_heads=2, use_bias=True, rngs=nnx.Rngs(0))
    definition, state = nnx.split(heads)

    def run(state, *tokens):
        return nnx.merge(definition, state)(*tokens, mask=MASK)

    return run, (state, QUERY, KEY)


def results_and_gradients(run):
    """A compiled function of the arguments and the cotangent of rows without keys."""

    @quick_jit
    def both(arguments, poison):
        def cotangent(leaf):
            array = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
            return array.at[:, EMPTY].set(poison)

        result, pull_back = jax.vjp(run, *arguments)
        return result, pull_back(jax.tree.map(cotangent, result))

    return both


def check_cotangents(both, arguments):
    result, expected = both(arguments, 0.0)
    np.testing.assert_array_equal(jax.tree.leaves(result)[0][:, EMPTY], 0)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected))
    for poison in (np.nan, np.inf):
        chex.assert_trees_all_close(both(arguments, poison)[1], expected, rtol=2e-5, atol=1e-6)
    return result, expected


@pytest.mark.parametrize("name", slow_unless(FAST, FUNCTIONS))
def test_nothing_that_the_mask_hides_reaches_anything(name):
    run, *more = FUNCTIONS[name]
    both = results_and_gradients(run)
    clean = check_cotangents(both, (*TOKENS, *more))
    dirty = (
        np.where(unread[:, None], np.float32(np.nan), tokens)
        for tokens, unread in zip(TOKENS, UNREAD, strict=True)
    )
    chex.assert_trees_all_equal(both((*dirty, *more), 0.0), clean)


def test_cotangents_of_rows_without_keys_reach_nothing_in_a_module():
    run, arguments = of_module()
    check_cotangents(results_and_gradients(run), arguments)


def test_finite_cotangents_pass_a_projection_of_empty_rows():
    """With biases the output of an empty row is not 0, and its gradient belongs to the bias."""
    run, arguments = of_module()
    cotangent = jnp.zeros((2, T, D)).at[:, EMPTY].set(3.0)
    gradient = jax.jit(lambda *a: jax.vjp(run, *a)[1](cotangent)[0])(*arguments)
    np.testing.assert_array_equal(gradient["output"]["bias"][...], 12.0)
    np.testing.assert_array_equal(gradient["output"]["kernel"][...], 0.0)


def test_a_row_without_keys_has_no_tangent_whatever_other_rows_see():
    value = jnp.asarray(VALUE).at[:, 1].set(jnp.nan)  # which other queries see
    tokens = jnp.asarray(QUERY), jnp.asarray(KEY), value
    run = functools.partial(attend, return_statistics=True)
    _, (output, statistics) = jax.jvp(run, tokens, jax.tree.map(jnp.ones_like, tokens))
    for tangent in (output, statistics.logsumexp, statistics.entropy):
        assert not np.any(tangent[:, EMPTY])
