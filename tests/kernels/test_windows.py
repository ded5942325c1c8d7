"""Conjunctions of masks as windows, against their tables."""

import functools
import operator

import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.experimental.visible_keys import ranges, visible_keys
from attention_jax.kernels.windows import bounds_of, hides_tokens, seen_tokens, windows_of
from attention_jax.positions.masks import TracedLocalMask
from attention_jax.tiles import Options
from attention_jax.tiles.prepare import Plan

T, S = 7, 9
CAUSAL, LOCAL, OTHER_LOCAL = aj.causal_mask(-1), aj.local_mask(3, 2), aj.local_mask(1, 4)
PADDING, OTHER_PADDING = aj.padding_mask(6, 5), aj.padding_mask(8, 4)
SEGMENTS = aj.segment_mask(jnp.array([0, 0, 1, 1, 5, 2, 2]), jnp.array([3, 0, 0, 1, 2, 2, 2, 4, 0]))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [CAUSAL],
        [aj.causal_mask(2), aj.local_mask(0, None)],
        [aj.causal_mask(-(2**31) + 1)],
        [aj.causal_mask(jnp.array(-(2**31) + 1)), LOCAL],
        [aj.local_mask(jnp.array(1), jnp.array(2**31 - 1)), CAUSAL, PADDING],
        [aj.local_mask(jnp.array(3, jnp.int8), 1), SEGMENTS],
        [aj.local_mask(jnp.array(-(2**31) + 1), None)],
        [LOCAL, OTHER_LOCAL],  # the smaller of two bounds, on both sides
        [PADDING, OTHER_PADDING],  # the smaller of two lengths, on both sides
        [aj.padding_mask(0)],
        [OTHER_LOCAL, PADDING, CAUSAL, OTHER_PADDING, LOCAL],
        [SEGMENTS, LOCAL, PADDING],
    ],
)
def test_windows_are_those_of_the_table(parts):
    mask = functools.reduce(operator.and_, parts) if parts else None
    table = np.ones((T, S), bool) if mask is None else np.asarray(mask.materialize(T, S))
    windows = windows_of(mask, T, S)
    columns = windows.map(lambda row: row[:, None], lambda row: row[None])
    np.testing.assert_array_equal(columns.allowed(jnp.arange(S)[None]), table)
    used_queries, used_keys = seen_tokens(windows, S)
    np.testing.assert_array_equal(used_queries, table.any(1))
    np.testing.assert_array_equal(used_keys, table.any(0))
    assert hides_tokens(mask, T, S) or (table.any(0).all() and table.any(1).all())
    static = [part for part in parts if not isinstance(part, TracedLocalMask)]
    assert bounds_of(mask)[:2] == bounds_of(functools.reduce(operator.and_, static, PADDING))[:2]
    # Tiles of 2 queries and 4 keys: further queries see what the last one sees, further keys none.
    padded = np.pad(np.concatenate([table, table[-1:]]), ((0, 0), (0, 3)))
    tiles = padded.reshape(4, 2, 3, 4).swapaxes(1, 2)
    plan = Plan(Options(aj.Dot()), (2, 4), (T, S), jnp.float32)
    windows, visited, full = visible_keys(plan, mask, windows)
    columns = windows.map(lambda row: row[:, None], lambda row: row[None])
    np.testing.assert_array_equal(columns.allowed(jnp.arange(12)[None]), padded)
    assert np.all(visited >= tiles.any((2, 3)))
    assert np.all(full <= tiles.all((2, 3)))


@pytest.mark.parametrize(("t", "s"), [(7, 7), (7, 4), (4, 7), (1, 5)])
def test_a_window_hides_tokens_exactly_where_the_table_does(t, s):
    for left in (None, *range(t)):
        for right in (None, *range(s)):
            mask = aj.local_mask(left, right)
            table = np.asarray(mask.materialize(t, s))
            hidden = not (table.any(0).all() and table.any(1).all())
            assert hides_tokens(mask, t, s) == hidden, (left, right)


def test_ranges():
    flags = jnp.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]], bool)
    assert ranges(flags).tolist() == [[1, 3], [0, 0], [0, 4]]
