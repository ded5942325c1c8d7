"""Which batch axes the arrays of a mask have, and lengths that are too long."""

import jax
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, B, S, T, quick_jit
from oracles import normal, softmax

import attention_jax as aj
from attention_jax import analysis, causal_mask, padding_mask, segment_mask, token_mask

KEYS, QUERIES = (np.random.default_rng(4).random((B, n)) < 0.6 for n in (S, T))
N = B  # as many heads as examples: the case that used to be misread
QUERY, KEY = normal(B, N, T, 3), normal(B, N, S, 3)


def test_tokens_and_batch_axes_mean_what_they_say():
    rows = np.broadcast_to(KEYS[:, None, None], (B, N, T, S))
    real = KEYS[:, None], QUERIES[:, None]
    cases = (
        (token_mask(real[0]), rows),  # one for each example
        (token_mask(KEYS[None]), rows.swapaxes(0, 1)),  # one for each head
        (KEYS[:, None, None], rows),
        (token_mask(KEYS[0]), np.broadcast_to(KEYS[0], rows.shape)),
        (token_mask(*real) & causal_mask(1), rows & real[1][..., None] & np.tri(T, S, 1, bool)),
    )

    @quick_jit
    def run(masks):
        return [
            [
                aj.attention(QUERY, KEY, KEY, mask=mask, implementation=name,
                             block_sizes=aj.BlockSizes(2, 3))
                for name in (ALL_IMPLEMENTATIONS if mask is masks[-1] else ["reference"])
            ]
            for mask in masks
        ]  # fmt: skip

    logits = np.float64(QUERY) @ np.float64(KEY).swapaxes(-1, -2) / 3**0.5
    for (_, allowed), outputs in zip(cases, run([mask for mask, _ in cases]), strict=True):
        for got in outputs:
            np.testing.assert_allclose(got, softmax(logits, allowed) @ KEY, rtol=2e-5, atol=2e-6)


LENGTHS = np.array([3, 6])
FEWER_AXES = {
    "mask key_lengths": padding_mask(LENGTHS),
    "mask query_lengths": padding_mask(LENGTHS[:, None], LENGTHS),
    "mask key_tokens": token_mask(KEYS),
    "mask query_segments": segment_mask(np.zeros((B, T), int), np.zeros(S, int)),
    "mask centers": aj.window_mask(np.zeros((B, T), np.float32), 2) | causal_mask(),
    "mask": np.ones((B, T, S), bool),
}


@pytest.mark.parametrize("label", FEWER_AXES)
def test_arrays_that_lack_batch_axes_are_told_which_to_write(label):
    """Aligned to the right, [B] lengths of inputs [B, N, T, D] would be one per head."""
    mask, name = FEWER_AXES[label], label.split()[-1]
    message = rf"{label} must have all 2 batch axes .*write {name}\[:, None\] if"
    logits, weights = normal(B, N, T, S), np.full((B, N, T, S), 1 / S, np.float32)
    for call in (
        lambda: aj.attention(QUERY, KEY, KEY, mask=mask),
        lambda: aj.attention_weights(QUERY, KEY, mask=mask),
        lambda: aj.coverage_attention(QUERY, KEY, KEY, mask=mask, coverage_kernel=normal(3)),
        lambda: aj.monotonic_attention(QUERY, KEY, KEY, mask=mask, score="scaled"),
        lambda: aj.local_attention(QUERY, KEY, KEY, centers=np.zeros(T), radius=1, mask=mask),
        lambda: aj.masked_softmax(logits, mask),
        lambda: analysis.normalized_entropy(weights, mask),
        lambda: analysis.attention_gradients(QUERY, KEY, KEY, QUERY, mask=mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("key_lengths", (S + 1,)), ("key_lengths", (-1,)), ("query_lengths", (S, np.int32(T + 1)))],
)
def test_lengths_beyond_the_sequence(name, lengths):
    def attend(lengths):
        return aj.attention(QUERY, KEY, KEY, mask=causal_mask() & padding_mask(*lengths))

    with pytest.raises(ValueError, match=f"{name} must be from 0 to"):
        attend(lengths)
    jax.eval_shape(attend, lengths)  # values that are not known yet
    assert jax.jit(lambda length: padding_mask(length).materialize(T, S))(99).all()
