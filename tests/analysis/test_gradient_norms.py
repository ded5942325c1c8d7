"""Norms and noise of gradients by group, against flattened NumPy arrays."""

import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit

from attention_jax import analysis

# Compiled as one program each. `test_jit_and_vmap` calls them outside of `jax.jit`.
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
