"""Ring attention: the result of `attention`, with equal work and memory on each device."""

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_checks
from conformance import quick_jit
from derivative_cases import normal

import attention_jax as aj
from attention_jax import ring_attention
from attention_jax.implementations.chunks import ChunkedBias, ChunkedMask, Chunks
from attention_jax.pairwise.biases import as_bias
from attention_jax.pairwise.masks import as_mask

# --- on eight devices ---


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(ring_checks, request)


@pytest.mark.parametrize(
    "name",
    [
        *ring_checks.CHECKS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ring_checks.SLOW),
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]


# --- on one ---


def mesh():
    return jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])


def test_mistakes_fail_before_anything_compiles():
    query, key = jnp.ones((2, 6, 3)), jnp.ones((2, 8, 3))

    def run(query=query, key=key, **options):
        return ring_attention(query, key, key, **{"mesh": mesh(), **options})

    for options, message in (
        (
            {"query": query[:, :5]},
            r"query must .* multiple of 2, .*'context'; got \[2, 5, 3\]: pad",
        ),
        ({"key": key[:, :7]}, r"key must .* multiple of 2, .*; got \[2, 7, 3\]"),
        ({"key": key[:, :0]}, r"key must .* multiple of 2, .*; got \[2, 0, 3\]"),
        ({"axis_name": "data"}, "axis_name must be .*, one of context; got 'data'"),
        ({"mesh": jax.devices()}, "mesh must be a jax.sharding.Mesh; got"),
        ({"key": key[..., :2]}, r"key must be \[..., S, 3\] to match score"),
        ({"block_sizes": 4}, "block_sizes must be a BlockSizes or None; got 4"),
        ({"dropout_rate": 0.5}, "dropout_rng must be a PRNG key when dropout_rate is 0.5"),
        ({"dropout_rate": 1.5}, r"dropout_rate must be .*\[0, 1\)"),
        ({"mask": jnp.ones((3, 8), bool)}, "mask must broadcast"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**options)


def test_integer_features_have_no_gradient():
    class Rounded(aj.Dot):
        pair_vjp = aj.Score.pair_vjp
        round_query = aj.Score.round_query
        round_key = aj.Score.round_key
        finite_slopes = aj.Score.finite_slopes

        def project_query(self, params, query):
            return jnp.round(query).astype(jnp.int32)

        project_key = project_query

        def pair(self, params, q_features, k_features):
            return super().pair(params, *(x.astype(float) for x in (q_features, k_features)))

    tokens = np.float32(normal(4, 3))

    def run(tokens):
        return ring_attention(tokens, tokens, tokens, score=Rounded(), mesh=mesh())

    def whole(tokens):
        return aj.attention(tokens, tokens, tokens, score=Rounded(), implementation="reference")

    def result_and_gradient(attend):
        def loss(tokens):
            output = attend(tokens)
            return jnp.sum(output**2), output

        return jax.grad(loss, has_aux=True)

    (got_gradient, got), (gradient, expected) = quick_jit(
        lambda tokens: [result_and_gradient(attend)(tokens) for attend in (run, whole)]
    )(tokens)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5)


# --- chunks ---


def test_masks_and_biases_of_chunks_are_those_of_their_positions():
    target, source, (t, s) = 23, 29, (2, 3)
    queries = Chunks(jnp.array([3, 15]), 5, t)  # three tiles each, the last with one of padding
    keys = Chunks(jnp.array([0, 20, 8]), 7, s)
    where_queries = [3, 4, 5, 6, 7, None, 15, 16, 17, 18, 19, None]
    where_keys = [n + first if n < 7 else None for first in (0, 20, 8) for n in range(9)]
    assert (queries.num_tiles, keys.num_tiles) == (6, 9)

    table = np.random.default_rng(2).random((target, source)) < 0.7
    bias = normal(target, source)
    masks = {
        "none": (None, lambda i, j: True),
        "causal": (aj.causal_mask(1), lambda i, j: j <= i + 1),
        "local": (aj.local_mask(1, 4), lambda i, j: i - 1 <= j <= i + 4),
        "dense": (as_mask(table), lambda i, j: bool(table[i, j])),
    }

    def tables_and_statuses(mask):
        """Returns the table, and for each tile whether it is known to be empty and to be full."""
        chunked = ChunkedMask(mask, queries, keys)

        def status_of(i, j):
            return chunked.tile_status(i + jnp.arange(t), j + jnp.arange(s))

        by_row = jax.vmap(jax.vmap(status_of, (None, 0)), (0, None))
        statuses = by_row(jnp.arange(0, 12, t), jnp.arange(0, 27, s))
        statuses = [jnp.broadcast_to(status, (6, 9)) for status in statuses]
        return chunked.allowed(jnp.arange(12), jnp.arange(27)), *statuses

    @quick_jit
    def everything():
        values = ChunkedBias(as_bias(bias), queries, keys).values(jnp.arange(12), jnp.arange(27))
        return {name: tables_and_statuses(mask) for name, (mask, _) in masks.items()}, values

    of_masks, values = jax.device_get(everything())
    for name, (_, rule) in masks.items():
        allowed, empty, full = of_masks[name]
        expected = np.array(
            [[None not in (i, j) and rule(i, j) for j in where_keys] for i in where_queries]
        )
        np.testing.assert_array_equal(allowed, expected, err_msg=name)
        for i, j in np.ndindex(6, 9):
            tile = expected[i * t : (i + 1) * t, j * s : (j + 1) * s]
            assert not (empty[i, j] and tile.any()), name
            assert not (full[i, j] and not tile.all()), name
        assert empty.any() or full.any(), name

    for i, of_query in zip(where_queries, values, strict=True):
        for j, value in zip(where_keys, of_query, strict=True):
            assert None in (i, j) or value == np.float32(bias[i, j])


def test_adding_and_removing_the_padding_of_chunks():
    chunks = Chunks(jnp.array([0, 9]), 3, 2)
    tokens = np.arange(1, 7)[:, None] * np.ones((1, 5))
    padded = chunks.add_padding(jnp.asarray(tokens))
    np.testing.assert_array_equal(padded[:, 0], [1, 2, 3, 0, 4, 5, 6, 0])
    np.testing.assert_array_equal(chunks.is_token(jnp.arange(8)), padded[:, 0] > 0)
    np.testing.assert_array_equal(chunks.remove_padding(padded.reshape(4, 2, 5)), tokens)
    assert chunks.add_padding(jnp.ones((6, 0))).shape == (8, 0)
