"""Packed documents: in a row, each is what it is alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from derivative_cases import agree
from flax import nnx
from numpy_model import scrambled
from oracles import normal

import attention_jax as aj
from attention_jax import nn

LENGTHS, SIZE = np.array([[3, 0, 4, 1], [5, 2, 0, 0]]), 9  # rows of documents, some of them empty
NUMBERS = [[0] * 3 + [2] * 4 + [3] + [-1], [0] * 5 + [1] * 2 + [-1] * 2]
PARTS = [(row, number) for row in range(2) for number in range(4) if LENGTHS[row, number]]


def parts_of(array):
    """The parts of [rows, SIZE, ...] that belong to the documents."""
    return [array[row][np.array(NUMBERS[row]) == number] for row, number in PARTS]


def test_the_number_and_the_position_of_each_token():
    sums = np.pad(np.cumsum(LENGTHS, axis=1), ((0, 0), (1, 2)), "edge")
    sums[:, 0] = 0
    of_rows = jax.jit(functools.partial(aj.packed_documents, SIZE))
    for documents in (
        of_rows(lengths=LENGTHS),
        of_rows(cu_seqlens=sums),
        jax.vmap(lambda lengths: of_rows(lengths=lengths))(LENGTHS.astype(np.int8)),
        aj.Documents.from_segments(NUMBERS),
    ):
        assert documents.segments.tolist() == NUMBERS
        positions = [[0, 1, 2, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 0, 1, 0, 0]]
        assert documents.position_ids.tolist() == positions
        ends = [[2, 1, 0, 3, 2, 1, 0, 0, 0], [4, 3, 2, 1, 0, 1, 0, 0, 0]]
        assert documents.positions_from_end.tolist() == ends
    assert (
        aj.packed_documents(3, lengths=jnp.zeros((2, 0), int)).segments.tolist() == [[-1] * 3] * 2
    )


def test_documents_with_one_number():
    """Two runs with one number are two documents; both see what has their number elsewhere."""
    documents, other = map(aj.Documents.from_segments, ([4, 4, 2**31 - 3, -1, 4], [4, -1, 0]))
    seen = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]
    assert documents.mask().materialize(5, 5).astype(int).tolist() == seen
    seen = [[1, 0, 0], [1, 0, 0], [0] * 3, [0] * 3, [1, 0, 0]]
    assert documents.mask(other).materialize(5, 3).astype(int).tolist() == seen


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("lengths", [[3, 2], [3, 9], [4, -1], [-1, 4]]),
        ("cu_seqlens", [[0, 5], [0, 6], [1, 5], [0, -1]]),
    ],
)
def test_a_traced_row_with_an_error_is_padding(name, rows):
    rows = np.array([*rows, [2**31 - 1] * 2])
    segments = jax.jit(lambda rows: aj.packed_documents(5, **{name: rows}).segments)(rows)
    np.testing.assert_array_equal((segments >= 0).all(axis=1), [True, *[False] * 4])
    np.testing.assert_array_equal(segments[1:], -1)


HEADS = 2
CASES = {
    "window": {"mask": aj.local_mask(1, 0)},
    "alibi": {"bias": aj.alibi_bias(aj.alibi_slopes(HEADS))},
    "t5": {"bias": aj.t5_bias(normal(HEADS, 6), max_distance=7), "score": "additive"},
    "rotary": {"rotary_wavelength": 50.0, "normalizer": "log_scaled(start=2)"},
}


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_documents_in_a_row_are_documents_alone(case, implementation):
    """Outputs, gradients, and a cache that is extended by packed prompts; padding is NaN."""
    options = {"score": "dot", **CASES[case]}
    call = {name: options.pop(name) for name in ("mask", "bias") if name in options}
    score, call["mask"] = options.pop("score"), call.get("mask", True) & aj.causal_mask()
    module, _ = scrambled(
        lambda: nn.MultiHeadAttention(
            score, 8, num_heads=HEADS, implementation=implementation, **options, rngs=nnx.Rngs(0)
        )
    )
    padding = np.array(NUMBERS) < 0
    x = np.where(padding[..., None], np.float32(np.nan), normal(2, SIZE, 8))
    cotangent = parts_of(normal(2, SIZE, 8, seed=1))

    @quick_jit
    def packed(x, lengths):
        documents = aj.packed_documents(SIZE, lengths=lengths)
        also = call | {"mask": call["mask"] & documents.mask()}

        def loss(x):
            output = module(x, **also, position_ids=documents.position_ids)
            pairs = zip(parts_of(output), cotangent, strict=True)
            return sum(jnp.vdot(*pair) for pair in pairs), output

        cache, cached = module.empty_cache((2,), SIZE), []
        for start, end in ((0, 5), (5, SIZE)):
            ids = documents.position_ids[:, start:end]
            output, cache = module.extend(x[:, start:end], cache, **also, position_ids=ids)
            cached.append(output)
        gradient, output = jax.grad(loss, has_aux=True)(x)
        return gradient, output, jnp.concatenate(cached, axis=1)

    @quick_jit
    def alone(parts):
        def loss(parts):
            outputs = [module(part, **call) for part in parts]
            return sum(map(jnp.vdot, outputs, cotangent)), outputs

        return jax.grad(loss, has_aux=True)(parts)

    gradients, outputs = alone(parts_of(x))
    found = packed(x, LENGTHS)
    agree(parts_of(found[0]), gradients, 1e-5)
    for output in found[1:]:
        for part, expected in zip(parts_of(output), outputs, strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(output[padding], 0)
        np.testing.assert_array_equal(found[0][padding], 0)
