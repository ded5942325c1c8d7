"""A training run in a folder, from its configuration to its resumption."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal

import jax
import numpy as np
import pytest
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.task import (
    VOCABULARY,
    ReversalConfig,
    bind,
    reversal_task,
)

from attention_jax.nn import ModelConfig
from attention_jax.runs.metrics_file import MetricsFile, read_lines
from attention_jax.training.loop import LoopConfig
from attention_jax.training.run import load_run, train_run


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam counts in int32 and multiplies floats by it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def config(
    *, steps=200, log_every=50, checkpoint_every=100, seeds=2, score="scaled", model=None, **others
):
    loop = LoopConfig(
        seeds=seeds, steps=steps, log_every=log_every, checkpoint_every=checkpoint_every
    )
    small = {"dim": 8, "hidden_dim": 7, "encoder_layers": 0, "decoder_self_attention": False}
    model = dataclasses.replace(ModelConfig(score=score), **{**small, **(model or {})})
    defaults = {"batch_size": 32, "min_length": 1, "max_length": 3, "learning_rate": 0.02}
    return ReversalConfig(model=model, loop=loop, **{**defaults, **others})


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- the task ---


def normal_params(settings):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(reversal_task(settings).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)


@functools.cache
def some_batch():
    batch = jax.jit(reversal_task(config(batch_size=5)).batch)(jax.random.key(1))
    return jax.tree.map(np.asarray, batch)


@functools.cache
def output_of(**model):
    """The model's own output: logits, and with coverage the weights too."""
    settings = config(score="additive", model=model)
    options = {"return_weights": True} if "attention" in model else {}
    forward = jax.jit(lambda params, *given: bind(settings.model, params)(*given, **options))
    batch = some_batch()
    params = normal_params(settings)
    return forward(params, batch.source, batch.source_lengths, batch.target_inputs)


@functools.cache
def losses_of(weight=0.0, **model):
    """The task's (loss, metrics) for the seeds 0, 1 and 0 of dropout."""
    settings = config(score="additive", model=model, coverage_weight=weight)
    loss, params = jax.jit(reversal_task(settings).loss), normal_params(settings)
    found = [loss(params, some_batch(), jax.random.key(seed)) for seed in (0, 1, 0)]
    return jax.tree.map(lambda *values: np.stack(values), *found)


