"""translation_comparison.py: its measures of attention by hand, settings, and a quick run."""

import dataclasses
import json

import numpy as np
import pytest

from attention_jax import Score
from attention_jax.tasks.translation.text import ParallelText
from attention_jax.training.settings import settings_of
from experiments import catalogue
from experiments.experiment import conduct
from experiments.translation import recipes
from experiments.translation import translation_attention as looked
from experiments.translation import translation_comparison as comparison
from experiments.translation.translation_differences import most_different

NAME = "translation_comparison"
LOG_2 = np.log(2)


def seen(cross, rows, encoder=None):
    """A pair of one layer and one head."""
    cross = np.array(cross, np.float32)[None, None]
    size = cross.shape[-1]
    encoder = np.eye(size, dtype=np.float32) if encoder is None else np.array(encoder, np.float32)
    return looked.Seen(encoder[None, None], cross, rows)


ONE = [seen([[1, 0, 0], [0, 1, 0]], ["▁dog", "EOS"]), seen([[0.5, 0.5]], ["EOS"])]
OTHER = [seen([[1, 0, 0], [0, 0, 1]], ["▁dog", "EOS"]), seen([[0.5, 0.5]], ["EOS"])]


def test_agreement_by_hand():
    found = looked.agreement(ONE, OTHER)
    assert found["rows"] == 3
    assert found["divergence"] == pytest.approx(LOG_2 / 3, abs=1e-4)  # one row of three differs
    assert found["same_largest"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["divergence_of_layers"] == [[pytest.approx(LOG_2 / 3, abs=1e-4)]]
    # Rows nearest to the diagonal: 0 and 2 of (2, 3); 0 of (1, 2), as 0.5 rounds to even.
    assert found["largest_on_the_diagonal"] == pytest.approx([2 / 3, 1], abs=1e-4)
    # Of a one-hot row and 1/3 each: (log(1 / (2/3)) + log(2) / 3 * 2 + log(1/2) / 3) / 2.
    uniform = (np.log(3 / 2) + (np.log(1 / 2) + 2 * np.log(2)) / 3) / 2
    assert found["divergence_from_uniform"] == pytest.approx([2 / 3 * uniform] * 2, abs=1e-4)
    assert found["kinds"] == {
        "end of sentence": {
            "rows": 2, "divergence": pytest.approx(LOG_2 / 2, abs=1e-4), "same_largest": 0.5,
        },
        "first of a word": {"rows": 1, "divergence": 0.0, "same_largest": 1.0},
    }  # fmt: skip


def test_subwords_are_of_kinds():
    alike = [seen([[1, 0], [1, 0]], [".", "a"])] * 20
    unlike = [seen([[1, 0], [0, 1]], [".", "a"])] * 20
    found = looked.agreement(alike, unlike)
    assert found["kinds"]["punctuation"]["same_largest"] == 1.0
    assert found["kinds"]["rest of a word"]["same_largest"] == 0.0


def test_heads_by_hand():
    found = looked.heads([seen([[1, 0], [0.5, 0.5]], ["a", "EOS"]), seen([[0.25] * 4], ["EOS"])])
    assert found == {
        "sharpness": [[pytest.approx((1 + 0.5 + 0.25) / 3, abs=1e-4)]],
        "spread": [[pytest.approx((0 + 1 + 1) / 3, abs=1e-4)]],
    }


def test_rollouts_by_hand():
    """Half of a position is its own; the other half comes from position 0, where it looks."""
    pair = seen([[0, 1]], ["EOS"], encoder=[[1, 0], [1, 0]])
    found = looked.rollouts([pair])
    assert found["on_the_largest"] == 1.0
    assert found["of_its_subword"] == 0.5
    assert found["largest_row_sum_error"] < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": ("scaled",)}, r"scores must be two or more, each once; got \('scaled',\)"),
        ({"scores": ("scaled", "scaled")}, "scores must be two or more"),
        ({"scores": ("scaled", "nought")}, "score must be"),
        ({"seed": -1}, "seed must be at least 0; got -1"),
        ({"recipe": {"num_heads": 3}}, "dim must be a multiple of 3 heads; got 128"),
        ({"recipe": {"learning_rate": 0.0}}, "learning_rate must be greater than 0; got 0.0"),
        ({"recipe": {"batch_tokens": 0}}, "batch_tokens must be at least 1; got 0"),
    ],
)
def test_wrong_settings(settings, message):
    if "recipe" in settings:
        settings = {"recipe": dataclasses.replace(recipes.MIDDLE, **settings["recipe"])}
    with pytest.raises(ValueError, match=message):
        comparison.Config(**settings)


def test_a_corpus_needs_a_test():
    with pytest.raises(ValueError, match="tests must be at least one split; got none"):
        recipes.Corpus(tests=())


def test_missing_data_is_named(tmp_path):
    config = comparison.Config(corpus=recipes.Corpus(data=tmp_path / "nowhere"))
    assert "--data must be a folder with train.de or train.de.gz" in comparison.missing(config)
    assert comparison.missing(comparison.QUICK) == ""
    with pytest.raises(ValueError, match="multi30k"):
        conduct(comparison, config)


