"""length_evaluation.py against loops, and both length experiments with tiny settings."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.nn.config import ModelConfig
from attention_jax.scores import Score
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from attention_jax.training.run import TrainedRun
from attention_jax.training.task import TrainConfig
from experiments.reversal import length_ablations, length_evaluation, length_generalization
from experiments.reversal.length_evaluation import (
    FIRST_LETTER,
    free_running,
    share_of_right_key,
    strings_right,
    teacher_forced,
    weights_on,
)

RESULTS = Path(__file__).parents[2] / "experiments" / "reversal"


@dataclasses.dataclass(frozen=True)
class Nearness(Score):
    """A user's own score."""

    def pair(self, params, q_features, k_features):
        return -jnp.abs(q_features[:, None] - k_features[None]).mean(-1)


@functools.lru_cache
def untrained(draw="none", source_start=False):
    """Two seeds whose output layers prefer letters, so that some answers are right."""
    model = ModelConfig(
        dim=8,
        hidden_dim=5,
        encoder_layers=0,
        decoder_self_attention=False,
        position_anchor="end",
        position_draw=draw,
        position_limit=97,
    )
    config = Reversal(model, TrainConfig(seeds=2), letters=2, source_start=source_start)
    params = jax.jit(jax.vmap(config.init))(jax.random.split(jax.random.key(0), 2))
    bias = params["logits"]["bias"]
    params["logits"]["bias"] = bias.at[:, FIRST_LETTER : FIRST_LETTER + 2].add(9.0)
    return TrainedRun(config, params, 0)


def naive(trained, batch, tokens_of):
    """Returns the shares of letters and of strings right by seed, computed in loops."""

    @jax.jit
    def tokens_of_seed(params):
        return tokens_of(trained.task.bind(params), batch)

    shares, params = [], jax.device_get(trained.params)
    for seed in range(2):
        params_of_seed = jax.tree.map(lambda leaf, seed=seed: leaf[seed], params)
        tokens = np.asarray(tokens_of_seed(params_of_seed))
        letters, strings = [], []
        for row, length in enumerate(np.asarray(batch.target_lengths) - 1):
            source = np.asarray(batch.source)[row, -batch.targets.shape[1] + 1 :][:length]
            letters.append(
                np.mean([tokens[row, i] == source[length - 1 - i] for i in range(length)])
            )
            strings.append(letters[-1] == 1 and tokens[row, length] == EOS)
        shares.append((np.mean(letters), np.mean(strings)))
    return np.array(shares).T


def batch_of(length, width, count, source_start=False):
    config = untrained(source_start=source_start).task
    return length_evaluation._strings(config, length, width, count, 0)


def test_strings_are_of_the_first_letters_and_padded():
    batch = batch_of(5, 8, 64)
    source = np.asarray(batch.source)
    assert set(source[:, :5].ravel()) == {FIRST_LETTER, FIRST_LETTER + 1}
    assert np.all(source[:, 5:] == PAD)
    np.testing.assert_array_equal(batch.targets[:, :5], source[:, 4::-1])
    assert np.all(np.asarray(batch.targets)[:, 5] == EOS)


def test_teacher_forced_accuracy_by_loops(monkeypatch):
    trained = untrained()
    monkeypatch.setattr(length_evaluation, "LETTERS_PER_CALL", 2 * 63)  # two strings a call
    tokens, exact = teacher_forced(trained, [5], strings=5)[5]

    def answer(model, batch):
        return jnp.argmax(model(*batch[:3]), axis=-1)

    np.testing.assert_allclose(
        (tokens, exact), naive(trained, batch_of(5, 63, 5), answer), atol=1e-6
    )
    assert 0.2 < tokens.min() < tokens.max() < 0.9


@pytest.mark.parametrize("source_start", [False, True])
def test_free_running_accuracy_by_loops(source_start):
    trained = untrained(source_start=source_start)
    found = free_running(trained, [5, 7], strings={5: 3, 7: 11})

    def answer(model, batch):
        ends = {"max_length": 8, "sos": SOS, "eos": EOS, "pad": PAD}
        return model.greedy_decode(*batch[:2], **ends).tokens

    batch = batch_of(7, 7, 11, source_start)
    assert batch.source.shape == (11, 7 + source_start)
    np.testing.assert_allclose(found[7], naive(trained, batch, answer), atol=1e-6)
    assert list(found) == [5, 7]


