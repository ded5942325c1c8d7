"""Formulas of gradient_analysis.py and complexity_ledger.py, against others and on paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_model import PAIRS
from oracles import normal, softmax

from attention_jax import SCORES, attention
from attention_jax.scores import Additive
from attention_jax.tasks.vocabulary import Batch
from experiments.costs import complexity_ledger as ledger
from experiments.costs import recurrence
from experiments.gradients import gradient_analysis as analysis


def test_sizes_of_random_gradients_of_two_keys():
    """Gradients of two weights p and 1 - p are p (1 - p) times a normal number, and opposite."""
    samples = 4001
    found = analysis.random_gradients(3, 2, samples, jax.random.key(3))
    draw = jax.random.split(jax.random.key(3), 4)
    query, key = (
        np.asarray(jax.random.normal(draw[i], (samples, i + 1, 3)), np.float64) for i in (0, 1)
    )
    keys = key[:, 0] - key[:, 1]
    gap = np.sum(query[:, 0] * keys, -1)
    for score, factor in (("dot", 1), ("scaled", 3**-0.5)):
        p = 1 / (1 + np.exp(-gap * factor))
        dlogits = np.asarray(found[score]["dlogits"], np.float64)
        # |dlogits| = sqrt(2) p (1 - p) |dweights_0 - dweights_1|, a difference of variance 2.
        ratio = dlogits / (np.sqrt(2) * p * (1 - p))
        assert np.mean(ratio**2) == pytest.approx(2, rel=0.15)
        dquery = dlogits / np.sqrt(2) * factor * np.linalg.norm(keys, axis=-1) / np.sqrt(3)
        np.testing.assert_allclose(found[score]["dquery"], dquery, rtol=1e-3, atol=1e-6)


def test_gradients_of_grown_kernels_by_the_formula():
    dim, keys, scale = 5, 7, 3.0

    @jax.jit
    def both(rng):
        token_rng, value_rng, doutput_rng, score_rng = jax.random.split(rng, 4)
        tokens = jax.random.normal(token_rng, (2, keys, dim))
        tokens = tokens - jnp.mean(tokens, axis=-1, keepdims=True)
        query, key = tokens / jnp.std(tokens, axis=-1, keepdims=True)
        value = jax.random.normal(value_rng, (keys, analysis.VALUE_DIM))
        doutput = jax.random.normal(doutput_rng, value.shape) / analysis.VALUE_DIM**0.5
        params = Additive().init(score_rng, dim, dim)
        params = {name: params[name] * (1 if name == "v" else scale) for name in params}

        def total(query, key, **options):
            return jnp.sum(attention(query, key, value, **options) * doutput)

        def scaled(kernel):
            return total(query @ kernel, key @ params["key_kernel"] * 2**0.5, score="scaled")

        expected = {
            "additive": jax.grad(lambda p: total(query, key, score=Additive(), params=p))(params),
            "scaled": {"query_kernel": jax.grad(scaled)(params["query_kernel"] * 2**0.5)},
        }
        return analysis.grown_kernels(dim, keys, jnp.float32(scale), rng), expected

    found, expected = both(jax.random.key(0))
    for score, gradients in expected.items():
        for name, gradient in gradients.items():
            norm = float(np.linalg.norm(gradient))
            assert float(found[score][name]) == pytest.approx(norm, rel=1e-4)


def test_share_at_padding_on_paper():
    dlogits = np.array([[[-4.0, 3.0, 1.0], [0, 0, 0]], [[1, 1, -2], [3, -1, -2]]], np.float32)
    lengths = np.array([1, 2], np.int32)
    batch = Batch(None, lengths, None, None, None)
    share = jax.jit(analysis.share_at_padding)
    assert float(share(dlogits, batch)) == pytest.approx((4 + 2 + 2) / (8 + 4 + 6))
    heads = np.stack([dlogits, dlogits], 1)
    assert float(share(heads, batch)) == pytest.approx((4 + 2 + 2) / (8 + 4 + 6))
    assert float(share(0 * dlogits, batch)) == 0


def test_wider_batches_hold_the_same_strings():
    batch = Batch(np.array([[5, 6, 0], [8, 9, 10]], np.int32), np.array([2, 3]), None, None, None)
    wide = jax.device_get(jax.jit(analysis.widened, static_argnums=1)(batch, 7))
    assert wide.source.tolist() == [[5, 6, 0, 0, 0, 0, 0], [8, 9, 10, 0, 0, 0, 0]]
    assert wide.targets.tolist() == [[6, 5, 2, 0, 0, 0, 0, 0], [10, 9, 8, 2, 0, 0, 0, 0]]
    assert wide.target_lengths.tolist() == [3, 4]


# --- the ledger ---


@pytest.mark.parametrize("name", ledger.NAIVE)
def test_a_naive_form_is_its_score(name):
    query, key, value = normal(5, 3), normal(7, 3, seed=3), normal(7, 3, seed=4)
    params = SCORES[name].init(jax.random.key(1), 3, 3)
    output = jax.jit(ledger.naive_attention(name))(query, key, value, params)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    logits = PAIRS[name](wide, query[:, None].astype(float), key[None].astype(float))
    np.testing.assert_allclose(output, softmax(logits) @ value, atol=2e-6)


def test_temporary_memory_of_real_programs():
    table = 4 * 128 * 128
    naive = ledger.temporary("additive", "naive", 128, ledger.QUICK)
    assert naive >= 2 * ledger.QUICK.dim * table  # [T, S, A] and its gradient
    assert ledger.temporary("scaled", "tiled", 128, ledger.QUICK) < table


# --- recurrence ---


def test_operations_are_those_of_the_products():
    config = recurrence.Config(turns=1, turn_seconds=0.0)
    d, n = 24, 36
    of_gru, of_attention = (row["operations"] for row in recurrence._measured(d, n, config))
    assert 0 <= of_gru - 12 * n * d**2 <= 30 * n * d  # gates
    assert 0 <= of_attention - 8 * n * d**2 - 4 * n**2 * d <= 10 * n**2 + n * d  # softmax, scale


def test_a_crossing_lies_on_a_line_through_the_logarithms():
    lengths, ones = np.array([1.0, 2, 4, 8]), np.ones(4)
    assert recurrence.crossing(lengths, ones, np.array([2, 0.5, 2, 4])) == pytest.approx(8**0.5)
    assert recurrence.crossing(lengths, ones, np.array([2.0, 2, 2, 4])) == 1
    assert recurrence.crossing(lengths, ones, np.array([0.5, 2, 2, 0.5])) == np.inf
