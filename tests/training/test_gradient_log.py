"""Statistics taken beside training: when, of what, and without a trace in the training itself."""

import os
import runpy
import shutil
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.analysis.learning_statistics import learning_statistics
from attention_jax.nn import ModelConfig
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import MetricsFile, read_lines
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.task import (
    ReversalConfig,
    ReversalRun,
    bind,
    reversal_task,
)
from attention_jax.training.gradient_log import GradientLog, check_log_gradients
from attention_jax.training.loop import (
    LoopConfig,
    Records,
    Task,
    Training,
    TrainState,
    initial_state,
    train,
)
from attention_jax.training.run import train_run

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- the loop, on a toy task ---


def toy_loss(params, batch, rng):
    del rng
    return jnp.mean((batch @ params["w"] - 1) ** 2), {}


def numbers(rng, count):
    """Numbers that differ from key to key: those of a generator take long to compile."""
    phase = (jax.random.key_data(rng) % jnp.uint32(1009)).astype(jnp.float32)
    return jnp.sin(1.3 * jnp.arange(count, dtype=jnp.float32) ** 2 + phase[0] + 0.01 * phase[1])


TOY = Task(lambda rng: {"w": numbers(rng, 3)}, lambda rng: numbers(rng, 21).reshape(7, 3), toy_loss)


def toy_statistics(loss, params, batch, rng):
    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, rng)
    return {"value": value, "gradient": optax.tree.norm(gradient)}


class Silent:
    """Stands where Progress stands: may ask to stop."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at

    def update(self, step, metrics):
        if step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


def toy_run(folder, config, *, every=None, stop_at=None):
    folder.mkdir(exist_ok=True)
    optimizer = optax.sgd(0.05)
    with Interruption() as interruption, Checkpoints(folder / "checkpoints") as checkpoints:
        state = initial_state(TOY, optimizer, config)
        restored = checkpoints.restore(state)
        state = state if restored is None else restored.state
        step = int(state.step[0])
        with (
            MetricsFile(folder / "metrics.jsonl", after_step=step) as metrics,
            MetricsFile(folder / "gradients.jsonl", after_step=step if step else -1) as file,
        ):
            log = None if every is None else GradientLog(every, toy_statistics, file)
            records = Records(checkpoints, Silent(stop_at), metrics, log)
            return train(Training(TOY, optimizer, config), state, records, interruption)


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(7, 4, [0, 4, 7]), (3, 100, [0, 3])],
)
def test_the_first_and_the_last_step_and_every_so_many(tmp_path, steps, every, expected):
    config = LoopConfig(seeds=2, steps=steps, log_every=1, checkpoint_every=100)
    with_log = toy_run(tmp_path / "with", config, every=every)
    without = toy_run(tmp_path / "without", config)
    assert_same_bits(with_log, without)
    metrics = (tmp_path / "with" / "metrics.jsonl").read_bytes()
    assert metrics == (tmp_path / "without" / "metrics.jsonl").read_bytes()

    lines = read_lines(tmp_path / "with" / "gradients.jsonl")
    assert [line["step"] for line in lines] == expected
    # They are of the batch that the next step learns from, and of the parameters before it.
    of_step = {line["step"]: line for line in read_lines(tmp_path / "with" / "metrics.jsonl")}
    for line in lines[:-1]:
        following = of_step[line["step"] + 1]
        np.testing.assert_allclose(line["value"], following["loss"], rtol=1e-5)
        np.testing.assert_allclose(line["gradient"], following["gradient_norm"], rtol=1e-5)
    assert len(set(lines[-1]["value"])) == 2  # one for each seed


LOOP = LoopConfig(seeds=2, steps=10, log_every=2, checkpoint_every=4)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("never")
    return toy_run(folder, LOOP, every=4), folder


@pytest.mark.parametrize("stop_at", [2, 8, 10])
def test_stopped_and_resumed_it_is_as_if_never_stopped(tmp_path, never_stopped, stop_at):
    stopped = toy_run(tmp_path, LOOP, every=4, stop_at=stop_at)
    assert int(stopped.step[0]) == stop_at
    resumed = toy_run(tmp_path, LOOP, every=4)
    expected, folder = never_stopped
    assert_same_bits(resumed, expected)
    for name in ("gradients.jsonl", "metrics.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert [line["step"] for line in read_lines(tmp_path / "gradients.jsonl")] == [0, 4, 8, 10]


@pytest.mark.parametrize("every", [0, -2, 3, 1])
def test_as_often_as_cannot_be(every):
    with pytest.raises(
        ValueError, match=f"must be a positive multiple of log_every 2; got {every}"
    ):
        check_log_gradients(every, 2)
    check_log_gradients(4, 2)


# --- a run of the reversal task ---


CONFIG = ReversalConfig(
    model=ModelConfig(dim=4, hidden_dim=3, encoder_layers=0, decoder_self_attention=False),
    loop=LoopConfig(seeds=2, steps=6, log_every=2, checkpoint_every=4),
    batch_size=5,
    min_length=1,
    max_length=3,
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam counts in int32 and multiplies floats by it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    with jax.numpy_dtype_promotion("standard"):
        return train_run(REVERSAL, CONFIG, folder, log_gradients=4), folder


def test_a_run_with_a_log_is_the_run_without(tmp_path, logged):
    trained, folder = logged
    without = train_run(REVERSAL, CONFIG, tmp_path)
    assert_same_bits(trained.params, without.params)
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "metrics.jsonl").read_bytes()
    assert (folder / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert not (tmp_path / "gradients.jsonl").exists()


def test_lines_are_learning_statistics_of_each_seed(logged):
    trained, folder = logged
    lines = read_lines(folder / "gradients.jsonl")
    assert [line["step"] for line in lines] == [0, 4, 6]
    task = reversal_task(CONFIG)

    @jax.jit
    def last_batch(seed, params):
        """The batch after step 6, its loss, and the weights of the model."""
        root = jax.random.key(seed)
        batch = task.batch(jax.random.fold_in(jax.random.fold_in(root, 1), 6))
        rng = jax.random.fold_in(jax.random.fold_in(root, 2), 6)
        source, lengths, inputs = batch.source, batch.source_lengths, batch.target_inputs
        _, weights = bind(CONFIG.model, params)(source, lengths, inputs, return_weights=True)
        return batch, task.loss(params, batch, rng)[0], weights[0]

    for seed in range(2):
        params = jax.tree.map(lambda leaf, seed=seed: np.asarray(leaf)[seed], trained.params)
        batch, loss, weights = last_batch(seed, params)
        np.testing.assert_allclose(lines[-1]["loss"][seed], loss, rtol=1e-5)
        # The entropy of what real queries attend to, of the weights that the model returns.
        weights = np.asarray(weights, np.float64)  # [B, T, S]
        entropy = -np.sum(weights * np.log(np.where(weights, weights, 1)), -1)
        real = np.arange(weights.shape[1]) < np.asarray(batch.target_lengths)[:, None]
        real &= np.asarray(batch.source_lengths)[:, None] >= 2  # with keys to choose from
        got = lines[-1]["decoder_0/cross_attention/entropy"][seed]
        np.testing.assert_allclose(got, entropy[real].mean(), rtol=1e-4)
        assert got != pytest.approx(entropy.mean(), rel=1e-4)
    given = params, batch, jax.random.key(0)
    names = jax.eval_shape(lambda *x: learning_statistics(task.loss, *x), *given)
    assert lines[0].keys() == lines[-1].keys() == {"step", *names}


def stopped_before_training(monkeypatch, folder):
    """The script's part alone: which lines a resumed run finds."""
    with monkeypatch.context() as patched:
        patched.setattr("attention_jax.training.run.train", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run(REVERSAL, CONFIG, folder, resume=True, log_gradients=4)


def test_after_a_crash_only_what_comes_after_the_checkpoint_is_written_anew(
    tmp_path, monkeypatch, logged
):
    run = tmp_path / "run"
    shutil.copytree(logged[1], run)
    shutil.rmtree(run / "checkpoints" / "6")
    lines = (run / "gradients.jsonl").read_text()
    (run / "gradients.jsonl").write_text(lines + '{"step": 8, "lo')  # cut off
    stopped_before_training(monkeypatch, run)
    kept = (run / "gradients.jsonl").read_text()
    assert [line["step"] for line in read_lines(run / "gradients.jsonl")] == [0, 4]
    assert lines.startswith(kept)


def test_before_the_first_checkpoint_all_is_written_anew(tmp_path, monkeypatch):
    nothing = np.zeros(2, np.int32)
    start = TrainState(nothing, nothing, {}, {})
    monkeypatch.setattr("attention_jax.training.run.initial_state", lambda *_: start)
    stopped_before_training(monkeypatch, tmp_path)
    (tmp_path / "gradients.jsonl").write_text('{"step": 0, "loss": [1.0, 2.0]}\n')
    stopped_before_training(monkeypatch, tmp_path)
    assert (tmp_path / "gradients.jsonl").read_text() == ""


def test_a_wrong_setting_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="must be a positive multiple of log_every 2; got 3"):
        train_run(REVERSAL, CONFIG, tmp_path / "run", log_gradients=3)
    assert list(tmp_path.iterdir()) == []


