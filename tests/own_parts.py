"""Parts as a user writes them, and attention with them in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from oracles import softmax

import attention_jax as aj

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
NUMBERS = (0.1, 3.0)
NOW = {"score": 1, "mask": 1, "bias": 1, "normalizer": 1}  # what parts of a user read


def expected(temperature, allowed=True):
    """Attention of X to itself with logits `temperature * q . k`, in float64 NumPy."""
    tokens = X.astype(np.float64)
    return softmax(temperature * tokens @ tokens.T, allowed) @ tokens


def slope(temperature):
    """The derivative of the sum of squares of `expected` by the temperature."""
    temperature, step = float(temperature), 1e-6
    losses = [np.sum(expected(temperature + sign * step) ** 2) for sign in (-1, 1)]
    return (losses[1] - losses[0]) / (2 * step)


def close(got, temperature, **mask):
    np.testing.assert_allclose(got, expected(temperature, **mask), rtol=2e-5, atol=2e-6)


class Module(nnx.Module):
    def __init__(self):
        self.temperature = nnx.Param(jnp.float32(1.0))
        self.name = "a static attribute"

    def __call__(self, q, k):
        return self.temperature[...] * (q @ k.T)


def product(temperature, q, k):
    return temperature * (q @ k.T)


@aj.mask_dataclass
class Near(aj.Mask):
    def allowed(self, query_positions, key_positions):
        return abs(query_positions[:, None] - key_positions[None, :]) <= NOW["mask"]


@aj.bias_dataclass
class Slope(aj.Bias):
    def values(self, query_positions, key_positions):
        before = key_positions[None, :] <= query_positions[:, None]
        return jnp.where(before, 0.0, -1e4 * NOW["bias"])


@dataclasses.dataclass(frozen=True)
class Hotter(aj.Normalizer):
    sums_to_one = False

    def weight(self, params, shifted):
        return jax.nn.sigmoid(shifted)

    def transform(self, params, logits, num_keys):
        return NOW["normalizer"] * logits