def test_strings_of_several_lengths_in_two_batches(monkeypatch):
    """1 and 2 are padded to 2, and 8 and 9 to 9; each length has the strings of its own seed."""
    widths = []

    def odd_strings(model, params, batch):
        """Strings whose ids have an odd sum are right; for the second seed the others."""
        widths.append(batch.targets.shape[1] - 1)
        odd = jnp.sum(batch.source, axis=1) % 2
        return None, jnp.stack([odd, 1 - odd])

    monkeypatch.setattr(length_evaluation, "_free", odd_strings)
    trained, counts = untrained(source_start=True), {2: 40, 9: 5, 1: 30, 8: 3}
    found = strings_right(trained, counts)
    assert widths == [2, 9]
    assert list(found) == list(counts)
    for length, count in counts.items():
        width = 2 if length <= 2 else 9
        batch = length_evaluation._strings(trained.task, length, width, count, 0)
        assert np.all(np.asarray(batch.source_lengths) == length + 1)
        odd = np.mean(np.sum(batch.source, axis=1) % 2)
        np.testing.assert_allclose(found[length], (odd, 1 - odd), atol=1e-6)
    assert len({float(shares[0]) for shares in found.values()}) == 4


def test_the_share_of_the_right_key_by_loops():
    """For weights that do not sum to 1, too; the row that writes EOS has SOS as its key."""
    trained = untrained(source_start=True)
    for normalizer in ("softmax", "sigmoid"):
        model = dataclasses.replace(trained.task.model, normalizer=normalizer)
        config = dataclasses.replace(trained.task, model=model)
        found = share_of_right_key(dataclasses.replace(trained, task=config), {3: 2, 5: 4})
        for length, count in ((3, 2), (5, 4)):
            batch = length_evaluation._strings(config, length, 5, count, 0)
            for seed in range(2):
                params = jax.tree.map(lambda leaf, seed=seed: leaf[seed], trained.params)
                _, weights = config.bind(params)(*batch[:3], return_weights=True)
                shares = [
                    weights[0, row, i, length - i] / np.sum(weights[0, row, i])
                    for row in range(count)
                    for i in range(length + 1)
                ]
                assert found[length][seed] == pytest.approx(np.mean(shares), abs=1e-5)


def test_models_trained_on_subsets_get_a_subset():
    plain, subset = (weights_on(untrained(draw), 7) for draw in ("none", "subset"))
    assert plain.shape == subset.shape == (8, 7)
    np.testing.assert_allclose(subset.sum(-1), 1, atol=1e-6)
    assert np.max(np.abs(plain - subset)) > 1e-3


# --- the experiments ---


def untrained_arm(config, folder):
    """Stands for `trained_arm`: checks that the arm has a loss, and returns the small model."""
    task, rng = config, jax.random.key(0)
    loss = jax.eval_shape(lambda rng: task.loss(task.init(rng), task.batch(rng, size=2), rng), rng)
    assert all(leaf.shape == () for leaf in jax.tree.leaves(loss))
    return untrained(), {}


def test_two_scores_with_tiny_settings(tmp_path, monkeypatch):
    # Lengths of one width, and of a length that the tests above have, share their programs.
    monkeypatch.setattr(length_generalization, "trained_arm", untrained_arm)
    monkeypatch.setattr(length_generalization, "PROTOCOL", range(41, 63))
    monkeypatch.setattr(length_generalization, "DRAWN_LENGTH", 7)
    scores = ("scaled", f"{__name__}:Nearness")
    config = dataclasses.replace(
        length_generalization.QUICK, scores=scores, far=(5,), far_strings=(3,), every=20, dim=8,
        batch_size=2, workdir=tmp_path / "runs",
    )  # fmt: skip
    numbers = {"config": dataclasses.asdict(config), **length_generalization.run(config)}
    assert tuple(numbers["arms"]["26"]) == scores
    for arm in numbers["arms"]["26"].values():
        assert list(arm["tokens"]) == ["41", "61"]
        assert list(arm["exact"]) == ["5"]
        assert arm["weights"]["shape"] == [8, 7]
        assert list(arm["memory_mib"]) == ["5"]
        by_hand = np.mean([arm["tokens"][n] for n in ("41", "61")], axis=0)
        np.testing.assert_allclose(arm["mean_tokens"], by_hand, atol=2e-6)
    assert set(length_generalization.plot(numbers)) == set(length_generalization.CAPTIONS)
    claims = [found.claim for found in length_generalization.expectations(numbers)]
    # There were expectations for the accuracy of named scores, and of the best one.
    about_mine = [claim for claim in claims if claim.startswith(scores[1])]
    assert about_mine == [f"{scores[1]}: MiB of temporary memory for a string of 5 letters"]
    assert not all(found.met for found in length_generalization.expectations(numbers))
    report = length_generalization.report(numbers)
    assert all(f"| {score} |" in report for score in scores)


