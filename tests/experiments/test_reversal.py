"""The experiments on reversal: their models, scores and counts against independent numbers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_model import PAIRS
from oracles import softmax

from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import EOS, PAD
from attention_jax.training.task import TrainConfig
from experiments.reversal import coverage, gru_padding
from experiments.reversal import scale_and_dimension as scale
from experiments.reversal.arms import AtRate

B, S, T, E, H = 3, 7, 5, 11, 13
LENGTHS = np.array([7, 2, 5])
SCORES = ("additive", "general")  # those with parameters


# --- gru_padding ---


@pytest.mark.parametrize("score", SCORES)
def test_the_gru_is_that_of_the_chapter(score):
    rng = np.random.default_rng(3)
    source, target_inputs = rng.integers(1, 29, (B, S)), rng.integers(1, 29, (B, T))
    source[np.arange(S) >= LENGTHS[:, None]] = PAD
    config = gru_padding.Config()
    tasks = [config.task(gru_padding.GRU, score, mask=mask) for mask in (False, True)]
    tasks = [dataclasses.replace(task, embedding_dim=E, hidden_dim=H) for task in tasks]
    params = jax.jit(tasks[0].init)(jax.random.key(5))
    arrays = params, jnp.asarray(source), jnp.asarray(LENGTHS), jnp.asarray(target_inputs)
    bare, masked = (jax.jit(task.logits)(*arrays) for task in tasks)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for logits, lengths in ((bare, [S] * B), (masked, LENGTHS)):
        expected = numpy_logits(wide, source, target_inputs, lengths)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(bare - masked).max() > 1e-3


def test_initial_parameters_are_distributed_as_in_pytorch():
    tasks = [gru_padding.Config().task(gru_padding.GRU, s, mask=True) for s in SCORES]
    with jax.default_prng_impl("rbg"):  # which compiles quickly
        additive, params = jax.device_get([jax.jit(t.init)(jax.random.key(5)) for t in tasks])
    kernels = [additive["score"][name] for name in ("query_kernel", "key_kernel")]
    # A linear layer or GRU: uniform up to 1 / sqrt(fan-in), or 1 / sqrt(H).
    for arrays, bound in (
        (params["encoder"].values(), 96**-0.5),
        (params["decoder"].values(), 96**-0.5),
        (params["logits"].values(), 192**-0.5),
        (kernels, 192**-0.5),
        ([additive["score"]["v"]], 96**-0.5),
    ):
        for array in arrays:
            assert np.abs(array).max() <= bound
            assert np.std(array) == pytest.approx(bound / 3**0.5, rel=0.25)
    assert np.std(params["source_embedding"]) == pytest.approx(1, rel=0.1)
    assert np.std(params["score"]["kernel"]) == pytest.approx(0.1, rel=0.05)  # 0.1 randn(H, H)


# --- scale_and_dimension ---

D = 12
SIZES = {"ADDITIVE": 2 * D * D + D, "DOT": 0, "GENERAL": D * D}


@pytest.mark.parametrize("name", SIZES)
def test_scores_are_their_formulas_times_a_factor_without_gradient(name):
    score, rng = getattr(scale, name), np.random.default_rng(0)
    query, key = rng.normal(size=(T, D)), rng.normal(size=(S, D))

    @jax.jit
    def logits_and_gradient(query, key):
        params = {**score.init(jax.random.key(3), D, D), "factor": jnp.float32(-2.5)}
        total = jax.grad(lambda params: jnp.sum(score(params, query, key) ** 2))
        return params, score(params, query, key), total(params)["factor"]

    params, logits, slope = logits_and_gradient(*(np.float32(x) for x in (query, key)))
    arrays = {part: np.asarray(leaf, np.float64) for part, leaf in params["score"].items()}
    expected = -2.5 * PAIRS[name.lower()](arrays, query[:, None], key[None])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert float(slope) == 0
    assert sum(leaf.size for leaf in arrays.values()) == SIZES[name]


def test_a_traced_rate_is_the_rate_of_the_configuration():
    task = Reversal(train=TrainConfig(learning_rate=3e-3, steps=7, weight_decay=0.3))
    params = {"x": jnp.array([1.0, -2.0, 0.5])}

    @functools.partial(jax.jit, static_argnums=0)
    def steps(optimizer_at, rate):
        optimizer, moved = optimizer_at(rate), params
        state = optimizer.init(params)
        for step in range(3):
            gradients = {"x": np.array([0.3, -4.0, 2.0], np.float32) * np.float32(step - 1.5)}
            updates, state = optimizer.update(gradients, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved["x"]

    with jax.numpy_dtype_promotion("standard"):
        expected = steps(lambda _: task.optimizer(), 1.0)
        found = steps(lambda rate: AtRate(task, rate).optimizer(), 3e-3)
    assert not np.allclose(expected, params["x"], atol=1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- coverage ---


@pytest.mark.parametrize("kernel", [0.0, -2.0])
def test_the_stuck_decoder_by_the_formulas_of_the_chapter(kernel):
    covered, losses, weights = [0.0] * 4, [], []
    for _ in range(4):
        exps = [
            math.exp(10 * math.tanh(key + kernel * cov))
            for key, cov in zip(coverage.KEYS, covered, strict=True)
        ]
        row = [each / sum(exps) for each in exps]
        losses.append(sum(map(min, row, covered)))
        covered = [cov + weight for cov, weight in zip(covered, row, strict=True)]
        weights.append(row)
    found = coverage.stuck_decoder(kernel)
    for name, expected in (("weights", weights), ("loss", losses), ("coverage", covered)):
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)


def test_the_coverage_loss_of_a_string_has_a_floor_of_1():
    rng, loss = np.random.default_rng(1), jax.jit(coverage.loss_per_string)
    lengths = np.array([S + 1, S + 1, 3])
    weights = np.float32(rng.dirichlet(np.full(S, 0.3), size=(3, S + 1)))
    expected = []
    for rows, length in zip(weights, lengths, strict=True):
        before = np.concatenate([np.zeros((1, S)), np.cumsum(rows, axis=0)])[:length]
        expected.append(np.minimum(rows[:length], before).sum())
    assert float(loss(weights, lengths)) == pytest.approx(np.mean(expected), rel=1e-5)
    assert min(expected[:2]) >= 1
    once = np.float32([[*np.eye(S)[::-1], np.eye(S)[3]]])  # each letter once, and EOS anywhere
    assert float(loss(once, lengths[:1])) == 1


@pytest.mark.parametrize(
    ("right", "answer", "repeated"),
    [
        ("cba", "cba", 0),
        ("cba", "ccb", 1 / 3),
        ("acba", "acba", 0),  # twice, as in the right answer
        ("acba", "aaaa", 2 / 4),
        ("cba", "xyx", 1 / 3),  # no letter of the right answer, but twice
        ("cba", "xyz", 0),  # wrong, and nothing twice
        ("cba", "", 0),
    ],
)
def test_letters_written_once_too_often(right, answer, repeated):
    ids = ([*Reversal.vocabulary.encode(text), EOS, *[PAD] * 4][:5] for text in (answer, right))
    found = jax.jit(coverage.repeated_letters)(*(np.array([row]) for row in ids))
    assert float(found) == pytest.approx(repeated)


def gru(x, h, params):
    """One step of Cho et al. 2014; gates in the order reset, update, new."""
    of_x = np.split(x @ params["input_kernel"] + params["input_bias"], 3)
    of_h = np.split(h @ params["state_kernel"] + params["state_bias"], 3)
    reset, update = (1 / (1 + np.exp(-(of_x[n] + of_h[n]))) for n in (0, 1))
    return (1 - update) * np.tanh(of_x[2] + reset * of_h[2]) + update * h


def numpy_logits(params, source, target_inputs, lengths):
    """The model's logits [B, T, V], row by row.

    Args:
        params: the parameters, in float64.
        source: int [B, S].
        target_inputs: int [B, T].
        lengths: how many tokens of each row of `source` the decoder may attend to.
    """
    embeddings = [params[f"{side}_embedding"].copy() for side in ("source", "target")]
    for table in embeddings:
        table[PAD] = 0
    start, logits = np.zeros(len(params["decoder"]["state_kernel"])), []
    pair = PAIRS["general" if "kernel" in params["score"] else "additive"]
    for row, inputs, length in zip(source, target_inputs, lengths, strict=True):
        h, memory = start, []
        for token in row:
            h = gru(embeddings[0][token], h, params["encoder"])
            memory.append(h)
        h = start
        for token in inputs:
            seen = np.array(memory[:length])
            context = softmax(pair(params["score"], h, seen)) @ seen
            h = gru(np.concatenate([embeddings[1][token], context]), h, params["decoder"])
            both = np.concatenate([h, context])
            logits.append(both @ params["logits"]["kernel"] + params["logits"]["bias"])
    return np.reshape(logits, (*target_inputs.shape, -1))
