"""No [T, S] in memory: what the compiled programs reserve, at one length and at four times it."""

import jax
import jax.numpy as jnp
import pytest
from conformance import SCORE_CASES, quick_jit

import attention_jax as aj
from attention_jax.functional.centers import predicted_centers
from attention_jax.functional.local import local_attention
from attention_jax.implementations import BlockSizes

LENGTH, DIM, HIDDEN = 1024, 4, 4
BLOCKS = BlockSizes(64, 64)
SCORES = {
    "scaled": aj.ScaledDot(),
    "additive": aj.Additive(hidden_dim=HIDDEN),
    "own": SCORE_CASES["own"].score,
}


def growth(score, implementation, derivative):
    """Of attention with a mask, dropout and statistics; see `growth_of`."""

    def loss(arrays, params, key_length):
        output, statistics = aj.attention(
            *arrays, params=params, score=score, return_statistics=True, block_sizes=BLOCKS,
            mask=aj.causal_mask() & aj.padding_mask(key_length), dropout_rate=0.1,
            dropout_rng=jax.random.key(0), implementation=implementation,
        )  # fmt: skip
        return (output**2).sum() + statistics.entropy.sum()

    return growth_of(loss, score, derivative)


def growth_of(loss, score, derivative):
    """How many times the bytes of temporaries grow from LENGTH to 4 LENGTH, and the former."""

    def reserved(length):
        arrays = tuple(jax.ShapeDtypeStruct((length, DIM), jnp.float32) for _ in range(3))
        params = jax.eval_shape(lambda: score.init(jax.random.key(0), DIM, DIM))
        key_length = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = quick_jit(derivative(loss)).lower(arrays, params, key_length).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    once = reserved(LENGTH)
    return reserved(4 * LENGTH) / once, once


def gradient(loss):
    return jax.grad(loss, (0, 1))


def pushed(function):
    def jvp(arrays, params, key_length):
        return jax.jvp(lambda *point: function(*point, key_length), (arrays, params),
                       (arrays, params))[1]  # fmt: skip

    return jvp


def test_the_reference_is_quadratic():
    """What the others are not, and that this would be seen."""
    times, once = growth(SCORES["scaled"], "reference", gradient)
    assert times > 12
    assert once > 4 * LENGTH**2


@pytest.mark.parametrize(
    ("implementation", "score", "derivative"),
    [
        ("tiled", "scaled", gradient),
        pytest.param("tiled", "additive", gradient, marks=pytest.mark.slow),
        ("tiled", "own", pushed),
        pytest.param(
            "tiled", "scaled", lambda loss: pushed(gradient(loss)), marks=pytest.mark.slow
        ),
    ],
)
def test_memory_is_linear_in_the_length(implementation, score, derivative):
    times, once = growth(SCORES[score], implementation, derivative)
    assert times < 4.5
    assert once < 4 * LENGTH**2  # one table of float32


def with_a_bias(arrays, params, key_length):
    """Both functions of position, and their arrays among those that get a gradient."""
    slope, table = arrays[0][0, 0], arrays[0][:5, 0]
    bias = aj.alibi_bias(slope) + aj.relative_bias(table)
    output = aj.attention(
        *arrays, params=params, bias=bias, mask=aj.padding_mask(key_length),
        implementation="tiled", block_sizes=BLOCKS,
    )  # fmt: skip
    return (output**2).sum()


def through_windows(arrays, params, key_length):
    """With a Gaussian around predicted centers, whose parameters get a gradient, too."""
    query = arrays[0]
    predict = {"kernel": query[:DIM], "v": query[0]}
    output = local_attention(
        *arrays, params=params, centers=predicted_centers(query, predict, key_length), radius=64,
        sigma=32.0, mask=aj.padding_mask(key_length), implementation="tiled", block_sizes=BLOCKS,
    )  # fmt: skip
    return (output**2).sum()


def with_entmax(arrays, params, key_length):
    """With a search for the threshold of each row."""
    output = aj.attention(
        *arrays, params=params, normalizer="entmax", mask=aj.padding_mask(key_length),
        implementation="tiled", block_sizes=BLOCKS,
    )  # fmt: skip
    return (output**2).sum()


@pytest.mark.parametrize("loss", [with_a_bias, through_windows, with_entmax])
def test_biases_windows_and_thresholds_are_linear_too(loss):
    times, once = growth_of(loss, SCORES["scaled"], gradient)
    assert times < 4.5
    assert once < 4 * LENGTH**2
