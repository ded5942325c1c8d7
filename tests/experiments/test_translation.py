"""The experiments on translators: their measures by hand, their settings, and missing data."""

import numpy as np
import pytest

from attention_jax.training.identity import config_of
from experiments.lab import conduct
from experiments.translation import translation_comparison as comparison
from experiments.translation import translators

LOG_2 = np.log(2)


def seen(rows):
    """The weights of one layer and one head."""
    return np.array(rows, np.float64)[None, None]


def test_agreement_by_hand():
    first = [seen([[1, 0, 0], [0, 1, 0]]), seen([[0.5, 0.5]])]
    second = [seen([[1, 0, 0], [0, 0, 1]]), seen([[0.5, 0.5]])]
    found = comparison.agreement(first, second)
    assert found["divergence"] == pytest.approx(LOG_2 / 3, abs=1e-4)  # one row of three differs
    assert found["same_largest"] == pytest.approx(2 / 3, abs=1e-4)
    # Of a one-hot row and 1/3 each: (log(1 / (2/3)) + log(2) / 3 * 2 + log(1/2) / 3) / 2.
    uniform = (np.log(3 / 2) + (np.log(1 / 2) + 2 * LOG_2) / 3) / 2
    assert found["from_uniform"] == pytest.approx([2 / 3 * uniform] * 2, abs=1e-4)


def test_heads_by_hand():
    found = comparison.heads([seen([[1, 0], [0.5, 0.5]]), seen([[0.25] * 4])])
    assert found == {
        "largest": [[pytest.approx((1 + 0.5 + 0.25) / 3, abs=1e-4)]],
        "entropy": [[pytest.approx((0 + 1 + 1) / 3, abs=1e-4)]],
    }


def test_arms_differ_in_the_score_alone():
    one, other = (
        config_of(comparison.QUICK.training(score, 50)) for score in ("scaled", "additive")
    )
    assert (one["model"].pop("score"), other["model"].pop("score")) == ("scaled", "additive")
    assert one["scores"].pop("score") != other["scores"].pop("score")
    assert one == other
    assert comparison.QUICK.training("scaled", 50, seed=3).train.first_seed == 3


def test_missing_data_is_named(tmp_path):
    config = comparison.Config(data=tmp_path / "nowhere")
    assert "--data must be a folder with train.de or train.de.gz" in comparison.missing(config)
    assert comparison.missing(comparison.QUICK) == ""
    with pytest.raises(ValueError, match="multi30k"):
        conduct(comparison, config)


def test_equal_and_different_translations_by_bootstrap():
    references = [f"the {word} runs through the snow" for word in ("dog", "cat", "man") * 9]
    worse = [line.replace("cat runs through the", "man sits in") for line in references]
    found = translators.bootstrapped({"right": references, "worse": worse}, references)
    assert found["right"]["p"] is None
    assert found["worse"]["p"] < 0.01
    assert 0 < found["worse"]["half_width"] < 20
