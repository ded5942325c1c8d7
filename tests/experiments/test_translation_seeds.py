"""translation_seeds.py: claims, table and figure from numbers by hand; its folders."""

import dataclasses

import pytest

from experiments.translation import translation_comparison as comparison
from experiments.translation import translation_seeds as seeds


def numbers(scaled, additive):
    """Numbers of two seeds with the given BLEU; greedy is 1 lower."""

    def results(bleus):
        found = {"chrf": [60.0, 61.0], "signatures": ["of BLEU", "of chrF"]}
        return {
            "greedy": {"bleu": [bleu - 1 for bleu in bleus], **found},
            "4 beams": {"bleu": bleus, **found},
        }

    def score(bleus, lower):
        return {
            "training": {"minutes": [33.6, 34.4]},
            "tests": {
                "test": results(bleus),
                "test_2017_mscoco": results([bleu - lower for bleu in bleus]),
            },
        }

    tests = ["test", "test_2017_mscoco"]
    config = {"corpus": {"tests": tests}, "recipe": {"steps": 7000}, "seeds": 2}
    return {
        "config": config,
        "scores": {"scaled": score(scaled, 9.0), "additive": score(additive, 13.5)},
        "sentences": dict(zip(tests, (1000, 461), strict=True)),
    }


def test_claims_by_hand():
    checks = {
        check.claim: check for check in seeds.expectations(numbers([39.0, 40.0], [37.0, 39.0]))
    }
    assert {claim: check.measured for claim, check in checks.items()} == {
        "scaled: mean BLEU of test, greedy": 38.5,
        "scaled: mean BLEU of test, 4 beams": 39.5,
        "additive: mean BLEU of test, greedy": 37.0,
        "additive: mean BLEU of test, 4 beams": 38.0,
        "scaled: standard deviation of BLEU over seeds, 4 beams": pytest.approx(0.5**0.5),
        "additive: standard deviation of BLEU over seeds, 4 beams": pytest.approx(2**0.5),
        "scaled: BLEU of test minus that of test_2017_mscoco, 4 beams, means over seeds": 9.0,
        "additive: BLEU of test minus that of test_2017_mscoco, 4 beams, means over seeds": 13.5,
        "scaled dot minus additive: BLEU, 4 beams, mean over seeds": 1.5,
        "scaled dot minus additive: BLEU of test_2017_mscoco, 4 beams, mean over seeds": 6.0,
    }
    verdicts = {claim: check.verdict for claim, check in checks.items()}
    assert {claim for claim, verdict in verdicts.items() if verdict == "MISS"} == {
        "additive: standard deviation of BLEU over seeds, 4 beams",
        "additive: BLEU of test minus that of test_2017_mscoco, 4 beams, means over seeds",
        "scaled dot minus additive: BLEU of test_2017_mscoco, 4 beams, mean over seeds",
    }


def test_targets_stay_as_they_were_written_before_the_run():
    checks = seeds.expectations(numbers([39.0, 40.0], [37.0, 39.0]))
    assert [(check.low, check.high) for check in checks] == [
        (37.0, 100.0), (38.0, 100.0), (35.0, 100.0), (36.0, 100.0), (0.0, 1.0), (0.0, 1.0),
        (-100.0, 13.0), (-100.0, 13.0), (0.0, 2.0), (0.0, 2.0),
    ]  # fmt: skip
    assert seeds.MOST_LOWER == {
        "test_2017_flickr": 10.0, "test_2017_mscoco": 13.0, "test_2018_flickr": 13.0,
    }  # fmt: skip
    assert {*seeds.MOST_LOWER} == {*seeds.Config().corpus.tests[1:]}


def test_table_and_figure_by_hand():
    found = numbers([39.0, 40.0], [37.0, 39.0])
    text = seeds.report(found)
    assert "| scaled, 4 beams | 39.0 | 40.0 | 39.5 ± 0.7 | 60.5 ± 0.7 |" in text
    assert "| scaled - additive, 4 beams | +2.0 | +1.0 | 1.5 ± 0.7 | |" in text
    assert "| test_2017_mscoco | 461 | 30.5 ± 0.7 | 24.5 ± 1.4 | 6.0 ± 0.7 |" in text
    assert "each had: scaled 34, 34; additive 34, 34." in text
    (axes,) = seeds.plot(found)["translation_seeds"].axes
    assert [points.get_offsets()[:, 1].tolist() for points in axes.collections] == [
        [39.0, 40.0, 30.0, 31.0], [37.0, 39.0, 23.5, 25.5],
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_xticklabels()] == ["test", "test_2017_mscoco"]


def test_trainings_are_those_of_the_comparison():
    found = seeds.QUICK.trainings()
    alone = comparison.QUICK.trainings()
    for score, trainings in found.items():
        assert trainings[0] == alone[score]
        assert [training.settings.train.first_seed for training in trainings] == [0, 1]
        assert len({training.workdir for training in trainings}) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 1}, "seeds must be at least 2; got 1"),
        ({"recipe": {"num_heads": 3}}, "dim must be a multiple of 3 heads; got 128"),
    ],
)
def test_wrong_settings(settings, message):
    if "recipe" in settings:
        settings = {"recipe": dataclasses.replace(seeds.MIDDLE, **settings["recipe"])}
    with pytest.raises(ValueError, match=message):
        seeds.Config(**settings)
