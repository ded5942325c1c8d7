"""A finished run goes on with more steps, where its schedule does not depend on their number."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from command_lines import call, load
from saved_files import assert_bits_equal

from attention_jax.nn import ModelConfig
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.run_folder import RunFolder
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.task import ReversalConfig, optimizer
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.task import TranslationConfig
from attention_jax.training.loop import LoopConfig
from attention_jax.training.resuming import resumable_settings
from attention_jax.training.run import load_states, train_run

SMALL = {"dim": 8, "hidden_dim": 7, "encoder_layers": 0, "decoder_self_attention": False}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam counts in int32 and multiplies floats by it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def config(steps, schedule="constant", **settings):
    return ReversalConfig(
        model=dataclasses.replace(ModelConfig(score="dot"), **SMALL),
        loop=LoopConfig(seeds=2, steps=steps, log_every=2, checkpoint_every=4, keep=9),
        batch_size=5,
        max_length=3,
        schedule=schedule,
        **settings,
    )


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("at_once")
    with jax.numpy_dtype_promotion("standard"):
        train_run(REVERSAL, config(12), folder)
    return folder


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extended")
    with jax.numpy_dtype_promotion("standard"):
        for steps in (4, 6, 12):
            trained = train_run(REVERSAL, config(steps), folder, resume=True)
            assert trained.step == steps
            assert json.loads((folder / "config.json").read_text())["loop"]["steps"] == steps
    return folder


def test_a_constant_rate_stays():
    made = optimizer(config(10, learning_rate=0.5))
    updated = jax.jit(made.update)
    params, gradient = np.zeros(2, np.float32), np.array([3.0, -4.0], np.float32)
    state = jax.jit(made.init)(params)
    for _ in range(15):
        update, state = updated(gradient, state, params)
        np.testing.assert_allclose(update, [-0.5, 0.5], atol=1e-5)


def test_an_extended_run_is_the_run_of_so_many_steps(at_once, extended):
    states = [load_states(REVERSAL, folder)[1][12]() for folder in (at_once, extended)]
    assert_bits_equal(*states)  # parameters, optimiser state, step and seed
    for name in ("config.json", "metrics.jsonl"):
        assert (at_once / name).read_bytes() == (extended / name).read_bytes()
    sessions = read_lines(extended / "timing.jsonl")
    assert [(line["from_step"], line["to_step"]) for line in sessions] == [(0, 4), (4, 6), (6, 12)]
    losses = [line["loss"] for line in read_lines(extended / "metrics.jsonl")]
    assert len(np.unique(losses)) == 12  # each call trains on, with new batches


def test_a_run_is_not_shortened_below_what_it_has_reached(extended):
    before = contents(extended)
    message = rf"^workdir {extended}: steps must be at least 12, which the run has reached; got 10$"
    with pytest.raises(ValueError, match=message):
        train_run(REVERSAL, config(10), extended, resume=True)
    other = dataclasses.replace(config(14), batch_size=6)
    with pytest.raises(ValueError, match=r"configuration: batch_size was 5, now 6\. Resume"):
        train_run(REVERSAL, other, extended, resume=True)
    assert contents(extended) == before


@pytest.mark.parametrize(
    ("definition", "cosine", "extendable"),
    [
        (REVERSAL, config(8, "cosine"), "constant"),
        (TRANSLATION, TranslationConfig(
            source=Path("a"), target=Path("b"), schedule="cosine", loop=LoopConfig(steps=8)
        ), "inverse-sqrt"),
    ],
)  # fmt: skip
def test_what_each_schedule_allows(definition, cosine, extendable, tmp_path):
    def steps_taken(start, steps, reached):
        """The steps that a run of `start` resumes with, asked for `steps`."""
        folder = RunFolder(tmp_path / f"{start.schedule}-{reached}")
        (folder.checkpoints / str(reached)).mkdir(parents=True, exist_ok=True)
        loop = dataclasses.replace(start.loop, steps=steps)
        settings = dataclasses.replace(start, loop=loop).to_json()
        stored = json.loads(json.dumps(start.to_json()))
        return resumable_settings(definition, settings, stored, folder)["loop"]["steps"]

    free = dataclasses.replace(cosine, schedule=extendable)
    assert [steps_taken(free, steps, 4) for steps in (4, 6, 8, 30)] == [4, 6, 8, 30]
    with pytest.raises(ValueError, match="must be at least 4, which the run has reached; got 3"):
        steps_taken(free, 3, 4)
    assert steps_taken(cosine, 8, 4) == 8
    for steps in (6, 30):
        with pytest.raises(ValueError, match=f"was 8, now {steps}. Resume with the same") as raised:
            steps_taken(cosine, steps, 4)
        assert "falls along a cosine to 0 at step 8 (runs with schedule " in str(raised.value)
        assert f"{extendable} can be extended); for {steps} steps, train anew" in str(raised.value)


def test_a_task_that_says_nothing_has_fixed_steps(extended):
    default = {field.name: field.default for field in dataclasses.fields(REVERSAL)}
    silent = dataclasses.replace(REVERSAL, why_steps_are_fixed=default["why_steps_are_fixed"])
    with pytest.raises(ValueError, match="the task does not say that its training is independent"):
        train_run(silent, config(14), extended, resume=True)


def test_the_script_extends_and_says_why_not(extended, tmp_path, monkeypatch, capsys):
    train, folder = load("scripts/train.py"), tmp_path / "extended"
    shutil.copytree(extended, folder)
    options = [
        "--score", "dot", "--dim", 8, "--hidden-dim", 7, "--encoder-layers", 0,
        "--no-decoder-self-attention", "--seeds", 2, "--log-every", 2, "--checkpoint-every", 4,
        "--keep", 9, "--batch-size", 5, "--max-length", 3, "--normalizer", "softmax",
        "--position-anchor", "start", "--position-draw", "none", "--position-limit", 512,
        "--max-wavelength", 10000, "--min-wavelength", 1, "--position-scale", 1,
    ]  # fmt: skip
    words = ["--workdir", folder, "--resume", "--schedule", "constant", *options]
    assert call(train, *words, "--steps", 14, monkeypatch=monkeypatch) == 0
    assert f"{folder}: step 14 of 14" in capsys.readouterr().out
    assert call(train, *words, "--steps", 2, monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == (
        f"error: workdir {folder}: steps must be at least 14, which the run has reached; got 2\n"
    )
    RunFolder(tmp_path / "run").create(config(14, "cosine").to_json(), resume=False)
    words = ["--workdir", tmp_path / "run", "--resume", *options]
    assert call(train, *words, "--steps", 20, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "since the learning rate falls along a cosine to 0 at step 14" in printed
