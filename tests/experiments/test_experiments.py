"""attention_family.py: settings, numbers and figures, on tiny runs."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.experiment import conduct
from experiments.reversal import attention_family as family
from experiments.reversal.attention_family_report import EXPECTED_TO_FAIL, MUST_FAIL
from experiments.reversal.strings import batch_of_words

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
    assert {model.attention for model in models.values()} >= {
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
    ],
)
def test_mistakes_before_anything_is_trained(module, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small(module, tmp_path, **settings)


def test_words_become_a_batch_padded_to_the_longest():
    batch = batch_of_words(["ab", "c"], source_start=False)
    assert batch.source.shape == (2, 2)
    assert batch.source_lengths.tolist() == [2, 1]
    assert batch.targets[0, 0] == batch.source[0, 1]
