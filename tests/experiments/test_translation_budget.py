"""translation_budget.py: targets, settings, the README's command, and a quick run."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from command_line import parse
from command_lines import load

from attention_jax.tasks.translation.translate import Search, translate, translator_of
from attention_jax.training.run import load_run
from experiments.experiment import conduct
from experiments.translation import translation_budget as budget
from experiments.translation import translation_budget_additive as additive
from experiments.translation.recipes import SHORT, SMALL, SMALL_CORPUS, Corpus
from experiments.translation.translation_scores import bootstrapped, scored

ROOT = Path(__file__).parents[2]


def numbers(greedy=40.0, beams=41.0, minutes=(9.0, 50.0), seconds=10.0):
    def recipe(total):
        found = {
            name: {"bleu": [bleu], "chrf": [60.0], "half_width": 1.2, "signatures": ["b", "c"]}
            for name, bleu in (("greedy", greedy), ("beams", beams))
        }
        return {
            "minutes": total, "validated": [1, 2], "validation_bleu": [20.0, 30.0],
            "steps_per_second": 9.0, "parameters": 1_900_000,
            "tests": {"test_2016_flickr": found},
            "seconds_of_search": {"greedy": 1.0, "beams": seconds},
        }  # fmt: skip

    return {
        "config": dataclasses.asdict(budget.Config()),
        "recipes": dict(zip(("short", "long"), map(recipe, minutes), strict=True)),
        "sentences": 1000,
        "trials": {"about": "Trials.", "columns": ["steps", "BLEU"], "rows": [[100, 20.5]]},
    }


def test_targets_stay_as_they_were_written_before_the_runs():
    bounds = [(check.claim, check.low, check.high) for check in budget.expectations(numbers())]
    assert bounds == [
        ("short: BLEU of test_2016_flickr, greedy", 33.5, 100.0),
        ("long: BLEU of test_2016_flickr, greedy", 39.0, 100.0),
        ("long: BLEU of test_2016_flickr, 4 beams", 40.5, 100.0),
        ("short: minutes of training", 0, 10.0),
        ("long: minutes of training", 0, 60.0),
        ("seconds for 1,000 sentences with 4 beams, compilation not counted", 0, 20.0),
    ]


def test_additive_has_the_targets_of_the_long_recipe():
    alone = numbers()
    del alone["recipes"]["short"]
    alone["config"] = dataclasses.asdict(additive.Config())
    bounds = [(check.claim, check.low, check.high) for check in additive.expectations(alone)]
    assert bounds == [
        ("long: BLEU of test_2016_flickr, greedy", 39.0, 100.0),
        ("long: BLEU of test_2016_flickr, 4 beams", 40.5, 100.0),
        ("long: minutes of training", 0, 60.0),
        ("seconds for 1,000 sentences with 4 beams, compilation not counted", 0, 20.0),
    ]
    assert "| long | 50.0 | 9.0 | 0.2 | 20,000 | 1.9 M |" in additive.report(alone)
    assert set(additive.plot(alone)) == set(additive.CAPTIONS)
    config = additive.Config()
    scaled = dataclasses.replace(config.long, steps=27000, checkpoint_every=3000)
    assert (config.score, scaled) == ("additive", budget.Config().long)


def test_what_falls_short_is_a_miss():
    assert {check.verdict for check in budget.expectations(numbers())} <= {"reproduced", "ours"}
    short = budget.expectations(numbers(33.0, 40.4, (10.1, 61.0), 20.5))
    assert [check.verdict for check in short] == ["MISS"] * 6


def test_the_report_has_all_numbers():
    text = budget.report(numbers())
    assert "| long | test_2016_flickr | 40.0 ± 1.2 | 41.0 ± 1.2 | 60.0 |" in text
    assert "| 100 | 20.5 |" in text
    assert "1,000 sentences in 1.0 s with greedy search and in 10.0 s with 4 beams" in text


def test_the_command_of_the_readme_is_the_short_recipe():
    text = (ROOT / "scripts" / "README.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"scripts/train\.py (--task translation .*--attention-.*)", text)
    config = parse(load("scripts/train.py").arguments_of, shlex.split(command)).settings
    assert config.validation_target.name == "val.en.gz"
    same = {"train": config.train} | {
        name: getattr(config, name) for name in ("source", "target", "validation_source",
                                                 "validation_target")
    }  # fmt: skip
    expected = SHORT.training(None, "scaled")
    assert config == dataclasses.replace(expected, **same)
    for name in ("steps", "seeds", "first_seed", "checkpoint_every"):
        assert getattr(config.train, name) == getattr(expected.train, name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 1}, "beams must be at least 2; got 1"),
        ({"length_penalty": -1.0}, "length_penalty must be at least 0; got -1.0"),
        ({"score": "nought"}, "score must be"),
        ({"short": dataclasses.replace(SHORT, num_heads=3)}, "dim must be a multiple of 3 heads"),
        ({"corpus": SMALL_CORPUS, "long": dataclasses.replace(SMALL, steps=0)}, "steps must"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        budget.Config(**settings)


def test_missing_data_is_named(tmp_path):
    config = budget.Config(corpus=Corpus(data=tmp_path / "nowhere"))
    assert "data must be a folder with train.de or train.de.gz" in budget.missing(config)
    assert budget.missing(budget.QUICK) == ""
    with pytest.raises(ValueError, match="multi30k"):
        conduct(budget, config)


def test_equal_and_different_translations_by_bootstrap():
    references = [f"the {word} runs through the snow" for word in ("dog", "cat", "man") * 9]
    worse = [line.replace("cat runs through the", "man sits in") for line in references]
    found = bootstrapped({"right": references, "worse": worse}, references)
    assert found["right"]["bleu"] == pytest.approx(100)
    assert found["right"]["p_value"] is None
    assert found["worse"]["bleu"] == pytest.approx(scored([worse], references)["bleu"][0])
    assert found["worse"]["p_value"] < 0.01
    assert 0 < found["worse"]["half_width"] < 20


@pytest.mark.slow
def test_it_trains_tests_and_draws(tmp_path):
    config = dataclasses.replace(budget.QUICK, workdir=tmp_path)
    found = {"config": dataclasses.asdict(config), **budget.run(config)}
    assert set(budget.plot(found)) == set(budget.CAPTIONS)
    assert "| long | validation |" in budget.report(found)
    assert len(budget.expectations(found)) == 6
    text = config.corpus.text("validation")
    translator = translator_of(load_run(tmp_path / "long"))
    answers = translate(translator, text.source, Search(beams=4))
    bleu = scored([answers], text.target)["bleu"]
    assert found["recipes"]["long"]["tests"]["validation"]["beams"]["bleu"] == bleu
