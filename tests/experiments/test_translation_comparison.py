"""translation_comparison.py: its measures of attention by hand, settings, and a quick run."""

import dataclasses

import numpy as np
import pytest

from experiments.experiment import conduct
from experiments.translation import translation_attention as looked
from experiments.translation import translation_comparison as comparison

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
    assert found["most_alike"] == {}  # no subword is there twenty times


def test_subwords_are_ranked():
    alike = [seen([[1, 0], [1, 0]], [".", "a"])] * 20
    unlike = [seen([[1, 0], [0, 1]], [".", "a"])] * 20
    found = looked.agreement(alike, unlike)
    assert list(found["most_alike"]) == [".", "a"]
    assert list(found["least_alike"]) == ["a", "."]
    assert found["kinds"]["punctuation"]["same_largest"] == 1.0
    assert found["kinds"]["rest of a word"]["same_largest"] == 0.0


def test_heads_by_hand():
    found = looked.heads([seen([[1, 0], [0.5, 0.5]], ["a", "EOS"]), seen([[0.25] * 4], ["EOS"])])
    assert found["cross"] == {
        "sharpness": [[pytest.approx((1 + 0.5 + 0.25) / 3, abs=1e-4)]],
        "spread": [[pytest.approx((0 + 1 + 1) / 3, abs=1e-4)]],
    }
    assert found["encoder"] == {"sharpness": [[1.0]], "spread": [[0.0]]}


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
        ({"tests": ()}, "tests must be at least one split; got none"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        comparison.Config(**settings)


def test_missing_data_is_named(tmp_path):
    config = comparison.Config(data=tmp_path / "nowhere")
    assert "data must be a folder with train.de or train.de.gz" in comparison.missing(config)
    assert comparison.missing(comparison.QUICK) == ""
    with pytest.raises(ValueError, match="multi30k"):
        conduct(comparison, config)


def test_arms_differ_in_the_score_alone():
    one, other = (comparison.QUICK.training(score).to_json() for score in ("scaled", "additive"))
    assert one["model"].pop("score") == "scaled"
    assert other["model"].pop("score") == "additive"
    assert one == other


@pytest.mark.slow
def test_it_runs_and_draws(tmp_path):
    config = dataclasses.replace(comparison.QUICK, workdir=tmp_path)
    numbers = {"config": dataclasses.asdict(config), **comparison.run(config)}
    assert set(comparison.plot(numbers)) == set(comparison.CAPTIONS)
    assert "| additive |" in comparison.report(numbers)
    assert len(comparison.expectations(numbers)) == 4


@pytest.mark.slow
def test_a_step_is_timed_in_parts(monkeypatch):
    monkeypatch.syspath_prepend(str(comparison.QUICK.data.parent.parent / "scripts"))
    from benchmarks import translation
    from benchmarks.measure import Options

    options = Options(scores=("additive",), shrink=32, repeats=1)
    translation.check(options)
    (report,) = translation.run(options)
    by_variant = {row["variant"]: row for row in report.rows}
    assert list(by_variant) == ["ours", "without cross attention", "optax loss", "nnx.Dropout"]
    assert by_variant["ours"]["times_ours"] == 1
    assert by_variant["ours"]["cross_attention_share"] > 0
    memory = {variant: row["temporary_mib"] for variant, row in by_variant.items()}
    assert memory["without cross attention"] < memory["ours"]
