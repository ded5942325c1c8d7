"""What is watched while a model learns, against NumPy and against the model's own weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conformance import quick_jit

import attention_jax as aj
from attention_jax import analysis
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


def loss(params, query, key, allowed, counted):
    value, params = params["second"]["value"], params["first"]
    output = aj.attention(query, key, value, score="general", params=params, mask=allowed)
    return jnp.sum(jnp.where(counted[..., None], output**2, 0)) / 2


def masks(empty_row):
    """Which keys are seen, and which queries the loss depends on."""
    allowed = np.broadcast_to((np.arange(S) < KEYS[:, None])[:, None, :], (B, T, S)).copy()
    if empty_row:
        allowed[1, 2] = False
        allowed[0, 1] = np.arange(S) == 3
        allowed[0, 2] = np.isin(np.arange(S), (1, 4))
    return allowed, np.arange(T) < QUERIES[:, None]


def by_hand(params, query, key, allowed, counted):
    """Row by row; rows of fewer than two keys, whose weights cannot change, do not count."""
    kernel, value = params["first"]["kernel"], params["second"]["value"]
    rows = {name: [] for name in (*OF_ANY, *OF_SOFTMAX)}
    total, dkernel, dvalue = 0.0, np.zeros((D, D)), np.zeros((S, DV))
    for b, i in np.ndindex(B, T):
        keys = np.flatnonzero(allowed[b, i])
        if not counted[b, i] or not keys.size:
            continue
        if keys.size == 1:
            total += np.sum(value[keys] ** 2) / 2
            dvalue[keys] += value[keys]
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


# --- norms and noise of gradients by group, against flattened NumPy arrays ---


# Compiled as one program each.
gradient_norms = quick_jit(analysis.gradient_norms, static_argnames="depth")
gradient_signal_to_noise = quick_jit(analysis.gradient_signal_to_noise, static_argnames="depth")

N = 5


def tree(*lead, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(*lead, *shape)).astype(np.float32)

    return {
        "encoder": {"kernel": normal(3, 7), "layers": [normal(2), normal()]},
        "score": {"v": normal(11)},
    }


def groups_of(gradients, depth):
    """{group: all entries of its leaves side by side [*lead, entries], in float64}"""
    encoder, lead = gradients["encoder"], gradients["score"]["v"].shape[:-1]
    leaves = {
        "encoder/kernel": encoder["kernel"],
        "encoder/layers/0": encoder["layers"][0],
        "encoder/layers/1": encoder["layers"][1],
        "score/v": gradients["score"]["v"],
    }
    groups = {}
    for path, leaf in leaves.items():
        entries = np.asarray(leaf, np.float64).reshape(*lead, -1)
        groups.setdefault("/".join(path.split("/")[:depth]), []).append(entries)
    return {name: np.concatenate(parts, axis=-1) for name, parts in groups.items()}


@pytest.mark.parametrize("depth", [0, 1, 2, 3, None])
def test_norms_of_groups(depth):
    gradients = tree()
    got = gradient_norms(gradients, depth=depth)
    expected = groups_of(gradients, depth)
    assert list(got) == list(expected)
    for name, entries in expected.items():
        np.testing.assert_allclose(got[name], np.linalg.norm(entries), rtol=1e-6)


@pytest.mark.parametrize("depth", [0, 1, None])
def test_signal_to_noise_of_groups(depth):
    gradients = tree(N)
    got = gradient_signal_to_noise(gradients, depth=depth)
    # Unbiased estimates from single batches and from their mean, as McCandlish et al. have them.
    for name, batches in groups_of(gradients, depth).items():
        of_one = np.mean([batch @ batch for batch in batches])
        of_all = batches.mean(0) @ batches.mean(0)
        signal = (N * of_all - of_one) / (N - 1)
        noise = (of_one - of_all) / (1 - 1 / N)
        np.testing.assert_allclose(got[name], signal / noise, rtol=1e-4)


def test_signal_to_noise_without_noise():
    same = gradient_signal_to_noise({"a": jnp.ones((3, 2)), "b": jnp.zeros((3, 2))})
    assert (float(same["a"]), float(same["b"])) == (np.inf, 0.0)
