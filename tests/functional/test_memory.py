"""Keys that are remembered, against the formula of each score for one pair."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_model import normal, softmax_where
from score_cases import DK, SCORE_CASES

from attention_jax import Dot, Score, attention, attention_weights
from attention_jax.functional.memory import Memory, recall, remember, resolve

B, T, S, DV = 2, 5, 7, 13


def tokens(query_dim):
    return normal(B, T, query_dim), normal(B, S, DK, seed=3), normal(B, S, DV, seed=4)


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.parametrize("name", SCORE_CASES)
def test_attending_to_what_was_remembered_is_the_formula(name):
    case = SCORE_CASES[name]
    params = case.score.init(jax.random.key(1), case.query_dim, DK)
    query, key, value = tokens(case.query_dim)

    @jax.jit
    def attend(query, memory):
        score, queries = recall(case.score, params, query, memory, key_dim=DK)
        output = attention(queries, memory.keys, memory.values, score=score, params=params)
        return output, attention_weights(queries, memory.keys, score=score, params=params)

    memory = remember(case.score, params, key, value, query_dim=case.query_dim)
    output, weights = attend(query, memory)
    logits = case.pair(wide(params), *wide((query[:, :, None], key[:, None])))
    np.testing.assert_allclose(weights, softmax_where(logits), atol=3e-6)
    np.testing.assert_allclose(output, softmax_where(logits) @ value, atol=5e-6)
    np.testing.assert_array_equal(memory.values, value)


def test_keys_are_projected_once():
    case = SCORE_CASES["additive"]
    params = case.score.init(jax.random.key(1), case.query_dim, DK)
    _, key, _ = tokens(case.query_dim)
    memory = remember(case.score, params, key, None, query_dim=case.query_dim)
    np.testing.assert_allclose(memory.keys, key @ params["key_kernel"], atol=1e-5)
    np.testing.assert_array_equal(memory.values, key)
    narrow = remember(
        case.score, params, jnp.asarray(key, jnp.bfloat16), None, query_dim=case.query_dim
    )
    assert narrow.keys.dtype == jnp.float32  # rounded no further than in an ordinary call
    assert narrow.values.dtype == jnp.bfloat16


def test_parameters_with_axes_that_the_keys_lack():
    case, n = SCORE_CASES["additive"], 4
    score = case.score
    rngs = jax.random.split(jax.random.key(1), n)
    params = jax.vmap(lambda rng: score.init(rng, case.query_dim, DK))(rngs)
    query, key, value = (array[0] for array in tokens(case.query_dim))
    memory = remember(score, params, key, value, query_dim=case.query_dim)
    assert memory.keys.shape[:2] == (n, S)
    queries = np.broadcast_to(query, (n, *query.shape))
    same, queries = recall(score, params, queries, memory, key_dim=DK)
    output = attention(queries, *memory, score=same, params=params)
    for index in range(n):
        own = wide(jax.tree.map(lambda leaf, index=index: leaf[index], params))
        logits = case.pair(own, *wide((query[:, None], key[None])))
        np.testing.assert_allclose(output[index], softmax_where(logits) @ value, atol=5e-6)


@dataclasses.dataclass(frozen=True)
class Halves(Score):
    """q . k, its features in two halves: no single array to remember."""

    def init(self, rng, query_dim, key_dim):
        return {}

    def project(self, params, query, key):
        return tuple(tuple(jnp.split(x, [1], axis=-1)) for x in (query, key))

    def pair(self, params, q_features, k_features):
        return sum(q @ k.T for q, k in zip(q_features, k_features, strict=True))


def test_features_that_are_trees_leave_keys_as_they_are():
    query, key, value = tokens(DK)
    memory = remember(Halves(), {}, key, value, query_dim=DK)
    np.testing.assert_array_equal(memory.keys, key)
    score, queries = recall(Halves(), {}, query, memory, key_dim=DK)
    assert score == Halves()
    np.testing.assert_array_equal(queries, query)
    output = attention(queries, *memory, score=score)
    logits = wide(query) @ wide(key).transpose(0, 2, 1)
    np.testing.assert_allclose(output, softmax_where(logits) @ value, atol=2e-5)


def test_resolve_takes_keys_as_they_are_or_remembered():
    query, key, value = tokens(DK)
    plain = resolve(Dot(), {}, query, key, None, DK)
    assert plain[0] == Dot()
    for one, other in zip(plain[1:], (query, key, key), strict=True):
        np.testing.assert_array_equal(one, other)
    assert resolve(Dot(), {}, query, key, value, DK)[3] is value
    memory = Memory(2 * key, value)
    score, queries, keys, values = resolve(Dot(), {}, query, memory, None, DK)
    logits = score({}, queries[0], keys[0])
    np.testing.assert_allclose(logits, 2 * wide(query[0]) @ wide(key[0]).T, atol=2e-5)
    assert keys is memory.keys
    assert values is memory.values
