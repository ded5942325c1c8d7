"""What is measured at checkpoints: when, what is best, and all of it resumed."""

import dataclasses
import functools
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from saved_files import assert_bits_equal, without_speed
from toy_task import Toy, train_toy

from attention_jax.nn import ModelConfig
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import add_line, read_lines
from attention_jax.tasks.recall import Recall
from attention_jax.tasks.regression import Regression
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.text import Text
from attention_jax.training.run import train_run
from attention_jax.training.settings import check_task
from attention_jax.training.step import initial_state
from attention_jax.training.task import Feed, TrainConfig, Validation

SHORT = {"seeds": 2, "log_every": 1, "checkpoint_every": 2, "batch_size": None}
LOOP = TrainConfig(**SHORT, steps=11, keep=2, keep_best=1)
CURVE = {2: 5.0, 4: 3.0, 6: 1.0, 8: 4.0, 10: 6.0, 11: 2.0}


@dataclasses.dataclass(frozen=True)
class Counting(Toy):
    """One number that falls by 1 a step: parameters tell how many steps there were.

    Its validation reads the curve's number, 1 less for one seed and 1 more for the other.
    """

    train: TrainConfig = LOOP
    larger: bool = False
    validated: bool = True

    # What a test sets: a step during which a signal comes ("start": before the first), and a curve.
    stop: ClassVar[int | str | None] = None
    curve: ClassVar[dict[int, float]] = CURVE
    seen: ClassVar[list[int]] = []
    slow: ClassVar[float] = 0.0  # seconds of a validation

    def optimizer(self):
        return optax.sgd(1.0)

    def init(self, rng):
        del rng
        return {"w": jnp.zeros(())}

    def feed(self, folder, *, multiple_of=1):
        return Feed(self.batch_of)

    def batch_of(self, seed, step):
        if (seed, step + 1) == (1, self.stop):
            os.kill(os.getpid(), signal.SIGTERM)
        return np.ones(3, np.float32)

    def loss(self, params, batch, rng):
        del rng
        return params["w"] * jnp.mean(batch), {}

    @property
    def validation(self):
        return Validation("score", self.larger) if self.validated else None

    def validate(self, params, folder):
        time.sleep(self.slow)
        (step,) = {round(-float(w)) for w in params["w"]}
        self.seen.append(step)
        return {"other": [0.25, 0.75], "score": [self.curve[step] - 1, self.curve[step] + 1]}


def run(folder, curve=CURVE, *, stop=None, **settings):
    """Trains or resumes; the steps of the validations are in `Counting.seen`."""
    Counting.seen.clear()
    with (
        Interruption() as interruption,
        mock.patch.object(Counting, "stop", stop),
        mock.patch.object(Counting, "curve", curve or CURVE),
    ):
        if stop == "start":
            interruption.exit_status = 128 + signal.SIGTERM
        task = Counting(validated=curve is not None, **settings)
        return train_toy(task, folder, interruption=interruption)


def steps_of(folder):
    return [line["step"] for line in read_lines(folder / "validation.jsonl")]


def content(folder):
    return {name: without_speed(folder / name) for name in ("validation.jsonl", "metrics.jsonl")}


def kept(folder):
    """The steps that are kept, and the best."""
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    return checkpoints.steps(), checkpoints.best_step()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return run(folder), folder


# --- when, and what is written ---


def test_lines_at_checkpoints_and_at_the_end(straight, tmp_path):
    reached, folder = straight
    assert reached.step == 11
    lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": step, "other": [0.25, 0.75], "score": [number - 1, number + 1]}
        for step, number in CURVE.items()
    ]
    # And training is what it is without.
    alone = run(tmp_path, None)
    assert not (tmp_path / "validation.jsonl").exists()
    assert_bits_equal(reached.state, alone.state)
    assert content(folder)["metrics.jsonl"] == without_speed(tmp_path / "metrics.jsonl")
    # The best has the best metric, or without validation the smallest loss.
    assert kept(folder) == ([6, 10, 11], 6)
    assert kept(tmp_path) == ([10, 11], 11)


