"""Tasks from sequence to sequence: loss, accuracies and answers, and what users may give."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from user_tasks import Rotate

from attention_jax.nn import ModelConfig
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.pages import cross_attention
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.sequences import EOS, FIRST, PAD, SOS, SequenceTask, TrainConfig
from attention_jax.tasks.vocabulary import Vocabulary, padded_batch, up_to_eos
from attention_jax.training.identity import config_of
from attention_jax.training.run import TrainedRun
from attention_jax.training.step import initial_state, train_steps

SEEDS = 2
SMALL = {"dim": 8, "hidden_dim": 7, "encoder_layers": 0, "decoder_self_attention": False}


pytestmark = pytest.mark.usefixtures("standard_promotion")


def reversal(*, weight=0.0, **model):
    settings = {"score": "additive", **SMALL, **model}
    return Reversal(ModelConfig(**settings), max_length=3, min_length=1, coverage_weight=weight)


# --- the loss ---


def normal_params(task):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)


@pytest.mark.parametrize("weight", [pytest.param(None, marks=pytest.mark.slow), 3.0])
def test_the_loss_is_the_cross_entropy_of_real_tokens_and_the_coverage_loss(weight):
    """And its rng is for dropout."""
    coverage = {} if weight is None else {"attention": "coverage", "decoder_layers": 2}
    task = reversal(weight=weight or 0.0, dropout_rate=0.3, **coverage)
    batch = jax.jit(task.batch, static_argnames="size")(jax.random.key(1), size=5)
    batch = jax.tree.map(np.asarray, batch)

    @jax.jit
    def run(params, seeds):
        def with_dropout(seed):
            return task.loss(params, batch, jax.random.key(seed))[0]

        options = {"return_weights": True} if coverage else {}
        output = task.bind(params)(*batch.inputs, **options)
        return task.loss(params, batch, None), jax.vmap(with_dropout)(seeds), output

    (loss, metrics), dropped, output = run(normal_params(task), np.array([0, 1, 0]))
    logits, weights = jax.tree.map(np.float64, output if coverage else (output, np.zeros((1, 5))))
    nats, right, again = [], [], []
    for row, length in enumerate(batch.target_lengths):
        for position in range(length):
            at, target = logits[row, position], batch.targets[row, position]
            nats.append(np.log(np.sum(np.exp(at))) - at[target])
            right.append(np.argmax(at) == target)
            for layer in weights[:, row] if coverage else ():  # [T, S]
                again.append(np.minimum(layer[position], layer[:position].sum(0)).sum())
    assert len(nats) < batch.targets.size  # there is padding
    np.testing.assert_allclose(metrics["accuracy"], np.mean(right), rtol=1e-5)
    if coverage:
        assert np.mean(again) > 0.1
        np.testing.assert_allclose(metrics["coverage_loss"], np.mean(again), rtol=1e-5)
    total = np.mean(nats) + (weight * np.mean(again) if coverage else 0)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert dropped[0] == dropped[2] != dropped[1]


def test_the_tasks_normalizer_stands_where_the_model_names_none():
    for attention, normalizer, expected in (
        ("global", None, "log_scaled(start=9)"),
        ("global", "entmax", "entmax"),
        ("coverage", None, "softmax"),
    ):
        model = ModelConfig(attention=attention, normalizer=normalizer)
        assert Reversal(model).network.normalizer == expected


# --- accuracies and answers of a trained model ---

MODEL = ModelConfig(score="general", **SMALL, mask_padding=False)
TRAIN = TrainConfig(seeds=SEEDS, batch_size=32)
TASK = Reversal(MODEL, TRAIN, min_length=1, max_length=3, letters=2)


@pytest.fixture(scope="module")
def trained():
    """Trained to be right often, not always."""
    steps = functools.partial(train_steps, TASK, 60)
    state, _ = jax.jit(jax.vmap(steps))(initial_state(TASK))
    return TrainedRun(TASK, jax.device_get(state.params), 60)


@jax.jit
def outputs_of(params, batch):
    """The likeliest tokens after the right ones; the model's own answers, and their weights."""
    model, ends = TASK.bind(params), {"max_length": 4, "sos": SOS, "eos": EOS, "pad": PAD}
    own = model.greedy_decode(batch.source, batch.source_lengths, **ends, return_weights=True)
    return jnp.argmax(model(*batch.inputs), axis=-1), *own


def test_accuracies_are_the_shares_that_the_model_gets_right(trained):
    results = accuracies(TASK, trained.params, [3, 2], strings=11)
    assert list(results) == [3, 2]
    draw, seen = jax.jit(TASK.batch, static_argnames=("size", "length")), []
    for length, found in results.items():
        batch = draw(jax.random.fold_in(jax.random.key(0), length), size=11, length=length)
        for seed in range(SEEDS):
            forced, free = (
                np.asarray(tokens) == np.asarray(batch.targets)
                for tokens in outputs_of(trained.params_of(seed), batch)[:2]
            )
            letters = [np.mean(right[:, :length]) for right in (forced, free)]
            shares = [float(column[seed]) for column in found]
            assert shares == pytest.approx([*letters, np.mean(free[:, : length + 1].all(axis=1))])
            seen += shares
    beside = accuracies(TASK, trained.params, [2, 5], strings=11)[2]
    np.testing.assert_array_equal(beside, results[2])  # whichever other lengths are asked for
    assert 0 < min(seen) < max(seen) < 1
    assert len(set(seen)) > 6


