"""translation_settings.py: trials, claims, tables, figure, and a quick run."""

import dataclasses

import pytest

from attention_jax.tasks.translation.translate import Search, translate, translator_of
from attention_jax.training.run import load_run
from experiments.translation import translation_settings as settings
from experiments.translation.recipes import SHORT, Corpus
from experiments.translation.translation_scores import scored


def trial(*greedy):
    """Numbers of a trial; 4 beams are 1.5 BLEU higher."""
    found = {"chrf": [60.0] * len(greedy), "signatures": ["of BLEU", "of chrF"]}
    return {
        "training": {"steps": 3000, "minutes": [12.4] * len(greedy)},
        "parameters": 1_900_000,
        "scores": {
            "greedy": {"bleu": list(greedy), **found},
            "4 beams": {"bleu": [bleu + 1.5 for bleu in greedy], **found},
        },
    }


def numbers(smoothing=29.0, half=30.25):
    return {
        "config": dataclasses.asdict(settings.Config()),
        "trials": {
            "recipe": trial(29.5, 30.0, 30.5),
            "label-smoothing-0": trial(smoothing),
            "batches-half-as-large": trial(half),
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
        "most BLEU that another setting gains over the recipe, greedy": 0.25,
        "4 beams minus greedy: BLEU": 1.5,
        "most BLEU that another length penalty gains over 1, 4 beams": -1.0,
    }
    assert {check.verdict for check in checks.values()} == {"ours"}


def test_targets_stay_as_they_were_written_before_the_run():
    checks = settings.expectations(numbers())
    assert [(check.low, check.high) for check in checks] == [
        (-100.0, 1.0), (0.5, 3.0), (-100.0, 0.5),
    ]  # fmt: skip


def test_a_setting_that_is_much_better_is_a_miss():
    checks = settings.expectations(numbers(half=31.5))
    assert [check.verdict for check in checks] == ["MISS", "ours", "ours"]


def test_tables_and_figure_by_hand():
    found = numbers()
    text = settings.report(found)
    assert "| recipe | 3,000 | 12 | 1.9 M | 30.0 ± 0.5 |  | 31.5 ± 0.5 |" in text
    assert "| label-smoothing-0 | 3,000 | 12 | 1.9 M | 29.0 | -1.0 | 30.5 |" in text
    assert "| greedy |  | 30.0 |" in text
    assert "| 4 beams | 0.0 | 30.5 |" in text
    (axes,) = settings.plot(found)["translation_settings"].axes
    greedy = axes.collections[0].get_offsets().tolist()
    assert greedy == [[30.25, 0.0], [29.0, 1.0], [29.5, 2.0], [30.0, 2.0], [30.5, 2.0]]


def test_each_trial_changes_the_recipe_and_reads_as_many_subwords():
    recipes = settings.Config().recipes
    assert recipes["recipe"] == dataclasses.replace(SHORT, steps=3000, checkpoint_every=3000)
    assert {recipe.steps * recipe.batch_tokens for recipe in recipes.values()} == {3000 * 2560}
    trained = [recipe.training(None, "scaled") for recipe in recipes.values()]
    assert len({*trained}) == len(settings.TRIALS) + 1  # every change reaches the training


def test_test_sets_are_not_asked_for(tmp_path):
    for split in ("train", "val"):
        for language in ("de", "en"):
            (tmp_path / f"{split}.{language}").write_text("x\n")
    assert settings.missing(settings.Config(corpus=Corpus(data=tmp_path))) == ""
    (tmp_path / "val.en").unlink()
    assert "val.en" in settings.missing(settings.Config(corpus=Corpus(data=tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": ()}, "trials must be at least one; got none"),
        ({"trials": ("12-buckets", "magic")}, "trials must be of dropout-0.2, .*; got magic"),
        ({"recipe_seeds": 1}, "recipe_seeds must be at least 2; got 1"),
        (
            {"recipe": dataclasses.replace(SHORT, label_smoothing=0.0)},
            "recipe must not have the setting of the trial label-smoothing-0",
        ),
        ({"recipe": dataclasses.replace(SHORT, num_heads=3)}, "dim must be a multiple of 3 heads"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        settings.Config(**options)


@pytest.mark.slow
def test_numbers_are_those_of_the_trainings(tmp_path):
    config = dataclasses.replace(settings.QUICK, workdir=tmp_path)
    found = settings.run(config)
    text = config.corpus.text("validation")
    for name in ("recipe", "label-smoothing-0"):
        translator = translator_of(load_run(tmp_path / name / "scaled" / "seed_0"))
        answers = translate(translator, text.source, Search(beams=4))
        expected = scored([answers], text.target)["bleu"][0]
        assert found["trials"][name]["scores"]["4 beams"]["bleu"][0] == expected
