"""No [T, S] in memory: what the compiled programs reserve."""

import jax
import jax.numpy as jnp
import pytest
from conformance import SCORE_CASES, quick_jit

import attention_jax as aj
from attention_jax.functional.centers import predicted_centers
from attention_jax.functional.local import local_attention
from attention_jax.positions.contract import TileStatus
from attention_jax.tiles import BlockSizes

LENGTH, DIM = 4096, 4
TABLE = 4 * LENGTH**2  # bytes of [T, S] in float32
BLOCKS = BlockSizes(64, 64)
SCORES = {name: SCORE_CASES[name].score for name in ("scaled", "own")}


def of_attention(score, implementation):
    """A loss of attention with a mask, dropout and statistics."""

    def loss(arrays, params, key_length):
        output, statistics = aj.attention(
            *arrays, params=params, score=score, return_statistics=True, block_sizes=BLOCKS,
            mask=aj.causal_mask() & aj.padding_mask(key_length), dropout_rate=0.1,
            dropout_rng=jax.random.key(0), implementation=implementation,
        )  # fmt: skip
        return (output**2).sum() + statistics.entropy.sum()

    return loss


def reserved(function, score):
    """Bytes of temporaries that the compiled function takes; nothing runs."""
    arrays = tuple(jax.ShapeDtypeStruct((LENGTH, DIM), jnp.float32) for _ in range(3))
    params = jax.eval_shape(lambda: score.init(jax.random.key(0), DIM, DIM))
    key_length = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = quick_jit(function).lower(arrays, params, key_length).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def gradient(loss):
    return jax.grad(loss, (0, 1))


def pushed(function):
    def jvp(arrays, params, key_length):
        return jax.jvp(lambda *point: function(*point, key_length), (arrays, params),
                       (arrays, params))[1]  # fmt: skip

    return jvp


@pytest.mark.parametrize(
    ("score", "derivative"),
    [
        ("scaled", gradient),
        ("own", pushed),
        ("scaled", lambda loss: pushed(gradient(loss))),
    ],
)
def test_memory_is_a_fraction_of_a_table(score, derivative):
    loss = of_attention(SCORES[score], "tiled")
    assert reserved(derivative(loss), SCORES[score]) < TABLE / 32


def with_biases_through_windows(arrays, params, key_length):
    """Functions of position whose arrays get gradients: biases, a Gaussian, predicted centers."""
    query = arrays[0]
    centers = predicted_centers(query, {"kernel": query[:DIM], "v": query[0]}, key_length)
    output = local_attention(
        *arrays, params=params, bias=aj.alibi_bias(query[0, 0]) + aj.relative_bias(query[:5, 0]),
        centers=centers, radius=64, sigma=32.0, mask=aj.padding_mask(key_length),
        implementation="tiled", block_sizes=BLOCKS,
    )  # fmt: skip
    return (output**2).sum()


@aj.mask_dataclass
class SameParity(aj.Mask):
    """Its status asks its own `allowed`: a table, if all tiles were asked at once."""

    def allowed(self, query_positions, key_positions):
        return (query_positions[:, None] - key_positions[None]) % 2 == 0

    def tile_status(self, query_positions, key_positions):
        allowed = self.allowed(query_positions, key_positions)
        return TileStatus(empty=~allowed.any(), full=allowed.all())


@aj.bias_dataclass
class Near(aj.Bias):
    slope: jax.Array = aj.array_field()

    def values(self, query_positions, key_positions):
        return self.slope * -jnp.abs(query_positions[:, None] - key_positions[None]).astype(float)


class Powers(aj.Normalizer):
    """Weights max(x, 0)^2 that sum to 1: a threshold is searched."""

    def weight(self, params, shifted):
        return jnp.maximum(shifted, 0) ** 2

    def inverse(self, params, weight):
        return jnp.sqrt(weight)


def with_parts_of_users(arrays, params, key_length):
    output = aj.attention(
        *arrays, params=params, mask=SameParity(), bias=Near(arrays[0][0, 0]),
        normalizer=Powers(), implementation="tiled", block_sizes=BLOCKS,
    )  # fmt: skip
    return (output**2).sum()


def of_packed_documents(arrays, params, key_length):
    documents = aj.packed_documents(LENGTH, lengths=jnp.full(99, key_length))
    output = aj.attention(
        *arrays, params=params, mask=documents.mask() & aj.causal_mask(),
        implementation="tiled", block_sizes=BLOCKS,
    )  # fmt: skip
    return (output**2).sum()


LOSSES = [with_biases_through_windows, with_parts_of_users, of_packed_documents]


@pytest.mark.parametrize("function", [*map(gradient, LOSSES), with_parts_of_users])
def test_masks_biases_windows_and_thresholds_take_no_table_either(function):
    assert reserved(function, SCORES["scaled"]) < TABLE / 32
