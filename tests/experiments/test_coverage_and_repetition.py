"""coverage_and_repetition.py: its counts by hand, and the committed numbers."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.scores import Score
from experiments.experiment import conduct
from experiments.reversal import coverage_and_repetition as experiment
from experiments.reversal.strings import batch_of_words

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = EXPERIMENTS / "reversal"
B, T, S = 3, 7, 5
PLAIN, LOSS = experiment.PLAIN, experiment.IN_LOSS
looked_twice = jax.jit(experiment.looked_twice)
LEARNED = (
    "after training, with",
    "the coverage loss lowers",
    "exact match at trained lengths",
    "cross entropy of longer strings",
)  # claims that a few steps of training do not bear out


@dataclasses.dataclass(frozen=True)
class Nearness(Score):
    """A user's own score."""

    def pair(self, params, q_features, k_features):
        return -jnp.abs(q_features[:, None] - k_features[None]).mean(-1)


@pytest.fixture(scope="module")
def committed():
    return json.loads((RESULTS / "coverage_and_repetition.json").read_text())


def stuck_decoder_by_hand(kernel):
    """Weights, coverage and loss by §38.8's formulas as they stand, one key after another."""
    coverage = [0.0] * len(experiment.KEYS)
    weights, losses = [], []
    for _ in range(experiment.STEPS):
        logits = [
            experiment.V * math.tanh(experiment.QUERY + key + kernel * covered)
            for key, covered in zip(experiment.KEYS, coverage, strict=True)
        ]
        normalizer = sum(math.exp(logit) for logit in logits)
        row = [math.exp(logit) / normalizer for logit in logits]
        losses.append(sum(min(w, c) for w, c in zip(row, coverage, strict=True)))
        coverage = [c + w for w, c in zip(row, coverage, strict=True)]
        weights.append(row)
    named = {"weights": weights, "coverage": coverage, "loss": losses}
    return {name: np.array(values) for name, values in named.items()}


def test_stuck_decoder_on_paper():
    # The first row is softmax(10 tanh(0.8), ...); where nothing is remembered each row is that row.
    exps = np.exp(10 * np.tanh([0.8, 0.4, 0.0, -0.4]))
    plain = stuck_decoder_by_hand(0.0)
    np.testing.assert_allclose(plain["weights"], np.tile(exps / exps.sum(), (4, 1)))
    np.testing.assert_allclose(plain["loss"], [0, 1, 1, 1])
    # With a kernel the second row has 10 tanh(k + w a), a the first row.
    first = exps / exps.sum()
    logits = 10 * np.tanh(np.array([0.8, 0.4, 0.0, -0.4]) - 2 * first)
    second = np.exp(logits) / np.exp(logits).sum()
    moved = stuck_decoder_by_hand(-2.0)
    np.testing.assert_allclose(moved["weights"][1], second)
    assert moved["loss"][1] == pytest.approx(np.minimum(first, second).sum())


def test_the_stuck_decoder_of_the_committed_numbers_by_hand(committed):
    for decoder in committed["stuck"]:
        for name, expected in stuck_decoder_by_hand(decoder["kernel"]).items():
            np.testing.assert_allclose(decoder[name], expected, atol=1e-5)  # five digits are kept


