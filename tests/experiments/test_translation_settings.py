"""translation_settings.py: trials, claims, tables and figure from numbers by hand."""

import dataclasses

import pytest

from experiments.translation import translation_settings as settings
from experiments.translation.recipes import SHORT, Corpus

INVERSE = "rate falls as 1 / sqrt(batches)"


def numbers(**greedy):
    """Numbers of trials with the given greedy BLEU; 4 beams are 1.5 higher."""
    trials = {
        settings.RECIPE: 30.0,
        "no label smoothing": 29.0,
        INVERSE: 29.5,
        "batches half as large": 30.25,
    } | greedy
    return {
        "config": dataclasses.asdict(settings.Config()),
        "trials": {
            name: {
                "steps": 3000,
                "minutes": 12.4,
                "parameters": 1_900_000,
                "bleu": {"greedy": bleu, "4 beams": bleu + 1.5},
            }
            for name, bleu in trials.items()
        },
        "searches": [
            {"beams": 1, "length_penalty": 1.0, "bleu": 30.0},
            {"beams": 4, "length_penalty": 0.0, "bleu": 30.5},
            {"beams": 4, "length_penalty": 1.0, "bleu": 31.5},
            {"beams": 8, "length_penalty": 1.0, "bleu": 32.0},
        ],
    }


def test_claims_by_hand():
    checks = {check.claim: check for check in settings.expectations(numbers())}
    assert {claim: check.measured for claim, check in checks.items()} == {
        "most BLEU gained by another setting, greedy": 0.25,
        "the recipe minus no label smoothing: BLEU, greedy": 1.0,
        f"the recipe minus {INVERSE}: BLEU, greedy": 0.5,
        "4 beams minus greedy: BLEU": 1.5,
        "most BLEU gained by another length penalty than 1, 4 beams": 0.0,
    }
    assert {check.verdict for check in checks.values()} == {"ours", "reproduced"}


def test_targets_stay_as_they_were_written_before_the_run():
    checks = settings.expectations(numbers())
    assert [(check.low, check.high) for check in checks] == [
        (-100.0, 1.0), (0.0, 100.0), (0.0, 100.0), (0.5, 3.0), (0.0, 0.5),
    ]  # fmt: skip


def test_a_setting_that_is_much_better_is_a_miss():
    better = {"batches half as large": 31.5, "no label smoothing": 30.5}
    checks = settings.expectations(numbers(**better))
    assert [check.verdict for check in checks] == ["MISS", "MISS", "ours", "ours", "ours"]


def test_tables_and_figure_by_hand():
    found = numbers()
    text = settings.report(found)
    assert "| the recipe | 3,000 | 12 | 1.9 M | 30.0 |  | 31.5 |" in text
    assert "| no label smoothing | 3,000 | 12 | 1.9 M | 29.0 | -1.0 | 30.5 |" in text
    assert "| greedy |  | 30.0 |" in text
    assert "| 4 beams | 0.0 | 30.5 |" in text
    (axes,) = settings.plot(found)["translation_settings"].axes
    greedy = axes.collections[0].get_offsets()[:, 0].tolist()
    assert greedy == [30.25, 29.5, 29.0, 30.0]  # from below


def test_each_trial_changes_the_recipe_and_reads_as_many_subwords():
    config = settings.Config()
    recipes = config.recipes
    assert recipes[settings.RECIPE] == dataclasses.replace(SHORT, steps=3000, checkpoint_every=3000)
    assert len({*recipes.values()}) == len(settings.TRIALS)
    assert {recipe.steps * recipe.batch_tokens for recipe in recipes.values()} == {3000 * 2560}
    trained = [recipe.training(None, "scaled") for recipe in recipes.values()]
    assert len({*trained}) == len(trained)  # every change reaches the training


def test_test_sets_are_not_asked_for(tmp_path):
    (tmp_path / "train.de").write_text("ein Hund\n")
    (tmp_path / "train.en").write_text("a dog\n")
    for language in ("de", "en"):
        (tmp_path / f"val.{language}").write_text("x\n")
    assert settings.missing(settings.Config(corpus=Corpus(data=tmp_path))) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": ("the recipe", "magic")}, "trials must be among .*; got magic"),
        ({"trials": ()}, "trials must be the recipe and at least one other, each once; got none"),
        ({"trials": ("the recipe",)}, "at least one other, each once; got the recipe"),
        ({"trials": ("12 buckets", "the recipe")}, "trials must be the recipe and at least"),
        ({"trials": ("the recipe", "12 buckets", "12 buckets")}, "each once; got the recipe, 12"),
        ({"recipe": dataclasses.replace(SHORT, num_heads=3)}, "dim must be a multiple of 3 heads"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        settings.Config(**options)
