"""Accuracies and answers of a trained model against a naive evaluation in Python."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from attention_jax.tasks.reversal.evaluation import evaluate, reverse
from attention_jax.tasks.reversal.task import (
    VOCABULARY,
    ReversalConfig,
    ReversalRun,
    bind,
    optimizer,
    reversal_task,
)

from attention_jax.nn import ModelConfig
from attention_jax.tasks.reversal import evaluation as reversal_evaluation
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from attention_jax.training.loop import LoopConfig, initial_state, train_steps

SEEDS = 2
MODEL = ModelConfig(score="general", dim=16, hidden_dim=16, encoder_layers=0)
CONFIG = ReversalConfig(
    model=MODEL, loop=LoopConfig(seeds=SEEDS), batch_size=32, min_length=1, max_length=3
)


@pytest.fixture(scope="module")
def trained():
    """Trained to be right often, not always."""
    with jax.numpy_dtype_promotion("standard"):
        task, adam = reversal_task(CONFIG), optimizer(CONFIG)
        steps = functools.partial(train_steps, task, adam, 280)
        state, _ = jax.jit(jax.vmap(steps))(initial_state(task, adam, CONFIG.loop))
    return ReversalRun(CONFIG, state.params, 280)


@jax.jit
def forward_of(params, *given):
    return bind(MODEL, params)(*given, return_weights=True)


def naive_forward(trained, seed, width):
    """(letters, target inputs) -> logits [T, V] and weights [T, S] as numpy, source padded."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[seed], trained.params)

    def one(source, inputs):
        padded = np.array([[SOS, *source] + [PAD] * (width - len(source))], np.int32)
        inputs = inputs + [PAD] * (width + 1 - len(inputs))
        logits, weights = forward_of(
            params, padded, np.array([len(source) + 1], np.int32), np.array([inputs], np.int32)
        )
        return np.asarray(logits[0]), np.asarray(weights[-1, 0])

    return one


def naive_answer(forward, source, length):
    """Tokens of free running, EOS included if it came, and the weights of the last step."""
    tokens = []
    while len(tokens) < length and EOS not in tokens:
        inputs = [SOS, *tokens] + [PAD] * (length - 1 - len(tokens))
        logits, weights = forward(source, inputs)
        tokens.append(int(np.argmax(logits[len(tokens)])))
    return tokens, weights


def test_evaluate_is_the_naive_evaluation(trained, monkeypatch):
    strings = []

    def recorded(rng, **options):
        batch = jax.jit(functools.partial(random_batch, **options))(rng)
        assert np.all(batch.source[:, 0] == SOS)
        strings.append(np.asarray(batch.source)[:, 1:].tolist())
        return batch

    random_batch = reversal_evaluation.random_batch
    monkeypatch.setattr(reversal_evaluation, "random_batch", recorded)
    results = evaluate(trained, lengths=[3, 2], strings=31)
    assert list(results) == [3, 2]
    width = 3
    seen = []
    for seed in range(SEEDS):
        forward = naive_forward(trained, seed, width)
        for (length, evaluation), sources in zip(results.items(), strings, strict=True):
            assert len(sources) == 31
            forced, free, exact = [], [], []
            for source in sources:
                assert len(source) == length
                right = source[::-1]
                logits, _ = forward(source, [SOS, *right] + [PAD] * (width - length))
                forced += [int(np.argmax(logits[i])) == right[i] for i in range(length)]
                tokens, _ = naive_answer(forward, source, width + 1)
                answer = tokens + [PAD] * width
                free += [answer[i] == right[i] for i in range(length)]
                exact.append(tokens == [*right, EOS])
            found = [float(column[seed]) for column in evaluation]
            assert found == pytest.approx([np.mean(forced), np.mean(free), np.mean(exact)])
            seen += found
    # Neither all right nor all wrong, and not the same thing thrice.
    assert 0 < min(seen) < max(seen) < 1
    assert len(set(seen)) > 6


def test_every_seed_sees_the_same_strings_and_another_seed_others(trained):
    same = ReversalRun(
        CONFIG, jax.tree.map(lambda leaf: np.asarray(leaf)[[0, 0]], trained.params), 280
    )
    for column in evaluate(same, lengths=[3], strings=31)[3]:
        assert column.shape == (2,)
        assert column[0] == column[1]
    once = evaluate(trained, lengths=[3], strings=31)[3]
    again = evaluate(trained, lengths=[3], strings=31, seed=0)[3]
    other = evaluate(trained, lengths=[3], strings=31, seed=1)[3]
    assert np.array(once).tolist() == np.array(again).tolist() != np.array(other).tolist()


