"""A model reads packed documents as it reads each of them alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from derivative_cases import agree
from flax import nnx
from mistakes import refused
from numpy_model import scrambled
from oracles import normal

from attention_jax import Documents, packed_documents
from attention_jax.nn import Model, ModelConfig

V, SIZE, LONGEST = 11, 9, 5
LENGTHS = np.array([[3, 4, 1], [5, 2, 0]])  # of targets
SOURCE_LENGTHS = np.array([[2, 1, 5], [0, 5, 3]])  # one is empty, and one has no target
DECODER = {"architecture": "decoder", "decoder_layers": 2}
CASES = {
    "rotary": {**DECODER, "positions": "rotary", "score": "general", "num_heads": 4,
               "num_key_heads": 2, "normalizer": "log_scaled(start=2)"},
    "learned": {**DECODER, "positions": "learned", "position_limit": LONGEST},
    "none": {**DECODER, "positions": "none", "score": "additive", "remat": True},
    "heads": {"num_heads": 2, "positions": "rotary", "position_anchor": "end"},
    "both ends": {"position_anchor": "both", "normalizer": "log_scaled(start=2)"},
    "coverage": {"attention": "coverage", "position_anchor": "end", "position_draw": "window"},
}  # fmt: skip


def packed(parts, lengths):
    """The documents of [B, D, LONGEST, ...] in rows [B, SIZE, ...], with padding after them."""
    rows = np.zeros((2, SIZE, *parts.shape[3:]), parts.dtype)
    for row, (documents, counts) in enumerate(zip(parts, lengths, strict=True)):
        tokens = [part[:count] for part, count in zip(documents, counts, strict=True)]
        tokens = np.concatenate(tokens)
        rows[row, : len(tokens)] = tokens
    return rows


def make(settings):
    config = ModelConfig(**{"dim": 8, "hidden_dim": 12, **settings})
    return scrambled(lambda: Model(config, V, rngs=nnx.Rngs(0)))[0]


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_documents_alone(case):
    model = make(CASES[case])
    graph, params = nnx.split(model)
    rng = np.random.default_rng(0)
    target, source = rng.integers(3, V, (2, 2, 3, LONGEST))
    cotangent = normal(2, 3, LONGEST, V) * (np.arange(LONGEST) < LENGTHS[..., None])[..., None]

    @quick_jit
    def together(params, lengths, source_lengths):
        segments = packed_documents(SIZE, lengths=lengths)
        sources = None
        if model.has_encoder:
            sources = packed(source, SOURCE_LENGTHS)
            segments = packed_documents(SIZE, lengths=source_lengths).segments, segments

        def loss(params):
            call = nnx.merge(graph, params)
            logits = call(sources, None, packed(target, LENGTHS), segments=segments)
            return jnp.vdot(logits, packed(cotangent, LENGTHS)), logits

        return jax.grad(loss, has_aux=True)(params)

    @quick_jit
    def alone(params):
        def loss(params):
            given = (None, None)
            if model.has_encoder:
                given = source.reshape(6, LONGEST), SOURCE_LENGTHS.reshape(6)
            logits = nnx.merge(graph, params)(*given, target.reshape(6, LONGEST))
            return jnp.vdot(logits, cotangent.reshape(logits.shape)), logits

        return jax.grad(loss, has_aux=True)(params)

    gradient, logits = together(params, LENGTHS, SOURCE_LENGTHS)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        expected_gradient, expected = alone(wide)
    expected = packed(np.reshape(expected, (2, 3, LONGEST, V)), LENGTHS)
    assert expected.dtype == np.float64
    real = np.arange(SIZE) < LENGTHS.sum(axis=1)[:, None]
    agree(logits[real], expected[real], 2e-6)
    assert np.all(np.isfinite(logits))
    chex.assert_trees_all_equal_shapes(gradient, expected_gradient)
    agree(*(nnx.to_pure_dict(tree) for tree in (gradient, expected_gradient)), 1e-5)


def test_segments_that_a_model_cannot_take():
    decoder, both = make(DECODER), make({})
    ids, numbers = np.full((2, 3), 5), np.array([[0, 0, 1], [4, -1, -1]])
    for message, model, source, segments, options in (
        ("segments of the target must be .* to match tokens", decoder, None, numbers[:, 1:], {}),
        ("segments of the target must be integers", decoder, None, numbers + 0.5, {}),
        ("source must be None with the segments", decoder, ids, numbers, {}),
        ("segments must be a pair", both, ids, numbers, {}),
        ("segments must be a pair", both, ids, Documents.from_segments(numbers), {}),
        ("segments of the source must be an array", both, ids, (None, numbers), {}),
        ("segments must be None with attention 'local-p'", make({"attention": "local-p"}), ids,
         (numbers, numbers), {}),
        ("segments must be None with attention 'monotonic'", make({"attention": "monotonic"}), ids,
         (numbers, numbers), {}),
        ("position_ids must be given with segments and an rng", make({"position_draw": "subset"}),
         ids, (numbers, numbers), {"rng": jax.random.key(0)}),
        ("positions in the documents of segments must be 0; got",
         make({**DECODER, "positions": "learned", "position_limit": 1}), None, numbers, {}),
    ):  # fmt: skip
        refused(message, lambda: model(source, None, ids, segments=segments, **options))  # noqa: B023
    refused("source_lengths must be None", lambda: both(ids, [3, 3], ids, segments=(numbers,) * 2))
    refused("encode needs the architecture encoder-decoder", lambda: decoder.encode(ids))


def test_a_row_with_a_document_beyond_a_learned_table_is_nan():
    model = make({**DECODER, "positions": "learned", "position_limit": 3})
    ids, numbers = np.full((2, 6), 5), np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    logits = jax.jit(lambda numbers: model(None, None, ids, segments=numbers))(numbers)
    assert np.isnan(logits).any(axis=(1, 2)).tolist() == [False, True]