def test_neighbouring_lengths_are_averaged():
    by_length = {length: np.array([length, -length]) / 1000 for length in range(41, 501)}
    binned = length_generalization.binned(by_length)
    assert len(binned) == 20
    # The first of the bins holds 41 to 63, and the last 478 to 500.
    assert binned["52"] == [0.052, -0.052]
    assert binned["489"] == [0.489, -0.489]
    assert length_generalization.binned({7: np.array([0.5])}) == {"7": [0.5]}


def test_small_weights_are_left_out():
    weights = np.array([[0.02, 0.98], [0.5, 0.5]])
    kept = length_generalization.sparse(weights)
    assert kept == {
        "shape": [2, 2], "rows": [0, 1, 1], "columns": [1, 0, 1], "weights": [0.98, 0.5, 0.5],
    }  # fmt: skip


@pytest.mark.slow
def test_parts_of_the_recipe_with_tiny_settings(tmp_path):
    part = "size of logits, scaled dot"
    config = length_ablations.Config(
        parts=(part,), seeds=2, steps=2, lengths=(3, 5), strings=2, dim=8, batch_size=2,
        workdir=tmp_path / "runs",
    )  # fmt: skip
    numbers = {"config": dataclasses.asdict(config), **length_ablations.run(config)}
    arms = numbers["parts"][part]
    assert list(arms) == list(length_ablations.PARTS[part])
    assert np.shape(arms["learned factor"]["tokens"]["5"]) == (2,)
    assert set(length_ablations.plot(numbers)) == set(length_ablations.CAPTIONS)
    assert "| learned factor |" in length_ablations.report(numbers)


def committed(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_report_shows_how_far_strings_are_reversed():
    numbers = committed("length_generalization")
    report = length_generalization.report(numbers)
    assert all(len(arms) == 4 for arms in numbers["arms"].values())
    for score, arm in numbers["arms"]["26"].items():
        (row,) = [
            line for line in report.split("2 letters:")[0].splitlines() if f"| {score} |" in line
        ]
        assert row.startswith(f"| {score} | {100 * np.mean(arm['mean_tokens']):.3f} ± ")
        shares = [f"{100 * np.mean(shares):.1f}" for shares in arm["exact"].values()]
        assert row.endswith(f" | {' | '.join(shares)} |")


def test_the_findings_about_the_parts_have_measured_numbers():
    numbers = committed("length_ablations")
    report = length_ablations.report(numbers)
    assert report.count("\n- **") == 5
    seen = numbers["parts"]["which positions are seen in training"]["0, 1, 2, ..."]["tokens"]
    assert f"the model has {100 * np.mean(seen['500']):.0f} % at length 500" in report
    del numbers["parts"]["other attention"]
    assert length_ablations.report(numbers).count("\n- **") == 4


@pytest.mark.parametrize(
    ("part", "arm", "length", "shares"),
    [
        ("where the source is counted from", "its end", "500", [0.9]),
        ("where the source is counted from", "its start", "500", [0.3]),
        ("which positions are seen in training", "0, 1, 2, ...", "500", [1.1]),
        ("size of logits, additive", "as they are", "5000", [1.1]),
    ],
)
def test_claims_that_other_numbers_would_miss(part, arm, length, shares):
    numbers = committed("length_ablations")
    before = {found.claim for found in length_ablations.expectations(numbers) if not found.met}
    numbers["parts"][part][arm]["tokens"][length] = shares * 3
    after = {found.claim for found in length_ablations.expectations(numbers) if not found.met}
    assert len(after - before) == 1
    assert f"{part}: {arm}" in (after - before).pop()


def test_every_arm_is_a_model():
    config = length_ablations.Config()
    trainings = [
        config.training(arm) for arms in length_ablations.PARTS.values() for arm in arms.values()
    ]
    assert len(set(trainings)) == len(trainings) - (len(length_ablations.PARTS) - 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"far": (5,), "far_strings": (1, 2)}, "far_strings must be one for each of far"),
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"every": 0}, "every must be at least 1; got 0"),
        ({"alphabets": (27,)}, "letters must be from 1 to 26; got 27"),
        ({"scores": ("scaled", "dott")}, "score must be one of .*; did you mean 'dot'"),
        ({"dim": 7}, "dim must be .*; got 7"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        length_generalization.Config(**settings)


def test_an_unknown_part():
    with pytest.raises(ValueError, match="parts must be of 'where the source is counted from'"):
        length_ablations.Config(parts=("noise",))
