"""What is watched while a model learns, against NumPy and against the model's own weights."""

import functools

import chex
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


def in_numpy(params, query, key, allowed, counted):
    """Rows of fewer than two keys, whose weights cannot change, count in the loss alone."""
    kernel, value = params["first"]["kernel"], params["second"]["value"]
    logits = query @ kernel @ np.swapaxes(key, 1, 2)
    weights = oracles.softmax(logits, allowed)
    output = np.where(counted[..., None], weights @ value, 0)  # and the gradient of the loss in it
    jacobian = weights[..., None] * (np.eye(S) - weights[..., None, :])
    dlogits = np.einsum("btjk,btv,kv->btj", jacobian, output, value)
    rows = {
        "entropy": -np.sum(weights * np.log(np.where(weights, weights, 1)), -1),
        "largest_weight": weights.max(-1),
        "saturation": weights.max(-1) > 0.99,
        "logit_sd": np.ma.masked_array(logits, ~allowed).var(-1).filled(0),
        "jacobian_norm": np.linalg.norm(jacobian, axis=(-1, -2)),
        "dlogits_norm": np.linalg.norm(dlogits, axis=-1),
    }
    of_two_keys = counted & (allowed.sum(-1) > 1)
    means = {f"attention/{name}": np.mean(row[of_two_keys]) for name, row in rows.items()}
    means["attention/logit_sd"] **= 0.5
    gradients = {
        "first/kernel": np.einsum("btd,bts,bse->de", query, dlogits, key),
        "second/value": np.einsum("bts,btv->sv", weights, output),
    }
    norms = {f"gradient_norm/{name}": np.linalg.norm(x) for name, x in gradients.items()}
    return {"loss": np.sum(output**2) / 2, **norms, **means}


statistics_of_loss = quick_jit(functools.partial(learning_statistics, loss))


@pytest.mark.parametrize("empty_row", [False, True])
def test_statistics_in_numpy(empty_row):
    """Neither padded queries nor one without keys count, and what stands in padding is not read."""
    with jax.enable_x64(True):
        (query, key), (allowed, counted) = inputs(), masks(empty_row)
        expected = in_numpy(params(), query, key, allowed, counted)
        assert 0 < expected["attention/saturation"] < 1
        noisy = np.where(counted[..., None], query, 100 * normal(B, T, D, seed=5))
        dirty = np.where((np.arange(S) < KEYS[:, None])[..., None], key, np.nan)
        for tokens in ((query, key), (noisy, dirty)):
            got = statistics_of_loss(params(), *tokens, allowed, counted)
            chex.assert_trees_all_close(got, expected, rtol=1e-10, strict=True)


# --- norms and noise of gradients by group, against flattened NumPy arrays ---


# Compiled as one program each.
gradient_norms = quick_jit(analysis.gradient_norms, static_argnames="depth")
gradient_signal_to_noise = quick_jit(analysis.gradient_signal_to_noise, static_argnames="depth")

N = 5
SHAPES = {"encoder/kernel": (3, 7), "encoder/layers/0": (2,), "encoder/layers/1": (), "v": (11,)}
LEAVES = {path: oracles.normal(N, *shape) for path, shape in SHAPES.items()}


@pytest.mark.parametrize("depth", [0, 1, 2, 3, None])
def test_norms_and_noise_of_groups(depth):
    kernel, first, second, v = LEAVES.values()
    gradients = {"encoder": {"kernel": kernel, "layers": [first, second]}, "v": v}
    norms, ratios = (f(gradients, depth=depth) for f in (gradient_norms, gradient_signal_to_noise))
    groups = {}
    for path, leaf in LEAVES.items():
        group = groups.setdefault("/".join(path.split("/")[:depth]), [])
        group.append(leaf.reshape(N, -1).astype(np.float64))
    assert list(norms) == list(ratios) == list(groups)
    for name, leaves in groups.items():
        batches = np.concatenate(leaves, axis=1)
        np.testing.assert_allclose(norms[name], np.linalg.norm(batches), rtol=1e-6)
        # Unbiased estimates from single batches and from their mean, as McCandlish et al. have.
        of_one = np.mean([batch @ batch for batch in batches])
        of_all = batches.mean(0) @ batches.mean(0)
        signal = (N * of_all - of_one) / (N - 1)
        noise = (of_one - of_all) / (1 - 1 / N)
        np.testing.assert_allclose(ratios[name], signal / noise, rtol=1e-4, atol=1e-5)


def test_signal_to_noise_without_noise():
    same = gradient_signal_to_noise({"a": jnp.ones((3, 2)), "b": jnp.zeros((3, 2))})
    assert (float(same["a"]), float(same["b"])) == (np.inf, 0.0)
