"""The translation task as training sees it: loss, schedules, optimiser, accumulation."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.translation.batches import padded_batch
from attention_jax.tasks.translation.task import (
    TranslationConfig,
    bind,
    optimizer,
    rate_schedule,
    translation_task,
)
from attention_jax.tasks.vocabulary import EOS
from attention_jax.training.loop import LoopConfig

V = 17  # of models that are given ids, not text
MODEL = ModelConfig(num_heads=2, dim=8, hidden_dim=13, encoder_layers=0, tied_embeddings="all")
LOOP = LoopConfig(seeds=1, steps=10, log_every=2, checkpoint_every=4)


def config(*, model=None, loop=None, **settings):
    """Of files that need not be there."""
    return TranslationConfig(
        source=Path("a.de"),
        target=Path("a.en"),
        vocabulary_size=V,
        model=dataclasses.replace(MODEL, **(model or {})),
        loop=dataclasses.replace(LOOP, **(loop or {})),
        **settings,
    )


# --- the loss ---


def ids(rng, length):
    return [*rng.integers(4, V, length).tolist(), EOS]


def some_batch(source_lengths=(6, 2, 4), target_lengths=(3, 5, 1), rows=5, seed=0):
    """Of 3 pairs and 2 rows without one; lengths without EOS."""
    rng = np.random.default_rng(seed)
    sources = [ids(rng, length) for length in source_lengths]
    targets = [ids(rng, length) for length in target_lengths]
    return padded_batch(sources, targets, rows, 7, 6)


@functools.lru_cache
def initial_params(tie="all", vocabulary="joint"):
    settings = config(model={"tied_embeddings": tie}, vocabulary=vocabulary)
    return jax.jit(translation_task(settings).init)(jax.random.key(0))


@functools.lru_cache
def forward(settings):
    return jax.jit(lambda params, *given: bind(settings, params)(*given))


@functools.lru_cache
def gradient_of(settings):
    """A compiled function of (params, batch, rng) -> ((loss, metrics), dparams)."""
    return jax.jit(jax.value_and_grad(translation_task(settings).loss, has_aux=True))


def sums_by_hand(settings, params, batch):
    """(smoothed loss, negative log-likelihood, right, tokens), in float64 from the logits."""
    plain = dataclasses.replace(settings, label_smoothing=0.0)  # compiled once
    logits = forward(plain)(params, batch.source, batch.source_lengths, batch.target_inputs)
    sums, smoothing = np.zeros(4), settings.label_smoothing
    for row, length in enumerate(batch.target_lengths):
        for position in range(length):
            at = np.asarray(logits[row, position], np.float64)
            log_p, target = at - np.log(np.sum(np.exp(at))), batch.targets[row, position]
            wanted = np.full(V, smoothing / V)
            wanted[target] += 1 - smoothing
            sums += [-wanted @ log_p, -log_p[target], np.argmax(at) == target, 1]
    return sums


@pytest.mark.parametrize(
    ("smoothing", "tie", "vocabulary"),
    [
        (0.1, "all", "joint"),
        pytest.param(0.25, "output", "separate", marks=pytest.mark.slow),
        pytest.param(0.0, "none", "separate", marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_the_smoothed_cross_entropy_of_real_subwords(smoothing, tie, vocabulary):
    settings = config(
        label_smoothing=smoothing, vocabulary=vocabulary, model={"tied_embeddings": tie}
    )
    params, batch = initial_params(tie, vocabulary), some_batch()
    (loss, metrics), _ = gradient_of(settings)(params, batch, jax.random.key(2))
    smoothed, nats, right, tokens = sums_by_hand(settings, params, batch)
    assert tokens == 4 + 6 + 2
    np.testing.assert_allclose(loss, smoothed / tokens, rtol=1e-5)
    assert set(metrics) == {"negative_log_likelihood", "accuracy"}
    np.testing.assert_allclose(metrics["negative_log_likelihood"], nats / tokens, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], right / tokens, rtol=1e-6)
    assert (abs(smoothed - nats) < 1e-9) == (smoothing == 0)


def test_what_stands_in_padding_is_not_seen():
    settings, batch = config(), some_batch()
    changed = {}
    for name, lengths in (
        ("source", batch.source_lengths),
        ("target_inputs", batch.target_lengths),
        ("targets", batch.target_lengths),
    ):
        array = getattr(batch, name)
        padding = np.arange(array.shape[1])[None, :] >= lengths[:, None]
        changed[name] = np.where(padding, 5, array)
        assert (changed[name] != array).any()
    given, rng = initial_params(), jax.random.key(0)
    plain = gradient_of(settings)(given, batch, rng)
    spoiled = gradient_of(settings)(given, batch._replace(**changed), rng)
    for one, other in zip(*map(jax.tree.leaves, (plain, spoiled)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_batch_of_nothing_costs_nothing():
    settings = config()
    nothing = some_batch((), ())
    found = gradient_of(settings)(initial_params(), nothing, jax.random.key(0))
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(found))


def test_the_rng_is_for_dropout():
    settings = config(model={"dropout_rate": 0.3})
    given = initial_params(), some_batch()
    loss = jax.jit(translation_task(settings).loss)
    first, second, again = (float(loss(*given, jax.random.key(seed))[0]) for seed in (0, 1, 0))
    assert first == again != second
    first, second = (gradient_of(config())(*given, jax.random.key(seed)) for seed in (0, 1))
    assert first[0][0] == second[0][0]


def test_bfloat16_is_what_products_are_computed_in():
    half = config(precision="bfloat16")
    params = jax.eval_shape(translation_task(half).init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}

    def features(params, batch):
        return bind(half, params).features(*batch[:3])

    with jax.numpy_dtype_promotion("standard"):  # in flax's layer normalisation
        assert jax.eval_shape(features, params, some_batch()).dtype == jnp.bfloat16


@pytest.mark.slow
def test_bfloat16_is_close_and_its_sums_are_float32():
    full, half = config(), config(precision="bfloat16")
    losses, gradients = {}, {}
    for settings in (full, half):
        with jax.numpy_dtype_promotion("standard"):
            (loss, metrics), dparams = gradient_of(settings)(
                initial_params(), some_batch(), jax.random.key(0)
            )
        assert loss.dtype == metrics["accuracy"].dtype == jnp.float32
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(dparams))
        losses[settings] = float(loss)
        gradients[settings] = np.concatenate([np.ravel(x) for x in jax.tree.leaves(dparams)])
    assert losses[full] != losses[half] == pytest.approx(losses[full], rel=0.02)
    # 8 bits of mantissa: roundings of 0.4 % that add up over the layers.
    error = np.linalg.norm(gradients[half] - gradients[full]) / np.linalg.norm(gradients[full])
    assert 0 < error < 0.1


# --- the rate ---


def rates(settings, updates, counts):
    with jax.numpy_dtype_promotion("standard"):  # as `train_step` lets optax have it
        schedule = jax.jit(rate_schedule(settings, updates))
        return [float(schedule(jnp.int32(count))) for count in counts]


def test_inverse_square_root_by_hand():
    settings = config(learning_rate=0.5, warmup_steps=4)
    expected = [0.125, 0.25, 0.375, 0.5, 0.5 * (4 / 5) ** 0.5, 0.5 * (4 / 6) ** 0.5]
    np.testing.assert_allclose(rates(settings, 10, range(6)), expected, rtol=1e-6)
    # At 16 times the warm-up a quarter of the highest, however many updates there are.
    np.testing.assert_allclose(rates(settings, 10, [63]), [0.125], rtol=1e-6)
    at_once = config(learning_rate=0.5, warmup_steps=0)
    np.testing.assert_allclose(rates(at_once, 10, [0, 3, 24]), [0.5, 0.25, 0.1], rtol=1e-6)


def test_cosine_by_hand():
    settings = config(learning_rate=0.5, warmup_steps=4, schedule="cosine")
    half = 3**0.5 / 2
    expected = [0, 0.125, 0.25, 0.375, 0.5, 0.25 * (1 + half), 0.375, 0.25, 0.125]
    expected += [0.25 * (1 - half), 0.0]
    np.testing.assert_allclose(rates(settings, 10, range(11)), expected, rtol=1e-6, atol=1e-7)
    at_once = config(learning_rate=0.5, warmup_steps=0, schedule="cosine")
    np.testing.assert_allclose(
        rates(at_once, 4, range(5)),
        [0.5, 0.25 * (1 + 0.5**0.5), 0.25, 0.25 * (1 - 0.5**0.5), 0.0],
        rtol=1e-6,
        atol=1e-7,
    )


def test_a_warm_up_longer_than_the_run_only_rises():
    settings = config(learning_rate=0.5, warmup_steps=20, schedule="cosine")
    np.testing.assert_allclose(rates(settings, 10, [0, 5, 10]), [0, 0.125, 0.25], rtol=1e-6)


# --- the optimiser ---


def adam_by_hand(gradients, w, rate_of, *, clip, decay):
    """Parameters after each update, by the papers' formulas, in float64."""
    first, second, found = 0.0, 0.0, []
    for count, gradient in enumerate(gradients, 1):
        gradient = gradient * min(1, clip / np.linalg.norm(gradient))
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.98**count)) + 1e-9)
        w = w - rate_of(count) * (step + decay * w)
        found.append(w)
    return found


