"""Attention over the scale of its logits: one call for each scale, NumPy, a chapter's curve."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import (
    MASK_CASES,
    SCORE_CASES,
    allowed_table,
    assert_close,
    cotangents,
    inputs_of,
    poisoned,
)
from oracles import softmax

from attention_jax.analysis import logit_scale_sweep

SCALES = np.array([0.0, 0.3, 1.0, 7.0])


def test_against_numpy_a_row_at_a_time():
    score_name, mask_name = "general", "padding"
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
