"""BLEU and chrF against sacrebleu asked directly, and by hand."""

import re
import sys

import numpy as np
import pytest
import sacrebleu

from attention_jax.tasks.translation.translate import require_sacrebleu, score_translations

SAID = ["The dog barks.", "a cat sleeps on the old sofa", "", "Zwei Kinder spielen im Garten ."]
RIGHT = ["The dog is barking.", "A cat sleeps on the sofa", "Nothing.", "Two children are playing."]


def test_the_scores_are_sacrebleus():
    found = score_translations(SAID, RIGHT)
    assert found.bleu == sacrebleu.corpus_bleu(SAID, [RIGHT]).score
    assert found.chrf == sacrebleu.corpus_chrf(SAID, [RIGHT]).score
    assert 0 < found.bleu < found.chrf < 100
    version = re.escape(sacrebleu.__version__)
    assert re.fullmatch(
        rf"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:{version}",
        found.bleu_signature,
    )
    assert re.fullmatch(
        rf"nrefs:1\|case:mixed\|eff:yes\|nc:6\|nw:0\|space:no\|version:{version}",
        found.chrf_signature,
    )


def test_the_scores_by_hand():
    """Five of six words, in one sentence: n-grams that are right, 5/6, 4/5, 3/4 and 2/3."""
    found = score_translations(["a b c d e f"], ["a b c d e g"])
    assert found.bleu == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    # Letters without spaces, up to six: of those, 1/2 and 0.
    chrf = np.mean([5 / 6, 4 / 5, 3 / 4, 2 / 3, 1 / 2, 0])
    assert found.chrf == pytest.approx(100 * chrf)
    short = score_translations(["a b c d"], ["a b c d e"])  # nothing wrong, but too short
    assert short.bleu == pytest.approx(100 * np.exp(1 - 5 / 4))


def test_a_text_is_scored_whole_and_in_order():
    assert score_translations(RIGHT, RIGHT)[:2] == (pytest.approx(100), pytest.approx(100))
    backwards = score_translations(RIGHT[::-1], RIGHT)
    assert max(backwards[:2]) < 30
    mean = np.mean([score_translations([s], [r]).bleu for s, r in zip(SAID, RIGHT, strict=True)])
    assert abs(mean - score_translations(SAID, RIGHT).bleu) > 1


@pytest.mark.parametrize(("said", "right"), [(SAID, RIGHT[:3]), (SAID[:3], RIGHT), ([], [])])
def test_counts_that_do_not_fit(said, right):
    message = (
        rf"references must be one for each of the {len(said)} translations, at least 1; got"
        rf" {len(right)}$"
    )
    with pytest.raises(ValueError, match=message):
        score_translations(said, right)


def test_without_sacrebleu(monkeypatch):
    require_sacrebleu()
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    message = r"BLEU needs the package sacrebleu: .venv/bin/pip install -e '.\[translate\]'"
    for asked in (require_sacrebleu, lambda: score_translations(SAID, RIGHT)):
        with pytest.raises(ValueError, match=message):
            asked()
