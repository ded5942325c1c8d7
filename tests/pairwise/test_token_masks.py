"""Padding marked token by token, lengths, and arrays that lack some of the batch axes."""

import jax
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, quick_jit

import attention_jax as aj
from attention_jax import analysis

B, N, T, S, D = 2, 2, 5, 7, 3  # as many heads as examples: the case that used to be misread
RNG = np.random.default_rng(0)
KEYS = RNG.random((B, S)) < 0.6
QUERIES = RNG.random((B, T)) < 0.6
QUERY, KEY = (RNG.normal(size=(B, n, D)).astype(np.float32) for n in (T, S))
SPLIT = [np.stack([array] * N, axis=1) for array in (QUERY, KEY)]  # [B, N, length, D]


def softmax_of(logits, allowed):
    exponentials = np.where(allowed, np.exp(logits), 0)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def test_only_marked_tokens_attend_and_are_attended_to():
    assert KEYS.any(1).all()
    assert not KEYS.all()
    logits = np.einsum("btd,bsd->bts", QUERY, KEY) / np.sqrt(D)
    both = QUERIES[:, :, None] & KEYS[:, None, :]
    cases = (
        (aj.token_mask(KEYS), np.broadcast_to(KEYS[:, None, :], (B, T, S))),
        (aj.token_mask(KEYS, QUERIES), both),
        (aj.token_mask(KEYS[0]), np.broadcast_to(KEYS[0], (B, T, S))),
        (aj.token_mask(KEYS, QUERIES) & aj.causal_mask(1), both & np.tri(T, S, 1, dtype=bool)),
    )

    @quick_jit
    def run(masks):
        options = {"block_sizes": aj.BlockSizes(2, 3)}
        outputs = [
            [
                aj.attention(QUERY, KEY, KEY, mask=mask, implementation=implementation, **options)
                for implementation in (ALL_IMPLEMENTATIONS if number >= 2 else ["reference"])
            ]
            for number, mask in enumerate(masks)
        ]
        return outputs, masks[1].materialize(T, S)

    results, table = run([mask for mask, _ in cases])
    for (_, allowed), outputs in zip(cases, results, strict=True):
        expected = np.einsum("bts,bsd->btd", softmax_of(logits, allowed), KEY)
        for got in outputs:
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(table, both)


def test_a_tiles_status_is_all_there_is_to_tell():
    keys, queries = np.array([0, 0, 1, 1, 0], bool), np.array([1, 1, 0, 1], bool)
    status = jax.jit(lambda *positions: aj.token_mask(keys, queries).tile_status(*positions))
    for rows in (slice(0, 2), slice(1, 3), slice(2, 3)):
        for columns in (slice(0, 2), slice(1, 3), slice(2, 4)):
            table = queries[rows, None] & keys[None, columns]
            empty, full = status(np.arange(4)[rows], np.arange(5)[columns])
            assert bool(empty) == (not table.any())
            assert bool(full) == table.all()


def test_memory_is_linear_and_new_tokens_compile_nothing():
    mask = aj.token_mask(KEYS, QUERIES)
    assert [leaf.shape for leaf in jax.tree.leaves(mask)] == [(B, S), (B, T)]
    table = jax.jit(lambda mask: mask.materialize(T, S))
    table(mask)
    table(aj.token_mask(~KEYS, QUERIES))
    assert table._cache_size() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((KEYS.astype(int),), "key_tokens must be boolean, True = a real token .* got dtype int"),
        ((KEYS, np.ones(T)), "query_tokens must be boolean, .* ids != padding_id.* dtype float"),
        ((np.bool_(True),), r"key_tokens must have a position axis, \[\*B, length\]; got a scalar"),
    ],
)
def test_tokens_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        aj.token_mask(*arguments)


LENGTHS = np.array([3, 6])
FEWER_AXES = {
    "mask key_lengths": lambda: aj.padding_mask(LENGTHS),
    "mask query_lengths": lambda: aj.padding_mask(LENGTHS[:, None], LENGTHS),
    "mask key_tokens": lambda: aj.token_mask(KEYS),
    "mask query_segments": lambda: aj.segment_mask(np.zeros((B, T), int), np.zeros(S, int)),
    "mask centers": lambda: aj.window_mask(np.zeros((B, T), np.float32), 2) | aj.causal_mask(),
    "mask": lambda: np.ones((B, T, S), bool),
}