@pytest.mark.parametrize(
    ("accumulate", "schedule", "decay"),
    [(1, "inverse-sqrt", 0.0), (3, "inverse-sqrt", 0.25), (3, "cosine", 0.0)],
)
def test_updates_are_clipped_adam_on_the_mean_gradient(accumulate, schedule, decay):
    steps = 4 * accumulate - 1  # of the fourth update one batch is missing: it is never made
    steps += accumulate == 1
    gradients = np.random.default_rng(0).normal(size=(steps, 5))
    whole = steps // accumulate
    means = gradients[: whole * accumulate].reshape(whole, accumulate, 5).mean(1)
    clip = float(np.median(np.linalg.norm(means, axis=1)))  # some are clipped, some are not
    settings = config(
        accumulate=accumulate, schedule=schedule, weight_decay=decay, clip_norm=clip,
        learning_rate=0.5, warmup_steps=2, loop={"steps": steps},
    )  # fmt: skip
    start = np.array([1.0, -2.0, 0.5, 3.0, -0.25])
    made = optimizer(settings)
    params = {"w": jnp.asarray(start, jnp.float32)}
    state, found = made.init(params), []

    @jax.jit
    def update(gradient, state, params):
        updates, state = made.update({"w": gradient}, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):
            params, state = update(gradient.astype(np.float32), state, params)
        found.append(np.asarray(params["w"]))
    rate_of = {
        "inverse-sqrt": lambda count: 0.5 * min(count / 2, (2 / count) ** 0.5),
        # Updates 1, 2, ... are made at counts 0, 1, ...; 4 updates in all, a warm-up of 2.
        "cosine": lambda count: [0, 0.25, 0.5, 0.25, 0][count - 1],
    }[schedule]
    expected = adam_by_hand(means, start, rate_of, clip=clip, decay=decay)
    for step, w in enumerate(found):
        done = (step + 1) // accumulate
        by_hand = expected[done - 1] if done else start
        np.testing.assert_allclose(w, by_hand, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
    assert len(expected) == (4 if accumulate == 1 else 3)


def moments(state):
    """Adam's mean of the gradients: linear in them, as the parameters are not."""
    kinds = jax.tree.leaves(state, is_leaf=lambda part: hasattr(part, "mu"))
    (found,) = [part.mu for part in kinds if hasattr(part, "mu")]
    return jax.tree.leaves(found)


def test_accumulated_batches_are_one_large_batch():
    """Where they have as many subwords: the mean of means is then the mean of all."""
    parts = [some_batch((6, 2), (3, 5)), some_batch((1, 4), (4, 4), seed=1)]
    assert [int(part.target_lengths.sum()) for part in parts] == [10, 10]
    nobody = some_batch((), (), rows=1)
    whole = jax.tree.map(lambda a, b, c: np.concatenate([a[:2], b[:2], c]), *parts, nobody)
    params, found = initial_params(), {}
    for accumulate, batches in ((1, [whole]), (2, parts)):
        made = optimizer(config(accumulate=accumulate, clip_norm=1e3))
        state, update, found[accumulate] = jax.jit(made.init)(params), jax.jit(made.update), []
        for batch in batches:
            _, dparams = gradient_of(config())(params, batch, jax.random.key(0))
            with jax.numpy_dtype_promotion("standard"):
                updates, state = update(dparams, state, params)
            found[accumulate].append((jax.tree.leaves(updates), moments(state)))
    nothing_yet, end = found[2]
    assert not any(np.any(leaf) for leaves in nothing_yet for leaf in leaves)
    ((large_updates, large_moments),) = found[1]
    for one, other in zip(large_moments, end[1], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-7)
    assert max(np.abs(leaf).max() for leaf in end[1]) > 1e-3
    for one, other, moment in zip(large_updates, end[0], large_moments, strict=True):
        # Adam's first step is as long either way, wherever the gradient is more than rounding.
        clear = np.abs(moment) > 1e-6
        np.testing.assert_allclose(np.asarray(other)[clear], np.asarray(one)[clear], rtol=1e-3)
