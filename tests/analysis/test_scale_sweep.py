"""Attention over the scale of its logits: one call for each scale, NumPy, a chapter's curve."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    MASK_CASES,
    SCORE_CASES,
    allowed_table,
    assert_close,
    cotangents,
    inputs_of,
    poisoned,
)

from attention_jax.analysis import logit_scale_sweep

SCALES = np.array([0.0, 0.3, 1.0, 7.0])


def softmax(logits, allowed):
    """Rows [n, S] in NumPy; zeros where nothing is allowed."""
    logits = np.where(allowed, logits, -np.inf)
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


@pytest.mark.parametrize(
    ("score_name", "mask_name"),
    [("additive", "combination"), ("general", "none"), ("own", "padding")],
)
def test_against_numpy_a_row_at_a_time(score_name, mask_name):
    inputs, allowed = inputs_of(score_name), allowed_table(mask_name)
    doutput = cotangents()["output"]
    inputs = {name: array for name, array in inputs.items() if name != "bias"}
    expected = np.zeros((3, len(SCALES)))
    rows = 0
    for b, i in np.argwhere(allowed.any(-1)):
        query, rows = inputs["query"][b, i], rows + 1
        logits = np.array(
            [SCORE_CASES[score_name].pair(inputs["params"], query, key) for key in inputs["key"][b]]
        )
        dweights = inputs["value"][b] @ doutput[b, i]
        for n, scale in enumerate(SCALES):
            weights = softmax(scale * logits, allowed[b, i])
            jacobian = np.diag(weights) - np.outer(weights, weights)
            positive = weights[weights > 0]
            expected[:, n] += (
                np.linalg.norm(jacobian @ dweights),
                -np.sum(positive * np.log(positive)),
                np.linalg.norm(jacobian),
            )
    expected /= rows
    with jax.enable_x64(True):
        dirty = poisoned({**inputs, "bias": np.zeros(allowed.shape)}, allowed)
        dirty.pop("bias")
        got = logit_scale_sweep(
            **dirty,
            doutput=doutput,
            scales=SCALES,
            score=SCORE_CASES[score_name].score,
            mask=MASK_CASES[mask_name].build(),
        )
        for name, array in zip(got._fields[1:], expected, strict=True):
            assert_close(name, getattr(got, name), array, 1e-12)
        np.testing.assert_array_equal(got.scales, SCALES)


def test_the_gradient_of_the_largest_weight():
    """16 scores evenly from -1 to 1, times a scale ("Attention Variants", §38.4). The chapter reads
    off its curve a peak near scale 1 and next to nothing from 10 on; neither is in it."""
    scores = np.linspace(-1, 1, 16)
    scales = np.linspace(0.1, 20, 60)
    top = np.eye(16)[-1]
    with jax.enable_x64(True):
        got = logit_scale_sweep(
            np.ones((1, 1)), scores[:, None], np.eye(16), top[None], scales, score="dot"
        )
        expected = []
        for scale in scales:
            weights = softmax(scale * scores, True)
            expected.append(np.linalg.norm(weights[-1] * (top - weights)))
        np.testing.assert_allclose(got.gradient_norm, expected, rtol=1e-12)
        np.testing.assert_allclose(got.entropy[0], np.log(16), atol=1e-2)
        assert np.all(np.diff(got.entropy) < 0)
    peak = np.argmax(expected)
    assert 5.5 < scales[peak] < 6.5
    at_one, at_ten, at_twenty = np.interp([1, 10, 20], scales, expected) / expected[peak]
    np.testing.assert_allclose([at_one, at_ten, at_twenty], [0.44, 0.84, 0.30], atol=0.01)


def test_limits():
    # Scale 0 is uniform; a large scale leaves one key.
    query, key = jnp.ones((1, 1)), jnp.array([[0.0], [1.0], [2.0], [3.0]])
    scales = jnp.array([0.0, 1e4])
    got = logit_scale_sweep(query, key, jnp.eye(4), jnp.eye(4)[:1], scales, score="dot")
    np.testing.assert_allclose(got.entropy, [np.log(4), 0], atol=1e-6)
    np.testing.assert_allclose(got.jacobian_norm, [np.sqrt(3) / 4, 0], atol=1e-7)
    # Of a uniform row, J e_1 = (e_1 - 1/4) / 4.
    np.testing.assert_allclose(got.gradient_norm, [np.sqrt(12) / 16, 0], atol=1e-7)
    nothing = logit_scale_sweep(
        query, key, jnp.eye(4), jnp.eye(4)[:1], scales, mask=np.zeros((1, 4), bool)
    )
    assert not any(np.any(array) for array in nothing[1:])
    empty = logit_scale_sweep(query, key[:0], jnp.ones((0, 2)), jnp.ones((1, 2)), scales)
    assert not any(np.any(array) for array in empty[1:])
