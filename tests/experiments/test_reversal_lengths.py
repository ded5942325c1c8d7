"""Formulas of local_attention.py and length.py, by hand or by loops."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.centers import monotonic_centers
from attention_jax.functional.local import local_attention_weights, window_mask
from attention_jax.nn.config import ModelConfig
from attention_jax.normalizers import Entmax, LogScaled, Sigmoid, Softmax, get_normalizer
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.sequences import EOS, FIRST, PAD, SOS, TrainConfig
from attention_jax.training.run import TrainedRun
from experiments.reversal import length, length_evaluation, local_attention


def test_the_sum_of_a_row_under_the_gaussian():
    query, key = jnp.zeros((997, 1)), jnp.zeros((13, 1))

    def sums(centers, radius):
        gaussian = {"centers": centers, "radius": radius, "sigma": radius / 2}
        return np.sum(local_attention_weights(query, key, **gaussian), axis=-1)

    on_a_key = sums(jnp.full(997, 6.0), 1)
    np.testing.assert_allclose(on_a_key, (1 + 2 * math.exp(-2)) / 3, rtol=1e-5)
    between_keys = jnp.asarray(6 + (np.arange(997) + 0.5) / 997, jnp.float32)
    formula = math.sqrt(math.pi / 8) * math.erf(math.sqrt(2))
    for radius in (1, 3, 5):
        assert sums(between_keys, radius).mean() == pytest.approx(formula, rel=1e-4)


@pytest.mark.parametrize("radius", [0, 1, 2, 5])
def test_ceilings_count_letters_out_of_sight(radius):
    for size, ceiling in zip(
        local_attention.LENGTHS, local_attention.ceilings(radius), strict=True
    ):
        seen = np.asarray(window_mask(monotonic_centers(size), radius).materialize(size, size))
        wanted = seen[np.arange(size), np.arange(size)[::-1]]
        assert ceiling == pytest.approx((1 / 26) ** (np.sum(~wanted) // 2))
        assert (ceiling == 1) == (size <= radius + 1)


@pytest.mark.parametrize(("experiment", "repeated"), [(local_attention, 0), (length, 4)])
def test_arms_are_different_models_but_for_the_recipe_of_each_part(experiment, repeated):
    tasks = [task for _, task in experiment.Config().arms()]
    assert len(tasks) - len(set(tasks)) == repeated


def test_arms_have_the_normalizers_of_their_names():
    expected = {
        "softmax": [Softmax()] * 2, "softmax, log n": [LogScaled(start=9), LogScaled(start=41)],
        "SSMax": [LogScaled(learned=True)] * 2, "softmax, sink": [Softmax(sink=True)],
        "sigmoid": [Sigmoid()], "entmax 1.5": [Entmax(1.5)] * 2, "sparsemax": [Entmax(2.0)],
    }  # fmt: skip
    found = {}
    for labels, task in length.Config(scores=("dot",)).arms():
        if "normalizer" in labels:
            normalizer = get_normalizer(task.model.normalizer)
            found.setdefault(labels["normalizer"], []).append(normalizer)
            assert f"{task.min_length}-{task.max_length}" == labels["trained"]
    assert found == expected


# --- length_evaluation.py ---


@functools.lru_cache
def untrained(draw="none", source_start=False):
    """Two seeds whose output layers prefer letters, so that some answers are right."""
    model = ModelConfig(
        dim=8, hidden_dim=5, encoder_layers=0, decoder_self_attention=False,
        position_anchor="end", position_draw=draw, position_limit=97,
    )  # fmt: skip
    task = Reversal(model, TrainConfig(seeds=2), letters=2, source_start=source_start)
    params = jax.jit(jax.vmap(task.init))(jax.random.split(jax.random.key(0), 2))
    params["logits"]["bias"] = params["logits"]["bias"].at[:, FIRST : FIRST + 2].add(9.0)
    return TrainedRun(task, params, 0)


def of_every_seed(trained, function):
    """A function of the model, [seed, ...]."""
    return jax.device_get(
        jax.jit(jax.vmap(lambda params: function(trained.task.bind(params))))(trained.params)
    )


def by_loops(trained, batch, tokens_of):
    """The shares of letters and of strings right by seed."""
    shares = []
    for tokens in of_every_seed(trained, tokens_of):
        letters, strings = [], []
        for row, size in enumerate(np.asarray(batch.target_lengths) - 1):
            source = np.asarray(batch.source)[row, trained.task.source_start :][:size]
            letters.append(np.mean([tokens[row, i] == source[size - 1 - i] for i in range(size)]))
            strings.append(letters[-1] == 1 and tokens[row, size] == EOS)
        shares.append((np.mean(letters), np.mean(strings)))
    return np.array(shares).T


def test_letters_right_by_loops_and_of_subsets_of_positions(monkeypatch):
    trained, subsets = untrained(), untrained("subset")
    monkeypatch.setattr(length_evaluation, "LETTERS_PER_CALL", 2 * 63)  # two strings a call
    both = length_evaluation.measured(length_evaluation.letters_right, trained, {5: 5, 40: 40})
    of_subsets = length_evaluation.measured(length_evaluation.letters_right, subsets, {40: 40})
    assert np.any(np.abs(both[40] - of_subsets[40]) > 1e-3)
    found = both[5]
    batch = length_evaluation.random_strings(trained.task, 5, 63, 5)
    assert set(np.asarray(batch.source)[:, :5].ravel()) == {FIRST, FIRST + 1}
    assert np.all(np.asarray(batch.source)[:, 5:] == PAD)
    letters, _ = by_loops(trained, batch, lambda model: jnp.argmax(model(*batch[:3]), axis=-1))
    np.testing.assert_allclose(found, letters, atol=1e-6)
    assert 0.2 < found.min() < found.max() < 0.9


def test_strings_right_by_loops():
    trained = untrained(source_start=True)
    found = length_evaluation.measured(length_evaluation.strings_right, trained, {1: 11, 2: 11})
    batch = length_evaluation.random_strings(trained.task, 2, 63, 11)
    ends = {"max_length": 64, "sos": SOS, "eos": EOS, "pad": PAD}
    _, strings = by_loops(trained, batch, lambda m: m.greedy_decode(*batch[:2], **ends).tokens)
    np.testing.assert_allclose(found[2], strings, atol=1e-6)
    assert list(found) == [1, 2]


def test_the_weight_of_the_right_key_by_loops():
    """Of weights that do not sum to 1; the row that writes EOS has SOS as its key."""
    trained, measure = untrained(source_start=True), length_evaluation.weight_of_right_key
    model = dataclasses.replace(trained.task.model, normalizer="sigmoid")
    trained = dataclasses.replace(trained, task=dataclasses.replace(trained.task, model=model))
    found = length_evaluation.measured(measure, trained, {3: 4})[3]
    batch = length_evaluation.random_strings(trained.task, 3, 63, 4)
    weights = of_every_seed(trained, lambda model: model(*batch[:3], return_weights=True)[1])
    for share, by_string in zip(found, weights[:, 0, :, :4].astype(float), strict=True):
        shares = [row[i, 3 - i] / row[i].sum() for row in by_string for i in range(4)]
        assert share == pytest.approx(np.mean(shares), abs=1e-5)