def test_the_loss_is_the_models_cross_entropy_of_real_tokens():
    batch, ((loss, *_), metrics), logits = some_batch(), losses_of(), output_of()
    assert batch.source.shape == (5, 4)  # SOS and up to 3 letters
    nats, right = [], []
    for row in range(5):
        for position in range(int(batch.source_lengths[row])):  # as many as letters and EOS
            at = np.asarray(logits[row, position], np.float64)
            target = int(batch.targets[row, position])
            nats.append(np.log(np.sum(np.exp(at))) - at[target])
            right.append(np.argmax(at) == target)
    assert len(nats) < batch.targets.size  # there is padding
    np.testing.assert_allclose(loss, np.mean(nats), rtol=1e-5)
    assert list(metrics) == ["accuracy"]
    np.testing.assert_allclose(metrics["accuracy"][0], np.mean(right), rtol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_the_coverage_loss_counts_with_its_weight(weight):
    kind, batch = {"attention": "coverage", "decoder_layers": 2}, some_batch()
    (losses, metrics), (logits, weights) = losses_of(weight, **kind), output_of(**kind)
    nats, again = [], []
    for row in range(5):
        for position in range(int(batch.target_lengths[row])):
            at = np.asarray(logits[row, position], np.float64)
            nats.append(np.log(np.sum(np.exp(at))) - at[int(batch.targets[row, position])])
            for layer in np.asarray(weights[:, row], np.float64):  # [T, S]
                before = layer[:position].sum(0)
                again.append(np.minimum(layer[position], before).sum())
    assert np.mean(again) > 0.1
    np.testing.assert_allclose(metrics["coverage_loss"][0], np.mean(again), rtol=1e-5)
    np.testing.assert_allclose(losses[0], np.mean(nats) + weight * np.mean(again), rtol=1e-5)
    assert list(metrics) == ["accuracy", "coverage_loss"]


def test_the_rng_is_for_dropout():
    (without, _), (dropped, _) = losses_of(), losses_of(dropout_rate=0.3)
    assert len(set(without.tolist())) == 1
    assert dropped[0] == dropped[2] != dropped[1]


def test_bound_models_are_of_their_own_configuration():
    scores = {}
    for score in ("additive", "general"):
        settings = config(score=score)
        params = jax.eval_shape(reversal_task(settings).init, jax.random.key(0))
        scores[score] = str(bind(settings.model, params).decoder[0].cross_attention.attention.score)
    assert scores == {"additive": "Additive(hidden_dim=None)", "general": "General()"}


# --- runs ---


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with jax.numpy_dtype_promotion("standard"):
        return train_run(REVERSAL, config(), folder), folder


def test_a_run(never_stopped):
    trained, folder = never_stopped
    assert trained.step == 200
    assert trained.interrupted == 0
    assert trained.seconds > 0
    assert trained.steps_per_second > 0
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [50, 100, 150, 200]
    line = read_lines(folder / "metrics.jsonl")[0]
    assert set(line) == {"step", "loss", "accuracy", "gradient_norm"}
    # 29 tokens: the loss of a guess is log 29 = 3.37.
    assert line["loss"] == pytest.approx([np.log(VOCABULARY.size)] * 2, abs=1)
    assert json.loads((folder / "env.json").read_text())["packages"]["jax"] == jax.__version__
    loaded = load_run(REVERSAL, folder)
    assert loaded.config == config()
    assert loaded.step == 200
    assert_same_bits(loaded.params, trained.params)


def test_crashed_stopped_and_resumed_is_bit_identical(tmp_path, monkeypatch, never_stopped):
    with monkeypatch.context() as patched:
        patched.setattr("attention_jax.training.run.train", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run(REVERSAL, config(), tmp_path)
    assert (tmp_path / "config.json").exists()
    with pytest.raises(ValueError, match="has no checkpoint yet; train it first"):
        load_run(REVERSAL, tmp_path)

    write = MetricsFile.write

    def write_and_signal(self, step, metrics):
        write(self, step, metrics)
        if step in (50, 200):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsFile, "write", write_and_signal)
    stopped = train_run(REVERSAL, config(), tmp_path, resume=True)
    assert (stopped.step, stopped.interrupted) == (50, 143)
    assert load_run(REVERSAL, tmp_path).step == 50

    resumed = train_run(REVERSAL, config(), tmp_path, resume=True)
    # The signal that came with the last step cost nothing; what comes next is the caller's choice.
    assert (resumed.step, resumed.interrupted) == (200, 143)
    trained, folder = never_stopped
    assert_same_bits(resumed.params, trained.params)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    sessions = read_lines(tmp_path / "timing.jsonl")
    assert [(line["from_step"], line["to_step"]) for line in sessions] == [(0, 50), (50, 200)]


def test_resuming_a_finished_run_keeps_it(never_stopped):
    trained, folder = never_stopped
    before = (folder / "metrics.jsonl").read_bytes()
    again = train_run(REVERSAL, config(), folder, resume=True)
    assert_same_bits(again.params, trained.params)
    assert again.steps_per_second is None
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert load_run(REVERSAL, folder).step == 200


def test_resuming_with_another_configuration_changes_nothing(never_stopped):
    _, folder = never_stopped
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"loop.seeds was 2, now 3"):
        train_run(REVERSAL, config(seeds=3), folder, resume=True)
    with pytest.raises(ValueError, match="add resume=True"):
        train_run(REVERSAL, config(), folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_nothing_to_load(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_run(REVERSAL, tmp_path / "nowhere")


def test_without_tensorboard_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package tensorboardX"):
        train_run(REVERSAL, config(), tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_a_tiny_model_learns(never_stopped):
    lines = read_lines(never_stopped[1] / "metrics.jsonl")
    for seed in range(2):
        losses = [line["loss"][seed] for line in lines]
        assert losses == sorted(losses, reverse=True)
        # Better than knowing lengths and letter frequencies only: of 2 letters and EOS in the mean,
        # the letters would cost log 26 = 3.26 nats each, 2.17 a token.
        assert losses[-1] < 2.0
        assert lines[-1]["accuracy"][seed] > lines[0]["accuracy"][seed] + 0.1