def test_without_a_padding_mask_strings_are_padded_as_in_training(trained):
    model = dataclasses.replace(MODEL, mask_padding=False)
    unmasked = dataclasses.replace(trained, config=dataclasses.replace(CONFIG, model=model))
    lengths = (2, 5)  # training pads to 3
    together = evaluate(unmasked, lengths=lengths, strings=31)
    alone = {length: evaluate(unmasked, lengths=[length], strings=31)[length] for length in lengths}
    for length in lengths:
        np.testing.assert_array_equal(together[length], alone[length])
    rng = jax.random.fold_in(jax.random.key(0), 2)
    numbers = {"batch_size": 31, "min_length": 2, "max_length": 2, "source_start": True}
    batch = reversal_evaluation.random_batch(rng, vocabulary=VOCABULARY, **numbers)
    more = ((0, 0), (0, 1))
    padded = [np.pad(ids, more, constant_values=PAD) for ids in (batch.source, batch.target_inputs)]
    for seed in range(SEEDS):
        params = jax.tree.map(lambda leaf, seed=seed: leaf[seed], trained.params)
        logits = bind(model, params)(padded[0], batch.source_lengths, padded[1])
        right = np.argmax(logits, axis=-1)[:, :2] == batch.targets[:, :2]
        assert together[2].teacher_forced_tokens[seed] == pytest.approx(np.mean(right))


def test_without_a_padding_mask_a_word_does_not_depend_on_the_other_words(trained):
    model = dataclasses.replace(MODEL, mask_padding=False)
    unmasked = dataclasses.replace(trained, config=dataclasses.replace(CONFIG, model=model))
    (alone,), (beside, _) = (reverse(unmasked, words) for words in (["ab"], ["ab", "xyz"]))
    assert alone.answer == beside.answer
    np.testing.assert_allclose(alone.weights, beside.weights, atol=1e-5)
    assert np.min(np.sum(alone.weights, axis=-1)) < 0.9  # the model also looks at padding


@pytest.mark.parametrize("seed", range(SEEDS))
def test_reverse_is_the_naive_answer(trained, seed):
    words = ["abc", "q", "zz"]
    forward = naive_forward(trained, seed, 3)
    for word, found in zip(words, reverse(trained, words, seed_index=seed), strict=True):
        tokens, weights = naive_answer(forward, VOCABULARY.encode(word), 4)
        letters = [token for token in tokens if token > EOS]
        assert found.word == word
        assert found.answer == VOCABULARY.decode(letters)
        assert found.column_labels == ["SOS", *word]
        assert found.weights.shape == (len(letters) + (EOS in tokens), 1 + len(word))
        rows = [step for step, token in enumerate(tokens) if token >= EOS]
        np.testing.assert_allclose(found.weights, weights[rows, : 1 + len(word)], atol=1e-5)
        np.testing.assert_allclose(np.sum(found.weights, axis=-1), 1, atol=1e-5)


def biased(trained, **biases):
    """The trained model, made to say one token always."""
    params = jax.tree.map(lambda leaf: leaf, trained.params)
    bias = np.array(params["logits"]["bias"])
    for token, by in biases.items():
        bias[:, {"PAD": PAD, "EOS": EOS, "a": 3}[token]] += by
    params["logits"] = {**params["logits"], "bias": bias}
    return dataclasses.replace(trained, params=params)


def test_answers_that_never_end_and_answers_without_letters(trained):
    words = ["xyz", "q", "zz"]
    endless, _, _ = reverse(biased(trained, a=1e3), words)
    assert endless.answer == "aaaa"  # as long as the right answer and its EOS
    assert endless.weights.shape == (4, 4)
    silent, _, _ = reverse(biased(trained, EOS=1e3), words)
    assert silent.answer == ""
    assert silent.weights.shape == (1, 4)
    # PAD is no letter: no row of weights may stand for it.
    padding, _, _ = reverse(biased(trained, PAD=1e3), words)
    assert padding.answer == ""
    assert padding.weights.shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, r"lengths must be one or more"),
        ({"lengths": [3, 0]}, r"lengths must be one or more, each at least 1; got \[3, 0\]"),
        ({"lengths": [3], "strings": 0}, r"strings must be at least 1; got 0"),
    ],
)
def test_what_cannot_be_evaluated(trained, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(trained, **options)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ([], {}, r"words must be one or more"),
        (["abc", ""], {}, r"none of them empty; got \['abc', ''\]"),
        (["Abc"], {}, r"got 'A' in 'Abc'"),
        (["abc"], {"seed_index": 2}, r"seed_index must be from 0 to 1; got 2"),
        (["abc"], {"seed_index": -1}, r"seed_index must be from 0 to 1; got -1"),
    ],
)
def test_what_cannot_be_reversed(trained, words, options, message):
    with pytest.raises(ValueError, match=message):
        reverse(trained, words, **options)


def test_strings_are_of_the_letters_that_were_trained_on(monkeypatch):
    seen = []

    def look(config, beams, params, batch):
        seen.append(np.asarray(batch.source)[:, 1:])

    monkeypatch.setattr(reversal_evaluation, "_evaluate", look)
    config = ReversalConfig(letters=2, max_length=3)
    evaluate(ReversalRun(config, {}, 0), lengths=[3], strings=31)
    first = VOCABULARY.encode("a")[0]
    assert seen[0].shape == (31, 3)
    assert set(seen[0].ravel()) == {first, first + 1}


def test_without_sos_the_columns_are_the_letters(trained):
    config = dataclasses.replace(CONFIG, source_start=False)
    found, _ = reverse(dataclasses.replace(trained, config=config), ["abc", "q"])
    assert found.column_labels == ["a", "b", "c"]
    assert found.weights.shape[1] == 3