# --- the command line ---


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """Runs the script, but for training: (exit status, what it printed, what training was told)."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    told = []

    def stand_in(definition, config, workdir, **options):
        assert definition is REVERSAL
        if options["log_gradients"] is not None:
            check_log_gradients(options["log_gradients"], config.loop.log_every)
        told.append((config, options["log_gradients"]))
        return ReversalRun(config, {}, config.loop.steps, seconds=1.0)

    def run(*arguments):
        monkeypatch.setattr("attention_jax.training.run.train_run", stand_in)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--workdir", "run", *arguments])
        with pytest.raises(SystemExit) as exited:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return exited.value.code, " ".join((captured.out + captured.err).split()), told

    return run


@pytest.mark.parametrize(
    ("arguments", "every"),
    [
        ([], None),
        (["--log-gradients"], 100),
        (["--log-gradients", "every=50"], 50),
        (["--log-gradients", "--steps", "9"], 100),
        (["--log-gradients", "every=75", "--steps", "9"], 75),
    ],
)
def test_how_often(script, arguments, every):
    status, _, told = script(*arguments)
    assert not status
    ((config, got),) = told
    assert got == every
    assert config.loop.steps == (9 if "--steps" in arguments else LoopConfig().steps)


@pytest.mark.parametrize(
    "wrong", [["every=often"], ["every="], ["each=50"], ["often"], ["every=-5"], ["every=50", "7"]]
)
def test_a_wrong_text(script, tmp_path, wrong):
    status, printed, told = script("--log-gradients", *wrong)
    assert status == 2
    assert "--log-gradients" in printed
    assert "every=STEPS" in printed
    assert told == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("every", [0, 30])
def test_not_a_multiple_of_log_every(script, every):
    status, printed, told = script("--log-gradients", f"every={every}")
    assert (status, told) == (2, [])
    expected = f"error: log_gradients must be a positive multiple of log_every 25; got {every}"
    assert printed == expected


def test_help_says_how_often(script):
    status, printed, _ = script("--help")
    assert status == 0
    assert "--log-gradients [every=STEPS]" in printed