def test_looking_twice_against_loops():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(S, 0.3), size=(B, T))
    lengths = np.array([2, 7, 4])
    losses, excess = [], []
    for rows, length in zip(weights, lengths, strict=True):
        coverage, loss = np.zeros(S), 0.0
        for row in rows[:length]:
            loss += sum(min(w, c) for w, c in zip(row, coverage, strict=True))
            coverage += row
        losses.append(loss)
        excess.append(sum(max(0.0, c - 1) for c in coverage))
    found = looked_twice(weights.astype(np.float32), lengths.astype(np.int32))
    assert float(found["coverage_loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(found["excess"]) == pytest.approx(np.mean(excess), rel=1e-5)


@pytest.mark.parametrize("last", [0, 3])
def test_each_letter_once_and_one_query_more_is_the_floor(last):
    rows = [*np.eye(S)[::-1], np.eye(S)[last]]
    found = looked_twice(np.array([rows], np.float32), np.array([S + 1], np.int32))
    assert float(found["coverage_loss"]) == float(found["excess"]) == 1


def test_no_attention_is_below_the_floor():
    rng = np.random.default_rng(1)
    for sharpness in (0.01, 0.1, 1, 10):
        weights = rng.dirichlet(np.full(S, sharpness), size=(40, S + 1)).astype(np.float32)
        for row in weights:
            found = looked_twice(row[None], np.array([S + 1], np.int32))
            assert min(map(float, found.values())) >= 1 - 1e-5


@pytest.mark.parametrize(
    ("word", "answer", "repeated", "written"),
    [
        ("abc", "cba", 0, 3),
        ("abc", "ccb", 1, 3),
        ("abca", "acba", 0, 4),  # twice, as in the right answer
        ("abca", "aaaa", 2, 4),
        ("abc", "xyx", 1, 3),  # no letter of the word, but twice
        ("abc", "xyz", 0, 3),  # wrong, and nothing twice
    ],
)
def test_letters_written_once_too_often(word, answer, repeated, written):
    batch, answer_batch = (batch_of_words([w], source_start=False) for w in (word, answer[::-1]))
    answers = answer_batch.targets
    found = jax.jit(experiment.repeated_letters)(answers, batch)
    assert float(found) == pytest.approx(repeated / written)


def test_nothing_written_is_nothing_repeated():
    batch = batch_of_words(["abc"], source_start=False)
    answers = jnp.array([[2, 0, 0, 0]])
    assert float(jax.jit(experiment.repeated_letters)(answers, batch)) == 0


def test_no_look_at_a_model_is_below_the_floor(committed):
    for arms in committed["arms"].values():
        for arm in arms.values():
            for looks in arm.values():
                assert np.min(looks["coverage_loss"]) >= 1 - 1e-3
                assert np.min(looks["excess"]) >= 1 - 1e-3


def test_the_report_has_the_numbers_of_the_last_look(committed):
    text = experiment.report(committed)
    for arm, measured in committed["arms"]["additive"].items():
        loss = np.mean(measured["trained lengths"]["coverage_loss"][-1])
        assert f"| additive | {arm} | {loss:.3f} |" in text


def test_committed_numbers_meet_what_is_expected(committed):
    found = experiment.expectations(committed)
    assert [str(one) for one in found if not one.met] == []
    assert all(any(part in one.claim for one in found) for part in LEARNED)
    assert list(experiment.plot(committed)) == list(experiment.CAPTIONS)


@pytest.mark.parametrize(
    ("claim", "path", "value"),
    [
        ("the stuck decoder", ("stuck", 0, "loss"), [0, 0.1, 0.1, 0.1]),
        ("additive: coverage loss per string", (LOSS, "trained lengths", "coverage_loss"), [1.2]),
        ("additive: the coverage loss lowers the share", (PLAIN, "longer", "repeated"), [0.0]),
        ("additive: exact match at trained", (PLAIN, "trained lengths", "exact_match"), [0.9]),
        ("additive: exact match of longer", (LOSS, "longer", "exact_match"), [0.1]),
        ("additive: cross entropy of longer", (LOSS, "longer", "cross_entropy"), [0.1]),
    ],
)
def test_other_numbers_do_not(committed, claim, path, value):
    changed = copy.deepcopy(committed)
    *parents, last = path
    if last != "loss":  # of the stuck decoder; the others are one number per look and seed
        parents, value = ["arms", "additive", *parents], [value * 3]
    place = changed
    for name in parents:
        place = place[name]
    place[last] = value
    (found,) = [one for one in experiment.expectations(changed) if one.claim.startswith(claim)]
    assert not found.met


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": (0.0,)}, "kernels must be 0 and then one or more below it"),
        ({"kernels": (0.0, 1.0)}, "kernels must be 0 and then"),
        ({"kernels": (-1.0, -2.0)}, "kernels must be 0 and then"),
        ({"seeds": 1}, "seeds must be at least 2; got 1"),
        ({"strings": 0}, "strings must be at least 1; got 0"),
        ({"steps": 7}, "steps must be a multiple of look_every 50; got 7"),
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"scores": ("additive", "dott")}, "score must be one of .*; did you mean 'dot'"),
        ({"learning_rate": 0.0}, "learning_rate must be greater than 0; got 0.0"),
        ({"far_length": 8}, "far_length must be at least 9; got 8"),
    ],
)
def test_mistakes_before_anything_is_computed(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)


@pytest.mark.slow
def test_a_run_with_two_scores(tmp_path):
    scores = ("additive", f"{__name__}:Nearness")
    config = dataclasses.replace(experiment.QUICK, scores=scores, dim=8, batch_size=4)
    conduct(experiment, config, tmp_path)
    numbers = json.loads((tmp_path / "coverage_and_repetition.json").read_text())
    missed = [one.claim for one in experiment.expectations(numbers) if not one.met]
    assert [claim for claim in missed if not any(part in claim for part in LEARNED)] == []
    assert tuple(numbers["arms"]) == scores
    text = experiment.report(numbers)
    for score, arms in numbers["arms"].items():
        assert f"| {score} | {PLAIN} |" in text
        for arm in arms.values():
            for seen in arm.values():
                assert {np.shape(values) for values in seen.values()} == {(3, 2)}
        # The arms begin as the same model, but for coverage, whose kernel begins at 0.
        first = [arm["longer"]["cross_entropy"][0] for arm in arms.values()]
        np.testing.assert_allclose(first, np.broadcast_to(first[0], np.shape(first)), rtol=1e-4)
