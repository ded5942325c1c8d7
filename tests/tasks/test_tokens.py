"""Tasks of one sequence: each is what its definition says, by loops in Python."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.nn import ModelConfig
from attention_jax.tasks.noisy_recall import NoisyRecall
from attention_jax.tasks.recall import Recall
from attention_jax.tasks.regression import Regression
from attention_jax.tasks.selective_copy import SelectiveCopy
from attention_jax.tasks.tokens import drawn

MODEL = ModelConfig("decoder", dim=8, hidden_dim=0, positions="none")
SIZES = {
    "recall": Recall(MODEL, length=23, pairs=3, vocabulary_size=17),
    "noisy_recall": NoisyRecall(MODEL, length=26, keys=4, noise_tokens=5, noise=0.3),
    "selective_copy": SelectiveCopy(MODEL, length=19, letters=5, copied=4),
    "regression": Regression(MODEL, points=7, features=3),
}


@functools.cache
def batch_of(name, size=300):
    draw = jax.jit(SIZES[name].batch, static_argnames="size")
    return jax.tree.map(np.asarray, draw(jax.random.key(0), size=size))


def rows_of(name):
    """(tokens, targets) of each example, as lists."""
    batch = batch_of(name)
    assert batch.target_inputs.dtype == batch.targets.dtype == np.int32
    assert batch.source.shape == (300, 0)
    rows = [*zip(batch.target_inputs.tolist(), batch.targets.tolist(), strict=True)]
    assert len({tuple(tokens) for tokens, _ in rows}) > 290
    return rows


# --- recall ---


def test_recall_asks_each_key_once_at_an_even_offset_after_the_pairs():
    seen = set()
    for tokens, targets in rows_of("recall"):
        keys, values = tokens[:6:2], tokens[1:6:2]
        seen |= {*keys, *values}
        assert len({*keys}) == len({*values}) == 3
        asked = {}
        for place, token in enumerate(tokens[6:]):
            if token:
                assert place % 2 == 0
                asked[token] = targets[6 + place]
        assert asked == dict(zip(keys, values, strict=True))
        assert sum(target > 0 for target in targets) == 3
        assert all(key < 8 for key in keys)
        assert all(value >= 8 for value in values)
    assert seen == {*range(1, 17)}


def test_the_gaps_of_recall_follow_a_power_law():
    task = Recall(MODEL, length=12, pairs=1, vocabulary_size=4)
    batch = jax.jit(task.batch, static_argnames="size")(jax.random.key(0), size=20_000)
    places = np.argmax(np.asarray(batch.targets) > 0, axis=1)
    counts = np.bincount((places - 2) // 2, minlength=5)
    expected = np.arange(1, 6) ** -0.99
    np.testing.assert_allclose(counts / 20_000, expected / expected.sum(), atol=0.012)


def test_indices_are_drawn_one_after_another():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    draw = jax.vmap(lambda rng: drawn(rng, jax.numpy.asarray(weights), 2))
    pairs = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), 20_000)))
    for first, second in itertools.permutations(range(4), 2):
        share = np.mean((pairs == [first, second]).all(axis=1))
        expected = weights[first] * weights[second] / (1 - weights[first])
        assert abs(share - expected) < 0.012
    assert np.all(pairs[:, 0] != pairs[:, 1])


# --- noisy recall ---


def test_noisy_recall_asks_every_key_that_was_seen_before():
    maps, noise = [], []
    for tokens, targets in rows_of("noisy_recall"):
        known = {}
        for key, value, *asked in zip(
            tokens[::2], tokens[1::2], targets[::2], targets[1::2], strict=True
        ):
            noise.append(key > 8)
            assert asked[1] == 0
            if key > 8:
                assert 9 <= min(key, value) <= max(key, value) <= 13
                assert asked[0] == 0
                continue
            assert 1 <= key <= 4
            assert 5 <= value <= 8
            assert asked[0] == known.get(key, 0)
            assert known.setdefault(key, value) == value
        maps.append(tuple(sorted(known.items())))
    assert abs(np.mean(noise) - 0.3) < 0.03
    assert len(set(maps)) > 100


def test_noisy_recall_asks_nothing_at_a_blank():
    targets = SIZES["noisy_recall"].targets(np.array([1, 5, 0, 7, 0, 1]))
    assert targets.tolist() == [0, 0, 0, 0, 0, 5]


# --- selective copy ---


def test_selective_copy_asks_the_letters_in_their_order():
    before = []
    for tokens, targets in rows_of("selective_copy"):
        start = tokens.index(1)
        assert start == 14
        places = [place for place, token in enumerate(tokens) if token > 1]
        assert len(places) == 4
        assert places[-1] == 13  # each blank stands before a letter
        before.append(np.diff([-1, *places]) - 1)
        assert tokens[15:] == [0] * 4
        assert targets == [0] * 15 + [tokens[place] for place in places]
    shares = np.bincount(np.concatenate(before), minlength=11) / 1200
    blanks = [math.comb(10, n) * 0.25**n * 0.75 ** (10 - n) for n in range(11)]
    np.testing.assert_allclose(shares, blanks, atol=0.05)
    letters = np.bincount(np.ravel([targets[15:] for _, targets in rows_of("selective_copy")]))
    assert len(letters) == 7
    assert np.all(np.abs(letters[2:] - 240) < 60)


# --- regression ---


def test_regression_interleaves_points_of_a_linear_function_of_their_own():
    batch = batch_of("regression")
    assert batch.target_inputs.shape == (300, 13, 3)
    x, y = batch.target_inputs[:, ::2], batch.targets[:, ::2]
    np.testing.assert_array_equal(batch.target_inputs[:, 1::2, 0], y[:, :-1])
    assert not np.any(batch.target_inputs[:, 1::2, 1:])
    w = np.stack([np.linalg.lstsq(a, b)[0] for a, b in zip(x[:, :4], y[:, :4], strict=True)])
    np.testing.assert_allclose(np.einsum("bnd,bd->bn", x, w), y, atol=1e-2)
    for normal in (x, w):
        assert abs(normal.mean()) < 0.15
        assert abs(normal.std() - 1) < 0.15


def test_the_answer_of_least_squares_stands_beside_a_prediction():
    task = SIZES["regression"]
    text = "1 0 0 0.5 0 1 0 -2 0 0 2 3 1 1 2"  # w = 0.5, -2, 1.5
    answers = task.answers(jax.jit(task.init)(jax.random.key(0)), [text, "1 2 3"])
    assert [right for _, _, right in answers.texts] == ["1.50", "0.00"]
    assert answers.batch.targets.shape == (2, 7)


# --- results ---


class Summed(Recall):
    """Its accuracy is a number of the batch."""

    def loss(self, params, batch, rng):
        assert rng is None
        return params, {"accuracy": params * jnp.mean(batch.targets)}


def test_an_accuracy_is_the_mean_over_sixteen_batches_of_64():
    task = Summed(MODEL, length=12, pairs=2, vocabulary_size=16)
    (result,) = task.evaluate(np.float32([1, 3])).values()
    draw = jax.jit(jax.vmap(functools.partial(task.batch, size=64)))
    targets = np.asarray(draw(jax.random.split(jax.random.key(0), 16)).targets)
    np.testing.assert_allclose(result.by_seed, 100 * np.mean(targets) * np.array([1, 3]), rtol=1e-5)


# --- the loss ---


@pytest.mark.parametrize(
    "name", ["recall", "regression", pytest.param("noisy_recall", marks=pytest.mark.slow)]
)
def test_the_loss_is_the_mean_where_something_is_asked(name):
    task, batch = SIZES[name], batch_of(name, 20)

    @jax.jit
    def both(params):
        return task.loss(params, batch, None), task.bind(params)(*batch.inputs)

    (loss, metrics), output = both(jax.jit(task.init)(jax.random.key(1)))
    output, targets = np.asarray(output, np.float64), batch.targets
    if name == "regression":  # at each point, in units of the variance of the answers
        losses = (output[:, ::2, 0] - targets[:, ::2]) ** 2 / 3
    else:
        asked = np.nonzero(targets)
        logits, right = output[asked], targets[asked]
        losses = np.log(np.sum(np.exp(logits), -1)) - logits[np.arange(len(right)), right]
        share = np.mean(np.argmax(logits, -1) == right)
        np.testing.assert_allclose(metrics["accuracy"], share, rtol=1e-5)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_few_logits_are_computed_at_the_published_size():
    task = Recall(vocabulary_size=8192, length=64)
    rng = jax.random.key(0)
    program = jax.make_jaxpr(lambda params: task.loss(params, task.batch(rng, size=64), None))
    assert "f32[64,4,8192]" in str(program(jax.eval_shape(task.init, rng)))
