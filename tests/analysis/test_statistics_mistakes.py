"""Errors of the statistics of attention: each names the argument and what came."""

import jax.numpy as jnp
import numpy as np
import pytest
from statistics_cases import ALIGNMENT, COUNTED, MASK, B, S, T

from attention_jax import padding_mask
from attention_jax.analysis import (
    alignment_error,
    attention_summary,
    effective_keys,
    expected_distance,
    jensen_shannon,
    logit_variance,
    normalized_entropy,
    saturation,
    weight_entropy,
)

GOOD = np.full((B, T, S), 1 / S, np.float32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: weight_entropy(GOOD[0, 0]), r"weights must be \[\*B, T, S\]; got \[7\]"),
        (
            lambda: weight_entropy(GOOD.astype(int)),
            "weights must be floating-point; got dtype int",
        ),
        (lambda: weight_entropy("abc"), "weights must be an array; got str"),
        (lambda: effective_keys(GOOD[0, 0]), r"weights must be \[\*B, T, S\]; got \[7\]"),
        (
            lambda: normalized_entropy(GOOD, GOOD),
            "mask must be boolean.*got dtype float32",
        ),
        (
            lambda: normalized_entropy(GOOD, MASK[..., :3]),
            r"mask must broadcast.*got \[2, 5, 3\]",
        ),
        (
            lambda: normalized_entropy(GOOD[0], MASK),
            r"mask must broadcast.*got \[2, 5, 7\]",
        ),
        (
            lambda: normalized_entropy(GOOD, padding_mask(jnp.ones(3, int))),
            "must broadcast",
        ),
        (lambda: logit_variance(GOOD[0, 0]), r"logits must be \[\*B, T, S\]; got \[7\]"),
        (lambda: logit_variance(MASK), "logits must be floating-point; got dtype bool"),
        (lambda: logit_variance(GOOD, MASK[:, :2]), "mask must broadcast"),
        (
            lambda: saturation(GOOD, bound=1),
            r"bound must be a Python number in \[0, 1\); got 1",
        ),
        (lambda: saturation(GOOD, bound=-0.1), "bound must be a Python number"),
        (lambda: saturation(GOOD, bound=float("nan")), "bound must be .* got nan"),
        (lambda: saturation(GOOD, bound=None), "bound must be .* got None"),
        (
            lambda: saturation(GOOD, rows=GOOD[..., 0]),
            "rows must be boolean.*got dtype float32",
        ),
        (lambda: saturation(GOOD, rows="abc"), "rows must be an array; got str"),
        (
            lambda: saturation(GOOD, rows=COUNTED[:, :1]),
            r"rows must be \[..., 5\]; got \[2, 1\]",
        ),
        (lambda: saturation(GOOD[0], rows=COUNTED), "rows must broadcast"),
        (lambda: saturation(GOOD, rows=True), r"rows must be \[..., 5\]; got \[\]"),
        (
            lambda: alignment_error(GOOD, ALIGNMENT.astype(np.float32)),
            "alignment must be integers; got dtype float32",
        ),
        (
            lambda: alignment_error(GOOD, ALIGNMENT[:, :3]),
            r"alignment must be \[..., 5\]",
        ),
        (
            lambda: alignment_error(GOOD, ALIGNMENT, rows=COUNTED[:, 1:]),
            r"rows must be",
        ),
        (
            lambda: expected_distance(GOOD, COUNTED),
            "alignment must be integers; got dtype bool",
        ),
        (lambda: expected_distance(GOOD, ALIGNMENT[:, :3]), "alignment must be"),
        (
            lambda: jensen_shannon(GOOD, GOOD[0]),
            r"weights_b must be \[2, 5, 7\], as weights_a is; got \[5, 7\]",
        ),
        (lambda: jensen_shannon(GOOD, MASK), "weights_b must be floating-point"),
        (lambda: jensen_shannon(GOOD[0, 0], GOOD), r"weights_a must be \[\*B, T, S\]"),
        (lambda: attention_summary(GOOD, mask=MASK[:, :2]), "mask must broadcast"),
        (lambda: attention_summary(GOOD, rows=ALIGNMENT), "rows must be boolean"),
        (
            lambda: attention_summary(GOOD, alignment=GOOD[..., 0]),
            "alignment must be integers",
        ),
        (lambda: attention_summary(GOOD, bound=2), "bound must be"),
    ],
)
def test_bad_input(function, message):
    with pytest.raises(ValueError, match=message):
        function()