@pytest.mark.parametrize("label", FEWER_AXES)
def test_arrays_that_lack_batch_axes_are_told_which_to_write(label):
    """Aligned to the right, [B] lengths of inputs [B, N, T, D] would be one per head."""
    mask, (query, key) = FEWER_AXES[label](), SPLIT
    name = label.split()[-1]
    message = rf"{label} must have all 2 batch axes \*B = \[2, 2\].*write {name}\[:, None\] if"
    logits, weights = np.ones((B, N, T, S), np.float32), np.full((B, N, T, S), 1 / S, np.float32)
    for call in (
        lambda: aj.attention(query, key, key, mask=mask),
        lambda: aj.attention_weights(query, key, mask=mask),
        lambda: aj.coverage_attention(
            query, key, key, mask=mask, coverage_kernel=np.ones(D, np.float32), score="scaled"
        ),
        lambda: aj.monotonic_attention(query, key, key, mask=mask, score="scaled"),
        lambda: aj.local_attention(query, key, key, centers=np.zeros(T), radius=1, mask=mask),
        lambda: aj.masked_softmax(logits, mask),
        lambda: analysis.normalized_entropy(weights, mask),
        lambda: analysis.attention_gradients(query, key, key, query, mask=mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_is_written_instead_means_what_it_says():
    (query, key), rows = SPLIT, np.broadcast_to(KEYS[:, None], (B, N, S))
    attend = quick_jit(aj.attention_weights)
    for written, allowed in (
        (aj.token_mask(KEYS[:, None]), rows),  # one for each example
        (aj.token_mask(KEYS[None]), rows.swapaxes(0, 1)),  # one for each head
        (KEYS[:, None, None], rows),
        (aj.token_mask(KEYS[0]), np.broadcast_to(KEYS[0], (B, N, S))),
    ):
        weights = attend(query, key, mask=written)
        np.testing.assert_array_equal((np.asarray(weights) > 0).all(-2), allowed)


def test_hints_follow_the_sizes():
    query = np.ones((5, 3, T, D), np.float32)
    for lengths, written in ((np.ones(5, int), r"\[:, None\]$"), (np.ones(3, int), r"\[None\]$")):
        with pytest.raises(ValueError, match=rf"write key_lengths{written}"):
            aj.attention(query, query, query, mask=aj.padding_mask(lengths))
    with pytest.raises(ValueError, match=r"all 2 batch axes .* or none; got \[7\]$"):
        aj.attention(query, query, query, mask=aj.padding_mask(np.ones(7, int)))


def test_lengths_and_rows_beside_masks():
    params = {"kernel": np.eye(D), "v": np.zeros(D)}
    with pytest.raises(ValueError, match=r"source_lengths must have all 2 batch axes"):
        aj.predicted_centers(SPLIT[0], params, LENGTHS)
    weights = np.full((B, N, T, S), 1 / S, np.float32)
    with pytest.raises(ValueError, match=r"rows must have all 2 batch axes"):
        analysis.saturation(weights, rows=QUERIES)


def test_parts_of_a_mask_that_disagree_on_the_batch_axes():
    mask = aj.padding_mask(LENGTHS) & np.ones((B, N, T, S), bool)
    with pytest.raises(ValueError, match=r"mask key_lengths must have all 2 batch axes"):
        mask.materialize(T, S)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"key_lengths": np.array([S, 70])}, f"key_lengths must be from 0 to {S}; got 70"),
        ({"key_lengths": -1}, f"key_lengths must be from 0 to {S}; got -1"),
        (
            {"key_lengths": S, "query_lengths": np.int32(T + 1)},
            f"query_lengths must be from 0 to {T}; got {T + 1}",
        ),
    ],
)
def test_lengths_beyond_the_sequence(lengths, message):

    def attend(lengths):
        return aj.attention(QUERY, KEY, KEY, mask=aj.causal_mask() & aj.padding_mask(**lengths))

    with pytest.raises(ValueError, match=message):
        attend(lengths)
    jax.jit(attend)(lengths)  # values that are not known yet


def test_traced_lengths_beyond_the_sequence_allow_everything():
    table = jax.jit(lambda length: aj.padding_mask(length).materialize(T, S))(99)
    assert table.all()
