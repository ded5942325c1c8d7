"""Conjunctions of masks as windows, against their tables."""

import functools
import operator

import numpy as np
import pytest

import attention_jax as aj
from attention_jax.kernels.mosaic_gpu.windows import windows
from attention_jax.kernels.windows import bounds_of, parts_of, smallest_lengths

T, S = 7, 9
CAUSAL, LOCAL, OTHER_LOCAL = aj.causal_mask(-1), aj.local_mask(3, 2), aj.local_mask(1, 4)
PADDING, OTHER_PADDING = aj.padding_mask(6, 5), aj.padding_mask(8, 4)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [CAUSAL],
        [LOCAL, OTHER_LOCAL],  # the smaller of two bounds, on both sides
        [PADDING, OTHER_PADDING],  # the smaller of two lengths, on both sides
        [aj.padding_mask(4)],
        [aj.padding_mask(0)],
        [OTHER_LOCAL, PADDING, CAUSAL, OTHER_PADDING, LOCAL],
    ],
)
def test_windows_are_those_of_the_table(parts):
    mask = functools.reduce(operator.and_, parts) if parts else None
    assert parts_of(mask) == parts
    first, end = np.asarray(windows(mask, T, S))[..., None]
    keys = np.arange(S)
    table = np.ones((T, S), bool) if mask is None else np.asarray(mask.materialize(T, S))
    np.testing.assert_array_equal((first <= keys) & (keys < end), table)


def test_bounds_and_lengths_by_hand():
    mask = OTHER_LOCAL & PADDING & LOCAL & OTHER_PADDING
    assert bounds_of(mask) == (1, 2)
    assert [int(length) for length in smallest_lengths(mask, T, S)] == [6, 4]
    assert bounds_of(PADDING) == (None, None)
    assert smallest_lengths(CAUSAL, T, S) == (None, None)
    assert [int(length) for length in smallest_lengths(aj.padding_mask(99), T, S)] == [S, T]
