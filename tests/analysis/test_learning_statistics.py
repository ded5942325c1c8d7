"""What is watched while a model learns, against NumPy and against the model's own weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conformance import quick_jit

import attention_jax as aj
from attention_jax.analysis.learning_statistics import learning_statistics

B, T, S, D, DV = 2, 5, 7, 3, 2
OF_ANY = ("entropy", "largest_weight", "saturation")
OF_SOFTMAX = ("logit_sd", "jacobian_norm", "dlogits_norm")
KEYS = np.array([7, 4])  # real keys of each example
QUERIES = np.array([3, 5])  # and queries


normal = functools.partial(oracles.normal, dtype=float)


def params():
    # Sharp enough for some rows to be saturated, and not all.
    return {
        "first": {"kernel": 3 * normal(D, D)},
        "second": {"value": normal(S, DV, seed=1)},
    }


def inputs():
    return normal(B, T, D, seed=2), normal(B, S, D, seed=3)


def output_of(params, query, key, allowed):
    return aj.attention(
        query,
        key,
        params["second"]["value"],
        score="general",
        params=params["first"],
        mask=allowed,
    )


def loss(params, query, key, allowed, counted):
    output = output_of(params, query, key, allowed)
    return jnp.sum(jnp.where(counted[..., None], output**2, 0)) / 2


def masks(empty_row):
    """Which keys are seen, and which queries the loss depends on."""
    allowed = np.broadcast_to((np.arange(S) < KEYS[:, None])[:, None, :], (B, T, S)).copy()
    if empty_row:
        allowed[1, 2] = False
    return allowed, np.arange(T) < QUERIES[:, None]


def by_hand(params, query, key, allowed, counted):
    """Row by row; of a row without keys there is nothing to say."""
    kernel, value = params["first"]["kernel"], params["second"]["value"]
    rows = {name: [] for name in (*OF_ANY, *OF_SOFTMAX)}
    total, dkernel, dvalue = 0.0, np.zeros((D, D)), np.zeros((S, DV))
    for b, i in np.ndindex(B, T):
        keys = np.flatnonzero(allowed[b, i])
        if not counted[b, i] or not keys.size:
            continue
        logits = query[b, i] @ kernel @ key[b, keys].T
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        output = weights @ value[keys]
        total += np.sum(output**2) / 2
        jacobian = np.diag(weights) - np.outer(weights, weights)
        dlogits = jacobian @ value[keys] @ output
        dvalue[keys] += np.outer(weights, output)
        dkernel += np.outer(query[b, i], dlogits @ key[b, keys])
        rows["entropy"].append(-np.sum(weights * np.log(np.where(weights, weights, 1))))
        rows["largest_weight"].append(weights.max())
        rows["saturation"].append(weights.max() > 0.99)
        rows["logit_sd"].append(np.var(logits))
        rows["jacobian_norm"].append(np.linalg.norm(jacobian))
        rows["dlogits_norm"].append(np.linalg.norm(dlogits))
    means = {f"attention/{name}": np.mean(of_rows) for name, of_rows in rows.items()}
    means["attention/logit_sd"] = np.sqrt(means["attention/logit_sd"])
    return {
        "loss": total,
        "gradient_norm/first/kernel": np.linalg.norm(dkernel),
        "gradient_norm/second/value": np.linalg.norm(dvalue),
        **means,
    }


def assert_close(got, expected, rtol):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == np.shape(value), name
        np.testing.assert_allclose(got[name], value, rtol=rtol, err_msg=name)


statistics_of_loss = quick_jit(functools.partial(learning_statistics, loss))


@pytest.mark.parametrize("empty_row", [False, True])
def test_row_by_row(empty_row):
    """Neither padded queries nor one without keys count, and what stands in padding is not read."""
    with jax.enable_x64(True):
        (query, key), (allowed, counted) = inputs(), masks(empty_row)
        expected = by_hand(params(), query, key, allowed, counted)
        assert 0 < expected["attention/saturation"] < 1
        noisy = np.where(counted[..., None], query, 100 * normal(B, T, D, seed=5))
        dirty = np.where((np.arange(S) < KEYS[:, None])[..., None], key, np.nan)
        for tokens in ((query, key), (noisy, dirty)):
            got = statistics_of_loss(params(), *tokens, allowed, counted)
            assert_close(got, expected, 1e-10)