def test_at_the_last_step_there_is_nothing_to_stop(tmp_path, capsys):
    short = TrainConfig(**{**SHORT, "log_every": 2}, steps=4, keep=1, keep_best=1)
    reached = run(tmp_path, {2: 4.0, 4: 2.0}, train=short, larger=True)
    assert reached.step == 4
    assert steps_of(tmp_path) == [2, 4]  # once
    assert kept(tmp_path) == ([2, 4], 2)
    assert "toy: step 2, validation: other 0.5, score 4" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("stop", "reached", "lines"),
    [
        ("start", 0, []),
        (5, 5, [2, 4]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((6, 6, [2, 4, 6]), (11, 11, [2, 4, 6, 8, 10, 11]))
        ),
    ],
)
def test_a_stop_on_the_way_is_not_measured(tmp_path, straight, stop, reached, lines):
    stopped = run(tmp_path, stop=stop)
    assert (stopped.step, stopped.interrupted) == (reached, 143)
    assert steps_of(tmp_path) == lines
    steps, best = kept(tmp_path)
    assert max(steps) == reached
    assert best == min(lines, key=CURVE.get, default=None)
    assert run(tmp_path).step == 11
    assert content(tmp_path) == content(straight[1])
    assert kept(tmp_path) == kept(straight[1])


@pytest.mark.parametrize(
    "result", [None, {"score": [1.0]}, {"score": 1.0}, {"other": [1.0, 2.0]}, {"step": [1.0, 2.0]}]
)
def test_an_error_of_the_task_loses_no_step(tmp_path, monkeypatch, result, straight):
    monkeypatch.setattr(Counting, "validate", lambda *_: result)
    with pytest.raises(ValueError, match="validate\\(params, folder\\)"):
        run(tmp_path)
    assert kept(tmp_path) == ([2], None)
    monkeypatch.undo()
    assert_bits_equal(run(tmp_path).state, straight[0].state)
    assert content(tmp_path) == content(straight[1])  # the validation that failed is there


def test_a_validation_that_comes_later_deletes_nothing(tmp_path):
    with mock.patch.object(Counting, "validation", None):
        run(tmp_path, stop=10)
    with (tmp_path / "timing.jsonl").open("a") as file:
        file.write('{"from_step": 0, "to')  # a crash
    with mock.patch.object(Counting, "validate", None), pytest.raises(TypeError):
        run(tmp_path)
    assert kept(tmp_path) == ([8, 10], 10)
    add_line(tmp_path / "validation.jsonl", {"step": 10, "of another metric": [1.0, 2.0]})
    run(tmp_path, stop="start")
    assert steps_of(tmp_path) == [10, 10]
    assert kept(tmp_path)[0] == [8, 10]
    run(tmp_path)
    ends = [(x["from_step"], x.get("to_step")) for x in read_lines(tmp_path / "timing.jsonl")]
    assert ends == [(0, 10), (10, None), (10, 11)]  # the second one failed


def test_a_kill_between_a_line_and_its_checkpoint_forgets_no_metric(tmp_path, monkeypatch):
    curve = {**CURVE, 2: 0.5}
    with mock.patch.object(Counting, "validate", None), pytest.raises(TypeError):
        run(tmp_path, curve)
    assert kept(tmp_path) == ([2], None)
    with mock.patch.object(Checkpoints, "save", None), pytest.raises(TypeError):
        run(tmp_path, curve)
    assert steps_of(tmp_path) == [2]
    run(tmp_path, curve)
    assert steps_of(tmp_path) == [2, 4, 6, 8, 10, 11]
    assert kept(tmp_path)[1] == 2


def test_the_speed_is_that_of_training(tmp_path, monkeypatch):
    monkeypatch.setattr(Counting, "slow", 0.3)
    run(tmp_path)
    (line,) = read_lines(tmp_path / "timing.jsonl")
    validations = len(CURVE) * Counting.slow
    assert line["seconds"] > validations
    assert 2 * 10 / line["steps_per_second"] < validations  # without the first call


# --- the best checkpoint ---


def test_what_is_no_number_is_never_the_best(tmp_path):
    """Neither at first nor later, nor in a resumed run."""
    rule = Validation("score", larger_is_better=True)
    assert rule.loss({"score": [math.inf, math.nan]}) == math.inf
    assert rule.loss({"score": [3.0, 1.0, math.nan, math.inf]}) == -2.0
    curve = {**CURVE, 2: math.nan, 4: 3.0, 6: 3.0, 8: math.nan, 10: 3.0, 11: 4.0}
    run(tmp_path, curve, stop=9)
    run(tmp_path, curve, train=dataclasses.replace(LOOP, keep=3))
    assert steps_of(tmp_path) == [2, 4, 6, 8, 10, 11]
    assert kept(tmp_path) == ([8, 10, 11], 10)  # of equal ones the newest; that of the stop is gone
    line = json.loads((tmp_path / "validation.jsonl").read_text().splitlines()[0])
    assert line["score"] == [None, None]


