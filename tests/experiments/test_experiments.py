"""attention_family.py and rollout.py: settings, numbers and figures, on tiny runs."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.tasks.reversal.evaluation import batch_of_words
from attention_jax.training.loop import LoopConfig
from experiments.experiment import conduct
from experiments.reversal import attention_family as family
from experiments.reversal import rollout
from experiments.reversal.attention_family_report import EXPECTED_TO_FAIL, MUST_FAIL

NAME = "no encoder, local-m, diagonal"


def small(module, tmp_path, **settings):
    config = dataclasses.replace(module.Config(), steps=2, strings=3, word="abc")
    config = dataclasses.replace(config, workdir=tmp_path / "runs")
    return dataclasses.replace(config, **settings)


@pytest.mark.slow
def test_family_trains_evaluates_and_draws_arms(tmp_path, monkeypatch, capsys):
    (tmp_path / "scores_of_a_family.py").write_text(
        "from attention_jax.scores import Dot\n\n\nclass Own(Dot):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scores = ("cosine", "scores_of_a_family:Own")
    config = small(family, tmp_path, scores=scores, arms=(NAME,), seeds=2, beams=2)
    conduct(family, config, tmp_path)
    numbers = json.loads((tmp_path / "attention_family.json").read_text())
    assert list(numbers["arms"]) == [*scores, NAME]
    claims = [check.claim.split(":")[0] for check in family.expectations(numbers)]
    assert claims == ["cosine", NAME]
    arm = numbers["arms"][NAME]
    assert list(arm["accuracy"]["free_running_exact"]) == ["3", "4", "5", "6", "7", "8", "10"]
    assert list(arm["accuracy_beam"]["free_running_exact"]) == ["3", "4", "5", "6", "7", "8"]
    assert arm["settings"] == {
        "encoder-layers": 0, "attention": "local-m", "alignment": "monotonic",
    }  # fmt: skip
    # Each letter written looks at most 2 positions from its own.
    for row, weights in enumerate(arm["weights"]):
        np.testing.assert_allclose(sum(weights), 1, atol=1e-3)
        assert all(abs(key - row) <= 2 for key in np.flatnonzero(weights))
    assert (tmp_path / "attention_family.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"{NAME} (must fail)" in printed
    assert "| scores_of_a_family:Own | `--score scores_of_a_family:Own` |" in printed
    assert "--encoder-layers 0 --attention local-m --alignment monotonic" in printed


def test_every_arm_is_a_model_that_can_be_made():
    config = family.Config()
    models = {arm: config.training(arm).model for arm in (*config.scores, *family.ARMS)}
    assert len(set(models.values())) == len(family.ARMS) + 4
    assert {model.cross_attention.attention for model in models.values()} >= {
        "global", "local-m", "local-p", "coverage", "monotonic",
    }  # fmt: skip
    assert {*MUST_FAIL, *EXPECTED_TO_FAIL, *family.DRAWN} <= set(family.ARMS)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (family, {"arms": ("locl-m",)}, "arms must be of heads 4, .*; got 'locl-m'"),
        (family, {"arms": (), "scores": ()}, "arms or scores must be at least one; got none"),
        (family, {"scores": ("dott",)}, "dott"),
        (family, {"dim": 66}, "dim must be a multiple of 4 heads; got 66"),
        (family, {"beams": 0}, "beams must be at least 1; got 0"),
        (rollout, {"word": "a"}, "word must have at least two letters; got 'a'"),
        (rollout, {"num_heads": 5}, "dim must be a multiple of 5 heads; got 64"),
        (rollout, {"strings": 0}, "strings must be at least 1; got 0"),
    ],
)
def test_mistakes_before_anything_is_trained(module, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small(module, tmp_path, **settings)


@pytest.mark.slow
def test_rollout_numbers_are_means_of_what_was_seen(tmp_path, monkeypatch):
    config = small(rollout, tmp_path, seeds=1, encoder_layers=2, num_heads=2)
    training = dataclasses.replace(
        config.training(), batch_size=2, loop=LoopConfig(seeds=1, steps=2)
    )
    monkeypatch.setattr(rollout.Config, "training", lambda self: training)
    conduct(rollout, config, tmp_path)
    numbers = json.loads((tmp_path / "rollout.json").read_text())
    assert numbers["largest_row_sum_error"] < 1e-5
    assert np.shape(numbers["sharpness"]) == np.shape(numbers["spread"]) == (1, 2, 2)
    assert np.shape(numbers["own_letter"]) == (1, 2)
    word = {name: np.array(value)[0] for name, value in numbers["word"].items()}
    assert word["encoder"].shape == (2, 2, 3, 3)
    # The rollout of the drawn word, by hand.
    first, second = (0.5 * layer.mean(0) + 0.5 * np.eye(3) for layer in word["encoder"])
    np.testing.assert_allclose(word["rollouts"][1], second @ first, atol=2e-4)
    np.testing.assert_allclose(word["cross_rollout"], word["cross"] @ second @ first, atol=2e-4)
    assert list(rollout.plot(numbers)) == list(rollout.CAPTIONS) == ["rollout_heads", "rollout"]
    assert [expectation.met for expectation in rollout.expectations(numbers)][:1] == [True]
    assert "of 4 encoder heads" in rollout.report(numbers)


def test_rollout_counts_heads_that_align_and_heads_that_spread():
    uniform, diagonal = np.full((3, 3), 1 / 3), np.eye(3)
    seen = {
        "encoder": np.stack([uniform, diagonal])[None, None, None],  # one seed, string and layer
        "rollouts": (0.5 * np.eye(3) + 0.25 * (uniform + diagonal))[None, None, None],
        "cross": diagonal[::-1][None, None],
        "cross_rollout": uniform[None, None],
    }
    numbers = rollout._numbers({name: jnp.asarray(array) for name, array in seen.items()}, 3)
    np.testing.assert_allclose(numbers["sharpness"], [[[1 / 3, 1.0]]], atol=1e-3)
    np.testing.assert_allclose(numbers["spread"], [[[1.0, 0.0]]], atol=1e-3)
    np.testing.assert_allclose(numbers["own_letter"], [[0.5 + 0.25 + 0.25 / 3]], atol=1e-3)
    assert numbers["cross_on_the_letter"] == [1.0]
    np.testing.assert_allclose(numbers["cross_rollout_on_the_letter"], [1 / 3], atol=1e-3)


def test_words_become_a_batch_padded_to_the_longest():
    batch = batch_of_words(["ab", "c"])
    assert batch.source.shape == (2, 2)
    assert batch.source_lengths.tolist() == [2, 1]
    assert batch.targets[0, 0] == batch.source[0, 1]