def test_arms_differ_in_the_score_alone():
    arms = comparison.QUICK.trainings()
    assert list(arms) == ["scaled", "additive"]
    assert len({training.workdir for training in arms.values()}) == 2
    one, other = (settings_of(training.settings) for training in arms.values())
    assert one["model"].pop("score") == "scaled"
    assert other["model"].pop("score") == "additive"
    fields = [settings["scores"].pop("score") for settings in (one, other)]  # of the score's class
    assert fields[0] != fields[1]
    assert one == other
    later = dataclasses.replace(comparison.QUICK, seed=3).trainings()["scaled"]
    assert later.settings.train.first_seed == 3
    assert later.workdir.name == "seed_3"


def test_equal_minutes_follow_from_measured_ones(tmp_path):
    recipe = dataclasses.replace(recipes.SMALL, steps=1000)
    config = dataclasses.replace(comparison.QUICK, recipe=recipe, workdir=tmp_path)
    # The first score takes 60 seconds, in two sessions, and the second 79: 759 batches fit.
    for training, sessions in zip(config.trainings().values(), ([20, 40], [79]), strict=True):
        training.workdir.mkdir(parents=True)
        lines = [json.dumps({"seconds": seconds}) for seconds in sessions]
        (training.workdir / "timing.jsonl").write_text("\n".join(lines) + "\n")
    shorter = config.training_in_equal_minutes()
    assert shorter.settings.train.steps == 750
    whole = config.trainings()["additive"].settings
    train = dataclasses.replace(whole.train, steps=750)
    assert dataclasses.replace(whole, train=train) == shorter.settings
    assert shorter.workdir not in {training.workdir for training in config.trainings().values()}


def test_the_most_different_sentences():
    text = ParallelText(
        ["eins zwei", "drei", "vier", "fünf", "sechs", " ".join(["lang"] * 17)],
        ["one two", "three", "four", "five", "six", "long"],
    )
    first = ["one two", "three", "fourth", "x", "six", "long"]
    second = ["z", "three", "four", "five", "sixth", "not long"]
    found = most_different(text, first, second)
    # The first is right alone, the second is right alone, and one between; 3 is long, 1 the same.
    assert [one["index"] for one in found] == [0, 3, 4]
    assert found[0]["answers"] == ["one two", "z"]
    assert found[0]["chrf"][0] == 100 > found[0]["chrf"][1]
    assert {one["of"] for one in found} == {4}
    assert most_different(text, first, first) == []


def test_targets_stay_as_they_were_written_before_the_run():
    numbers = json.loads((catalogue.folder_of(NAME) / f"{NAME}.json").read_text())
    bounds = {check.claim: (check.low, check.high) for check in comparison.expectations(numbers)}
    assert bounds == {
        "scaled: BLEU of test_2016_flickr, greedy": (37.0, 100.0),
        "scaled: BLEU of test_2016_flickr, 4 beams": (38.0, 100.0),
        "additive: BLEU of test_2016_flickr, greedy": (35.0, 100.0),
        "additive: BLEU of test_2016_flickr, 4 beams": (36.0, 100.0),
        "scaled and additive: divergence of their rows over that from uniform rows": (0.0, 0.5),
        "scaled and additive: share of rows with the same largest weight": (0.6, 1.0),
        "scaled: share of heads that align": (0.5, 1.0),
        "scaled: heads that spread": (0.0, 0.0),
        "scaled: error of the rollout's row sums": (0.0, 1e-5),
        "additive: share of heads that align": (0.5, 1.0),
        "additive: heads that spread": (0.0, 0.0),
        "additive: error of the rollout's row sums": (0.0, 1e-5),
    }


def test_heat_maps_have_one_size():
    numbers = json.loads((catalogue.folder_of(NAME) / f"{NAME}.json").read_text())
    figure = comparison.plot(numbers)["translation_heatmaps"]
    figure.draw_without_rendering()
    boxes = [axes.get_position() for axes in figure.axes if axes.images]
    assert len(boxes) == 4
    np.testing.assert_allclose(
        [[box.width, box.height] for box in boxes[1:]],
        [[boxes[0].width, boxes[0].height]] * 3,
        atol=1e-3,
    )


@dataclasses.dataclass(frozen=True)
class Halved(Score):
    """A user's own: half of the dot product."""

    def pair(self, params, q_features, k_features):
        return 0.5 * q_features @ k_features.T


@pytest.mark.slow
def test_it_runs_and_draws_a_score_of_ones_own(tmp_path):
    own = f"{__name__}:Halved"
    config = dataclasses.replace(
        comparison.QUICK,
        scores=("scaled", own),
        recipe=dataclasses.replace(recipes.SMALL, num_heads=2),
        workdir=tmp_path,
    )
    numbers = {"config": dataclasses.asdict(config), **comparison.run(config)}
    assert set(comparison.plot(numbers)) == set(comparison.CAPTIONS)
    text = comparison.report(numbers)
    assert f"| {own} |" in text
    assert f"| scaled and {own} |" in text
    assert len(comparison.expectations(numbers)) == 12
    assert "p, against scaled" in text
    rows_sum_to_one = [arm["rollout"]["largest_row_sum_error"] for arm in numbers["arms"].values()]
    assert max(rows_sum_to_one) < 1e-5
    assert np.shape(numbers["arms"][own]["heads"]["sharpness"]) == (1, 2)