@dataclasses.dataclass(frozen=True)
class Diverging(Counting):
    """The loss of seed 1 is no number after the first step."""

    def batch_of(self, seed, step):
        return np.full(3, math.nan if (seed, step) == (1, 1) else 1, np.float32)


def test_a_seed_that_diverges_hides_no_best_checkpoint(tmp_path):
    (tmp_path / "mine.jsonl").symlink_to("/proc/version")  # a file that nobody may write
    train_toy(Diverging(validated=False), tmp_path)  # the loss of seed 0 falls
    assert kept(tmp_path) == ([10, 11], 11)


# --- tasks that draw their examples ---

DRAWN = TrainConfig(
    seeds=2, steps=6, batch_size=4, schedule="constant", log_every=2, checkpoint_every=2,
    keep_best=1, validate_on=16,
)  # fmt: skip
DECODER = ModelConfig("decoder", dim=4, hidden_dim=0, positions="none")
ENCODER = dataclasses.replace(DECODER, architecture="encoder-decoder", encoder_layers=0)


class MyRecall(Recall):
    """A task of a user."""


TASKS = {
    "exact match (%)": Reversal(ENCODER, DRAWN, min_length=3, max_length=3),
    "accuracy (%)": MyRecall(DECODER, DRAWN, length=8, pairs=2, vocabulary_size=8),
    "squared error": Regression(DECODER, DRAWN, points=3),
}


@pytest.mark.parametrize("name", TASKS)
def test_all_checkpoints_and_seeds_are_validated_on_the_same_fresh_examples(name, tmp_path):
    """Which are not those of `evaluate`; and all validations of a run have one program."""
    task, drawn = TASKS[name], []
    draw = type(task).batch

    def batch(self, rng, **options):
        jax.debug.callback(lambda key: drawn.append(key.tolist()), jax.random.key_data(rng))
        return draw(self, rng, **options)

    params = initial_state(task).params
    equal = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), params)
    with mock.patch.object(type(task), "batch", batch):
        lines = [task.validate(equal, tmp_path)]
        with mock.patch("attention_jax.nn.Model.features", None):
            lines.append(task.validate(equal, tmp_path))
        jax.effects_barrier()
        assert drawn[0] == drawn[1]
        task.evaluate(params)
        jax.effects_barrier()
    assert len(drawn) > 2
    assert drawn[0] not in drawn[2:]
    assert lines[0] == lines[1] == {name: [lines[0][name][0]] * 2}
    assert task.validation == Validation(name, name != "squared error")


@pytest.mark.parametrize("cls", [Recall, MyRecall])
def test_runs_of_another_rate_share_the_programs_of_results(cls):
    """But those of a user's task, which may read what no field holds, are made anew."""
    task = cls(DECODER, DRAWN, length=8, pairs=2, vocabulary_size=8)
    other = dataclasses.replace(task, train=dataclasses.replace(DRAWN, learning_rate=0.1))
    params = initial_state(task).params
    result = task.evaluate(params)
    with mock.patch("attention_jax.nn.Model.features", None):
        if cls is Recall:
            assert other.evaluate(params) == result
        else:
            with pytest.raises(TypeError):
                task.evaluate(params)


def test_a_resumed_run_may_validate_from_now_on(tmp_path):
    task, before = TASKS["squared error"], {"steps": 2, "validate_on": 0}
    train_run(dataclasses.replace(task, train=dataclasses.replace(DRAWN, **before)), tmp_path)
    assert steps_of(tmp_path) == []
    run = train_run(task, tmp_path, resume=True)
    *lines, last = read_lines(tmp_path / "validation.jsonl")
    assert [line["step"] for line in lines] == [2, 4]
    assert last == {"step": 6, **task.validate(run.params, tmp_path)}


@pytest.mark.parametrize("cls", [Toy, functools.partial(Text, Path("text.txt"))])
def test_a_task_that_draws_no_examples_for_validation_says_so(cls):
    with pytest.raises(ValueError, match=r"validate_on must be 0: task .* draws; got 16"):
        check_task(cls(train=DRAWN))
