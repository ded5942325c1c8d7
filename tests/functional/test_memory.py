"""Keys that are remembered, against the formula of each score for one pair."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import normal, softmax
from products import product_dtypes
from score_cases import DK, SCORE_CASES, each_score, numpy_params

import attention_jax as aj
from attention_jax.functional.memory import remember

B, T, S, DV = 2, 5, 7, 13


def tokens(query_dim):
    return normal(B, T, query_dim), normal(B, S, DK, seed=3), normal(B, S, DV, seed=4)


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.parametrize("name", each_score(fast=("additive", "own", "l2")))
def test_attention_to_a_memory_is_the_formula(name):
    case = SCORE_CASES[name]
    params = numpy_params(case.score, case.query_dim, DK)
    query, key, value = tokens(case.query_dim)
    if case.score.translation_invariant:
        query, key = query + 100, key + 100

    @quick_jit
    def attend(params, query, key, value):
        memory = remember(case.score, params, key, value, query_dim=case.query_dim)
        output = aj.attention(query, memory.keys, memory.values, score=case.score, params=params)
        weights = aj.attention_weights(query, memory.keys, score=case.score, params=params)
        return output, weights, memory

    output, weights, memory = attend(params, query, key, value)
    logits = case.pair(wide(params), *wide((query[:, :, None], key[:, None])))
    np.testing.assert_allclose(weights, softmax(logits), atol=3e-6)
    np.testing.assert_allclose(output, softmax(logits) @ value, atol=5e-6)
    np.testing.assert_array_equal(memory.values, value)


@pytest.mark.parametrize(
    ("score", "dtype"),
    [
        (aj.Dot(), jnp.bfloat16),
        (aj.Cosine(1.0), jnp.bfloat16),
        (aj.NegativeSquaredDistance(), jnp.bfloat16),
        (aj.SoftCap(aj.SoftCap(aj.ScaledDot())), jnp.float16),
    ],
)
def test_tokens_and_memories_of_16_bits_are_multiplied_in_16_bits(score, dtype):
    """Under a cap, in the gradient too."""
    query, key, value = (jnp.asarray(array, dtype) for array in tokens(DK))

    def gradient(query, *memory):
        def total(query):
            return aj.attention(
                query, *memory, score=aj.SoftCap(score), implementation="tiled"
            ).sum()

        return jax.grad(total)(query)

    memory = remember(aj.SoftCap(score), {}, key, value, query_dim=DK)
    for tokens_of_16_bits in (memory, (key, value)):
        products = product_dtypes(gradient, query, *tokens_of_16_bits)
        assert products == {(dtype.dtype.name,) * 2}


@dataclasses.dataclass(frozen=True)
class Moved(aj.NegativeSquaredDistance):
    """Not translation invariant for what the library knows, so that features are remembered."""

    def project_query(self, params, query):
        return super().project_query(params, query)


def test_wide_queries_and_a_memory_of_16_bits():
    query, key, value = tokens(DK)
    key = jnp.bfloat16(key)
    memory = remember(Moved(), {}, key, value, query_dim=DK)
    assert memory.keys.features.dtype == jnp.bfloat16
    weights = aj.attention_weights(query, memory.keys, score=Moved())
    logits = SCORE_CASES["distance"].pair({}, *wide((query[:, :, None], key[:, None])))
    np.testing.assert_allclose(weights, softmax(logits), atol=2e-5)


@dataclasses.dataclass(frozen=True)
class Halves(aj.Score):
    """q . k, its features in two halves: no single array to remember."""

    def init(self, rng, query_dim, key_dim):
        return {}

    def project_query(self, params, query):
        return tuple(jnp.split(query, [1], axis=-1))

    project_key = project_query

    def pair(self, params, q_features, k_features):
        return sum(q @ k.T for q, k in zip(q_features, k_features, strict=True))


def test_a_memory_of_features_that_are_trees():
    query, key, value = tokens(DK)
    memory = remember(Halves(), {}, key, value, query_dim=DK)
    assert [leaf.shape for leaf in memory.keys.features] == [(B, S, 1), (B, S, DK - 1)]
    assert memory.keys.shape == key.shape
    output = aj.attention(query, *memory, score=Halves(), implementation="tiled")
    logits = wide(query) @ wide(key).transpose(0, 2, 1)
    np.testing.assert_allclose(output, softmax(logits) @ value, atol=2e-5)


def test_the_features_of_a_memory_are_as_wide_as_its_widest_array():
    """As in a call of `attention`, whose compute dtype is float64 if any input is."""
    score, (_, key, value) = SCORE_CASES["general"].score, tokens(DK)
    with jax.enable_x64(True):
        params = {"kernel": np.eye(DK, dtype=np.float32)}
        for wide in ("key", "value", "kernel"):
            of = {"key": key, "value": value, **params}
            of[wide] = np.float64(of[wide])
            memory = remember(score, {"kernel": of["kernel"]}, of["key"], of["value"], query_dim=DK)
            assert memory.keys.features.dtype == np.float64
