"""BLEU and chrF against sacrebleu asked directly, and by hand; the loss pair by pair."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sacrebleu
from attention_jax.tasks.translation.evaluation import (
    mean_loss,
    require_sacrebleu,
    score_translations,
)

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.translation.batches import Batches, Pairs, padded_batch
from attention_jax.tasks.translation.task import TranslationConfig, bind, translation_task
from attention_jax.tasks.vocabulary import EOS

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


# --- the loss of a whole text ---

V = 17


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.25])
def test_the_mean_loss_is_that_of_each_pair_alone(smoothing):
    config = TranslationConfig(
        source=Path("a.de"),
        target=Path("a.en"),
        vocabulary_size=V,
        label_smoothing=smoothing,
        model=ModelConfig(
            dim=8,
            hidden_dim=7,
            dropout_rate=0.9,
            encoder_layers=0,
            tied_embeddings="all",
        ),
    )
    rng = np.random.default_rng(0)

    def ids(longest):
        return [*rng.integers(3, V, rng.integers(1, longest)).tolist(), EOS]

    pairs = Pairs([ids(9) for _ in range(11)], [ids(7) for _ in range(11)], 0, 0)
    params = jax.jit(translation_task(config).init)(jax.random.key(0))
    forward = jax.jit(bind(config, params))
    smoothed = nats = tokens = 0.0
    for source, target in zip(pairs.source, pairs.target, strict=True):
        alone = padded_batch([source], [target], 1, 11, 10)
        logits = forward(alone.source, alone.source_lengths, alone.target_inputs)
        at = np.asarray(logits[0, : len(target)], np.float64)
        log_p = at - np.log(np.exp(at).sum(-1, keepdims=True))
        right = log_p[np.arange(len(target)), target]
        nats -= right.sum()
        smoothed -= (1 - smoothing) * right.sum() + smoothing * log_p.mean(-1).sum()
        tokens += len(target)
    expected = {"loss": smoothed / tokens, "negative_log_likelihood": nats / tokens}
    for options in ({"buckets": 2}, {"buckets": 1, "multiple_of": 4}):
        batches = Batches(pairs, tokens=45, **options)
        assert batches.steps_per_epoch > 3
        assert mean_loss(config, params, batches) == pytest.approx(expected, rel=1e-5)
    assert (abs(smoothed - nats) > 0.1) == (smoothing > 0)