def test_answers_and_their_weights_are_the_models_own(trained):
    words, params, letters = ["ab", "q", "zz"], trained.params_of(1), TASK.vocabulary
    answers = TASK.answers(params, words)
    panels = cross_attention(TASK, params, answers.batch, answers.labels)
    for word, (given, answer, right) in zip(words, answers.texts, strict=True):
        alone = padded_batch([[SOS, *letters.encode(word)]], [[EOS]], source_width=4)
        _, (tokens,), weights = outputs_of(params, alone)
        tokens = up_to_eos(tokens)
        assert (given, right) == (word, word[::-1])
        assert answer == letters.decode(tokens)
        found, rows, columns = panels[word]
        assert rows == [letters.label(token) for token in tokens]
        assert columns == ["SOS", *word, *["PAD"] * (3 - len(word))]
        np.testing.assert_allclose(found, weights[-1, 0, : len(rows), : len(columns)], atol=1e-5)


def biased(trained, token):
    """One seed of the model, made to say one token always."""
    params = trained.params_of(0)
    bias = np.array(params["logits"]["bias"])
    bias[token] += 1e3
    return {**params, "logits": {**params["logits"], "bias": bias}}


@pytest.mark.parametrize(("token", "answer", "rows"), [(FIRST, "aaaa", 4), (EOS, "", 1)])
def test_answers_that_never_end_and_answers_without_letters(trained, token, answer, rows):
    answers = TASK.answers(biased(trained, token), ["xyz", "q", "ab"])
    assert [text for _, text, _ in answers.texts] == [answer] * 3
    assert {len(labels) for labels, _ in answers.labels.values()} == {rows}


@pytest.mark.parametrize(
    ("model", "most"),
    [
        # Evaluation starts at id 16 / 8 = 2, so that 14 tokens fit: 13 letters and EOS.
        ({"position_draw": "subset", "position_limit": 16}, 13),
        # SOS and the source, SOS and the answer, in one sequence.
        ({"architecture": "decoder", "position_limit": 21}, 9),
    ],
)
def test_beyond_the_table_of_learned_positions_results_are_nan(monkeypatch, model, most):
    asked = []

    def right(task, params, lengths):
        asked.extend(lengths)
        return {length: SimpleNamespace(free_running_exact=np.ones(1)) for length in lengths}

    monkeypatch.setattr("attention_jax.tasks.sequences.accuracies", right)
    task = Reversal(ModelConfig(positions="learned", dim=8, **model), TrainConfig(seeds=1))
    (fits,), (beyond,) = (each.by_seed for each in task.evaluate(None, [most, most + 1]).values())
    assert (fits, asked) == (100, [most])
    assert np.isnan(beyond)


# --- letters, settings, and a user's pair ---


def test_ids_are_the_specials_then_the_letters_in_order():
    alphabet, text = "aAzß犬 🐕\n", "犬a\nßa🐕 "
    vocabulary = Vocabulary(alphabet)
    ids = vocabulary.encode(text)
    assert ids == [3 + alphabet.index(letter) for letter in text]
    assert vocabulary.decode([PAD, SOS, *ids, PAD, EOS, 3]) == text
    labels = [vocabulary.label(token) for token in range(vocabulary.size)]
    assert labels == ["PAD", "SOS", "EOS", *alphabet]
    with pytest.raises(ValueError, match=r"text must consist of letters .*; got 'ï' in 'naïve'"):
        Vocabulary().encode("naïve")
    for wrong in ("", "aba"):
        with pytest.raises(ValueError, match=f"alphabet must be distinct .*; got '{wrong}'"):
            Vocabulary(wrong)


@dataclasses.dataclass(frozen=True)
class Drawn(SequenceTask):
    """What `pair` returns is set by a test."""

    name: ClassVar[str] = "drawn"
    drawn: ClassVar = None
    model: ModelConfig = ModelConfig(**SMALL)

    def pair(self, rng, length, *, longest):
        return type(self).drawn(length, jnp.full((longest,), FIRST))


def test_a_shorter_target_is_padded_to_its_own_width(monkeypatch):
    monkeypatch.setattr(
        Drawn, "drawn", staticmethod(lambda n, ids: ((ids, n), (ids[:1], jnp.int32(1))))
    )
    batch = jax.jit(Drawn().batch, static_argnames="size")(jax.random.key(0), size=3)
    assert batch.source.shape == (3, 9)
    assert batch.targets.tolist() == [[FIRST, EOS]] * 3
    assert batch.target_inputs.tolist() == [[SOS, FIRST]] * 3
    assert "program" in config_of(Drawn())


class Single(Rotate):
    """A task with one example of each length."""

    vocabulary = Vocabulary("a")


def test_a_task_that_may_have_one_example_is_warned_of():
    with pytest.warns(UserWarning, match="Single: pair draws the same example with each of 5 keys"):
        Single().check_numbers()
