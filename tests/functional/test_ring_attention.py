"""Ring attention: the result of `attention`, with equal work and memory on each device."""

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_checks
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

    np.testing.assert_allclose(run(tokens), whole(tokens), rtol=1e-6)
    got, expected = (jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(tokens) for f in (run, whole))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


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
    for name, (mask, rule) in masks.items():
        chunked = ChunkedMask(mask, queries, keys)
        expected = np.array(
            [[None not in (i, j) and rule(i, j) for j in where_keys] for i in where_queries]
        )
        np.testing.assert_array_equal(
            chunked.allowed(jnp.arange(12), jnp.arange(27)), expected, err_msg=name
        )
        known = 0
        for i in range(0, 12, t):
            for j in range(0, 27, s):
                status = chunked.tile_status(i + jnp.arange(t), j + jnp.arange(s))
                tile = expected[i : i + t, j : j + s]
                assert not (status.empty and tile.any()), name
                assert not (status.full and not tile.all()), name
                known += int(status.empty) + int(status.full)
        assert known > 0, name

    values = ChunkedBias(as_bias(bias), queries, keys).values(jnp.arange(12), jnp.arange(27))
    for i, of_query in zip(where_queries, np.asarray(values), strict=True):
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
