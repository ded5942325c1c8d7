"""Tiles with a gradient by hand: the tiles leave no trace, and the second derivative is right."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import TILE, OwnCosine, quick_jit
from derivative_cases import DROPOUT, DV, S, T, agree, normal, numbers_of, point_of
from oracles import assert_close, softmax, softmax_gradient
from score_cases import slow_unless

import attention_jax as aj
from attention_jax.tiles import BlockSizes, tiled


def test_vmaps_around_it_nested_and_of_some_arguments_and_axes():
    @quick_jit
    def gradients(*tokens):
        def of(implementation):
            def loss(query, key, value, length, rng):
                return numbers_of(
                    aj.attention(
                        query, key, value, mask=aj.padding_mask(length), dropout_rng=rng,
                        dropout_rate=0.2, implementation=implementation, block_sizes=TILE,
                        return_statistics=True,
                    )
                )  # fmt: skip

            def total(*tokens):
                inner = jax.vmap(jax.checkpoint(loss), (0, 0, 1, 0, None))
                outer = jax.vmap(inner, (3, None, None, None, 0))
                rngs = jax.random.split(jax.random.key(2), 4)
                return outer(*tokens, jnp.array([2, 7, 5]), rngs).sum()

            return jax.grad(total, (0, 1, 2))(*tokens)

        return of("tiled"), of("reference")

    with jax.enable_x64(True):
        agree(*gradients(normal(3, T, 3, 4), normal(3, S, 3), normal(S, 3, DV)))


@dataclasses.dataclass(frozen=True)
class Distance(OwnCosine):
    """Features that are pytrees, of several ranks; some are whole numbers, without a gradient."""

    def project_query(self, params, query):
        return self._with_number(super().project_query(params, query), query)

    def project_key(self, params, key):
        return self._with_number(super().project_key(params, key), key)

    def _with_number(self, features, tokens):
        return {"x": (features,), "at": (3 * tokens[:, 0]).astype(jnp.int32)}

    def pair(self, params, q_features, k_features):
        logits = super().pair(params, q_features["x"][0], k_features["x"][0])
        distance = q_features["at"][:, None] - k_features["at"][None, :]
        return logits - params["temperature"] * jnp.abs(distance).astype(logits.dtype)


# Tiles of (8, 16) are of whole eights: the last is mostly padding.
FAST = [(19, 17, (8, 16))]
SLOW = [(T, S, (1, 1)), (1, S, (1, 3)), (T, 1, (2, 1)), (19, 17, (9, 9)), (T, S, (2, 64))]


@pytest.mark.parametrize(("target", "source", "blocks"), slow_unless(FAST, FAST + SLOW))
def test_block_sizes_change_nothing(target, source, blocks):
    @quick_jit
    def both(point):
        def loss(point, implementation, blocks):
            return numbers_of(
                aj.attention(
                    **point, score=Distance(), mask=aj.local_mask(3, 2), block_sizes=blocks,
                    implementation=implementation, return_statistics=True, **DROPOUT,
                )
            )  # fmt: skip

        options = [("reference", None), ("tiled", BlockSizes(*blocks))]
        return [jax.value_and_grad(loss)(point, *two) for two in options]

    with jax.enable_x64(True):
        expected, got = both(point_of("own", target, source))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-13)
    agree(got[1], expected[1], 1e-12)


def test_the_transpose_in_the_values():
    """Of values that all queries share; attention is linear in them, and in nothing else."""
    query, key, value = normal(2, 3, T, 4), normal(2, 3, S, 4), normal(S, DV)
    doutputs = normal(2, 2, 3, T, DV)
    attend = functools.partial(
        aj.attention, mask=aj.causal_mask(), implementation="tiled", block_sizes=TILE
    )
    weights = softmax(query @ key.swapaxes(-1, -2) / 2, np.tri(T, S, dtype=bool))
    with jax.enable_x64(True):
        transposed = jax.linear_transpose(lambda value: attend(query, key, value), value)
        (got,) = jax.vmap(quick_jit(transposed))(doutputs)
        assert_close("transpose", got, np.einsum("bnts,zbntd->zsd", weights, doutputs), 1e-13)
        with pytest.raises(NotImplementedError, match="linear in its values alone"):
            jax.linear_transpose(lambda query: attend(query, key, value), query)(doutputs[0])


def test_float16_gradients_of_long_rows():
    """Divided by the sum of 8,192 weights, a cotangent of 1e-3 has two steps of float16 left."""
    target, source, size = 512, 8192, 16

    @quick_jit
    def gradients(*arrays_and_cotangent):
        *arrays, doutput = arrays_and_cotangent
        return jax.vjp(lambda *arrays: aj.attention(*arrays, implementation="tiled"), *arrays)[1](
            doutput
        )

    for spread in (0.0, 1.0):
        rng = np.random.default_rng(0)
        query, doutput = (rng.normal(size=(target, size)) * spread + offset for offset in (0, 1))
        key, value = rng.normal(size=(2, source, size))
        arrays = [np.float16(array) for array in (query, key, value, 1e-3 * doutput)]
        query, key, value, doutput = (np.float64(array) for array in arrays)
        weights = softmax(query @ key.T / np.sqrt(size))
        dlogits = softmax_gradient(weights, doutput @ value.T) / np.sqrt(size)
        expected = dlogits @ key, dlogits.T @ query, weights.T @ doutput
        assert_close("", gradients(*arrays), expected, 5e-3, terms=2e-28)


def test_float16_gradients_of_statistics():
    """Their cotangents count too where those of a tile are brought to the size 1."""
    rng = np.random.default_rng(0)
    query, key, value = (np.float16(rng.normal(size=(n, 4))) for n in (6, 5, 5))
    query, key = query * np.float16(2**10), key * np.float16(2**-10)

    @quick_jit
    def gradients(bias, cotangents):
        def statistics(key, bias):
            options = {"bias": bias, "implementation": "tiled", "block_sizes": BlockSizes(3, 2)}
            found = aj.attention(query, key, value, score="dot", return_statistics=True, **options)
            return found[1][:2]

        return jax.vjp(statistics, key, bias)[1](tuple(cotangents))

    weights = softmax(np.float64(query) @ np.float64(key).T)
    logs = np.log(weights)
    slopes = weights, -softmax_gradient(weights, logs)
    for size, statistic in itertools.product((1e-7, 1.0, 3e38), (0, 1)):
        cotangents = [np.zeros(6, np.float32) for _ in range(2)]
        cotangents[statistic] += np.float32(size)
        dkey, dbias = gradients(np.zeros((6, 5), np.float32), cotangents)
        dlogits = size * slopes[statistic]
        np.testing.assert_allclose(dbias, dlogits, atol=5e-3 * np.abs(dlogits).max())
        if size <= 1:  # float16 holds the gradient of the key
            right = dlogits.T @ np.float64(query)
            np.testing.assert_allclose(dkey, right, atol=1e-2 * np.abs(right).max())
    # A GPU keeps subnormal numbers, whose inverses are infinite.
    arrays = types.SimpleNamespace(queries=query, keys=key, values=value)
    assert tiled._scale_of_float16(arrays, [jnp.float32(1e-37)]) == 2.0**100


@pytest.mark.parametrize("sharpness", [1, 16])
def test_bias_gradients_of_saturated_rows_in_bfloat16(sharpness):
    """Their largest error is at most that of jax.nn."""
    random = np.random.default_rng(0)
    tokens = [jnp.asarray(random.standard_normal((256, 64)), jnp.bfloat16) for _ in range(4)]
    tokens[0] *= sharpness
    query, key, value, doutput = (np.asarray(x, np.float64) for x in tokens)
    logits = query @ key.T / 8
    expected = softmax_gradient(softmax(logits), doutput @ value.T)

    def largest_error(attend):
        bias = jnp.zeros((1, 1, 256, 256))
        (got,) = jax.vjp(attend, bias)[1](tokens[3][None, :, None])
        return np.abs(np.asarray(got[0, 0], np.float64) - expected).max()

    heads = [x[None, :, None] for x in tokens[:3]]
    with jax.numpy_dtype_promotion("standard"):
        of_jax = largest_error(lambda bias: jax.nn.dot_product_attention(*heads, bias=bias))
    options = {"block_sizes": aj.BlockSizes(64, 64), "implementation": "tiled"}

    def tiled(bias):
        return aj.attention(*tokens[:3], bias=bias[0, 0], **options)[None, :, None]

    assert largest_error(tiled) <= of_jax
