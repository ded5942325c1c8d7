"""Heads as batch axes, against indexing one head at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import causal_mask, padding_mask, segment_mask
from attention_jax.functional.heads import group_heads, pairs_for_heads, ungroup_heads

B, N, K, T, S = 2, 6, 3, 5, 7


def test_groups_are_neighbouring_heads_and_back():
    queries = np.arange(B * N * T * S).reshape(B, N, T, S)
    grouped = group_heads(jnp.asarray(queries), 2, K)
    assert grouped.shape == (B, K, N // K, T, S)
    for head in range(N):
        group, member = divmod(head, N // K)
        np.testing.assert_array_equal(grouped[:, group, member], queries[:, head])
    parts = ungroup_heads({"both": grouped, "first": grouped[..., 0, 0]}, 1)
    np.testing.assert_array_equal(parts["both"], queries)
    np.testing.assert_array_equal(parts["first"], queries[..., 0, 0])


def test_a_shared_head_and_no_head_axis():
    one = jnp.arange(B * T).reshape(B, 1, T)
    np.testing.assert_array_equal(group_heads(one, 1, K), one[:, None])
    np.testing.assert_array_equal(group_heads(one[0, 0], 1, K), one[0, 0])  # no head axis


def test_masks_get_a_head_axis_after_their_batch_axes():
    lengths = np.array([4, 7])
    segments = np.arange(B * T).reshape(B, T) % 3, np.arange(S) % 3
    mask = padding_mask(lengths) & segment_mask(*segments) & causal_mask(1)
    table = np.asarray(
        jax.jit(lambda mask: pairs_for_heads(mask, None, (B, N, T, S), K)[0].materialize(T, S))(
            mask
        )
    )
    assert table.shape == (B, 1, 1, T, S)
    for row in range(B):
        for i in range(T):
            for j in range(S):
                same = int(segments[0][row, i]) == j % 3
                expected = j < lengths[row] and same and j <= i + 1
                assert bool(table[row, 0, 0, i, j]) == bool(expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((T, S), (T, S)),
        ((S,), (1, S)),
        ((B, 1, S), (B, 1, 1, 1, S)),
        ((B, N, T, S), (B, K, N // K, T, S)),
    ],
)
def test_arrays(shape, expected):
    table = np.random.default_rng(0).random(shape) < 0.5
    mask, _ = pairs_for_heads(jnp.array(table), None, (B, N, T, S), K)
    assert mask.table.shape == expected
    np.testing.assert_array_equal(np.asarray(mask.table).reshape(shape), table)


def test_a_wrong_number_of_heads_is_refused():
    for mask, bias in ((np.ones((B, K, T, S), bool), None), (None, np.ones((K, T, S), np.float32))):
        with pytest.raises(ValueError, match=r"(mask|bias) must .*\[2, 6, 5, 7\]"):
            pairs_for_heads(mask, bias, (B, N, T, S), K)


def test_no_examples():
    parts = ungroup_heads(jnp.ones((0, K, N // K, T)), 1)
    assert parts.shape == (0, N, T)
