"""qkv_walkthrough.py: each step in NumPy, and the committed numbers."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.scores import qkv_walkthrough

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

COMMITTED = json.loads((EXPERIMENTS / "scores" / "qkv_walkthrough.json").read_text())


def test_committed_numbers():
    missed = [item for item in qkv_walkthrough.expectations(COMMITTED) if not item.met]
    assert not missed, missed


def test_it_runs_and_draws():
    numbers = qkv_walkthrough.run(qkv_walkthrough.QUICK)
    numbers["config"] = dataclasses.asdict(qkv_walkthrough.QUICK)
    missed = [item for item in qkv_walkthrough.expectations(numbers) if not item.met]
    assert not missed, missed
    assert set(qkv_walkthrough.plot(numbers)) == set(qkv_walkthrough.CAPTIONS)
    assert numbers["axis"]["source"] == COMMITTED["axis"]["source"]


def softmax(logits, axis):
    exponentials = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def test_steps_in_numpy():
    rng = np.random.default_rng(0)
    tokens, projections = rng.normal(size=(5, 3)), rng.normal(size=(3, 3, 3))
    query, key, value = (tokens @ projection for projection in projections)
    weights = softmax(query @ key.T / np.sqrt(3), axis=1)
    expected = {
        "embedding": tokens, "Q": query, "K": key, "V": value, "compatibility": query @ key.T,
        "scaled": query @ key.T / np.sqrt(3), "weights": weights, "context": weights @ value,
    }  # fmt: skip
    got = qkv_walkthrough.steps(*(jnp.asarray(x, jnp.float32) for x in (tokens, projections)))
    assert list(qkv_walkthrough.STEPS) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_shapes_and_rows_of_equal_tokens():
    assert qkv_walkthrough.TOKEN_IDS[3] == qkv_walkthrough.TOKEN_IDS[6] == 9
    for recipe in ("source", "ours"):
        steps = COMMITTED[recipe]["steps"]
        assert list(steps) == list(qkv_walkthrough.STEPS)
        for name, step in steps.items():
            over_keys = name in ("compatibility", "scaled", "weights")
            assert step["shape"] == ([11, 11] if over_keys else [11, 32])
            assert np.shape(step["values"]) == tuple(step["shape"])
            np.testing.assert_allclose(step["values"][3], step["values"][6], atol=2e-3)


def test_both_axes_of_the_source_in_numpy():
    tokens, projections = (np.asarray(x, float) for x in qkv_walkthrough.source_arrays())
    query, key, value = (tokens @ projection for projection in projections)
    for name, axis in (("source", 0), ("ours", 1)):
        weights = softmax(query @ key.T / np.sqrt(32), axis)
        got = COMMITTED["axis"][name]
        np.testing.assert_allclose(got["weights"], weights, atol=1e-3)
        np.testing.assert_allclose(got["row_sums"], weights.sum(1), atol=1e-3)
        np.testing.assert_allclose(got["column_sums"], weights.sum(0), atol=1e-3)
        ones = got["column_sums" if name == "source" else "row_sums"]
        np.testing.assert_allclose(ones, 1, atol=1e-4)
        context = weights @ value
        outside = (context < value.min(0) - 1e-3) | (context > value.max(0) + 1e-3)
        assert abs(got["outside_values"] - outside.mean()) < 0.01
    assert COMMITTED["axis"]["ours"]["outside_values"] == 0
    assert COMMITTED["axis"]["source"]["outside_values"] > 0
    assert sum(total < 0.01 for total in COMMITTED["axis"]["source"]["row_sums"]) == 7
    assert "7 of 11 queries get nothing" in qkv_walkthrough.report(COMMITTED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draws": 1}, "draws must be at least 2; got 1"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        qkv_walkthrough.Config(**settings)
