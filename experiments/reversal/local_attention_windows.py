"""The chapter's local masks, and the sum of a row's weights after local-p's Gaussian."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.centers import reversed_centers
from attention_jax.functional.local import local_attention_weights, window_mask
from experiments.experiment import JSON, rounded

Array = jax.Array

# §38.7's figure: 16 queries, 20 keys, D = 3, noise of deviation 2 from a generator with seed 2.
QUERIES, KEYS, PICTURE_RADIUS, NOISE, NOISE_SEED = 16, 20, 3, 2.0, 2


def chapter_masks() -> JSON:
    """Returns the allowed pairs of each mask, [T, S] of 0 and 1, and weights with the Gaussian."""
    in_proportion = np.arange(QUERIES) * KEYS / QUERIES
    noise = np.random.default_rng(NOISE_SEED).normal(0, NOISE, QUERIES)
    noisy = np.clip(in_proportion + noise, 0, KEYS - 1)
    centers = {
        "local-m": in_proportion.astype(int),
        "local-p": noisy.astype(int),
        "anti-diagonal": reversed_centers(QUERIES, jnp.array(KEYS)),
    }
    masks = {
        name: window_mask(jnp.asarray(of_mask), PICTURE_RADIUS).materialize(QUERIES, KEYS)
        for name, of_mask in centers.items()
    }
    masks = {"global": jnp.ones((QUERIES, KEYS), bool), **masks}
    weights = local_attention_weights(
        jnp.zeros((QUERIES, 1)), jnp.zeros((KEYS, 1)),
        centers=jnp.asarray(noisy), radius=PICTURE_RADIUS, sigma=PICTURE_RADIUS / 2,
    )  # fmt: skip
    return {
        "pairs": {name: np.asarray(mask, int).tolist() for name, mask in masks.items()},
        "gaussian_weights": rounded(weights),
        "gaussian_centers": rounded(noisy),
    }


def gaussian_mass(radius: int, samples: int) -> JSON:
    """Returns the sum of a row's weights after the Gaussian, over random queries and keys.

    Centers are on a key, or uniform between two keys; windows lie within the keys.
    """
    length, dim = 2 * radius + 3, 16

    def row_sum(rng: Array, offset: Array) -> Array:
        query, key = jax.random.normal(rng, (2, length, dim))
        weights = local_attention_weights(
            query[:1], key, centers=radius + 1 + offset[None], radius=radius, sigma=radius / 2
        )
        return jnp.sum(weights)

    rngs = jax.random.split(jax.random.key(radius), samples)
    between = jax.random.uniform(jax.random.key(radius + 100), (samples,), maxval=1.0)
    numbers: JSON = {"radius": radius}
    for name, offsets in (("on a key", jnp.zeros(samples)), ("between keys", between)):
        sums = np.asarray(jax.jit(jax.vmap(row_sum))(rngs, offsets), np.float64)
        numbers[name] = {
            "mean": rounded(sums.mean()),
            "standard_error": rounded(sums.std(ddof=1) / math.sqrt(samples)),
        }
    numbers["on a key"]["formula"] = rounded(mass_on_a_key(radius))
    numbers["between keys"]["formula"] = rounded(mass_between_keys())
    return numbers


def mass_on_a_key(radius: int) -> float:
    """Returns the sum for a center on a key: the mean of exp(-2 k^2 / D^2) over k = -D, ..., D.

    Each key has the same share of the weight on average.
    """
    distances = np.arange(-radius, radius + 1)
    return float(np.mean(np.exp(-2 * (distances / radius) ** 2)))


def mass_between_keys() -> float:
    """Returns the sum for a center between keys: the mean over all distances up to D."""
    return math.sqrt(math.pi / 8) * math.erf(math.sqrt(2))
