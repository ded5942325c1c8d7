"""The training loop on a toy task whose gradient is written out in NumPy."""

import dataclasses
import functools
import statistics
import threading
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_files import assert_bits_equal, fsynced
from toy_task import Toy, numbers, saved_state, toy, train_toy

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.environment import environment
from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks import Copy, Recall, Sort
from attention_jax.training.identity import config_of, program_key
from attention_jax.training.run import Prepared, prepare, run
from attention_jax.training.sharding import MeshShape
from attention_jax.training.step import Compiled, initial_state, train_steps
from attention_jax.training.task import Feed, Task

B, RATE, MOMENTUM = 7, 0.05, 0.9


def one_seed(stacked, index=0):
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def rng_of(seed, step, purpose):
    root = jax.random.fold_in(jax.random.key(seed), ("init", "batch", "loss").index(purpose))
    return jax.random.fold_in(root, step)


def descent(w, batches):
    """Stochastic gradient descent with momentum: (w, one line of metrics per step)."""
    momentum, lines = np.zeros(len(w)), []
    for batch in batches:
        x, y = np.asarray(batch["x"], np.float64), np.asarray(batch["y"], np.float64)
        error = x @ w - y
        dw = 2 * x.T @ error / len(x)
        momentum = dw + MOMENTUM * momentum
        w = w - RATE * momentum
        line = {"loss": np.mean(error**2), "worst": np.max(np.abs(error))}
        lines.append({**line, "gradient_norm": np.linalg.norm(dw)})
    return w, lines


# --- one step, and many ---


def test_the_largest_seed():
    assert initial_state(toy(seeds=1, first_seed=2**31 - 1)).seed.tolist() == [2**31 - 1]


SEEN: list[bytes] = []


def note(rng):
    append = lambda data: SEEN.append(np.asarray(data).tobytes())  # noqa: E731
    jax.debug.callback(append, jax.random.key_data(rng), ordered=True)


class Noted(Toy):
    """Notes the rngs that it is given."""

    def batch(self, rng, *, size, length=None):
        note(rng)
        return super().batch(rng, size=size)

    def loss(self, params, batch, rng):
        note(rng)
        return super().loss(params, batch, rng)


def test_rngs_depend_on_seed_and_step_alone_and_no_two_are_equal():
    steps = {n: jax.jit(functools.partial(train_steps, Noted(), n)) for n in (1, 2, 3)}
    runs = []
    for first_seed, counts in ((0, (3,)), (0, (2, 1)), (1, (3,))):
        SEEN.clear()
        state = one_seed(initial_state(toy(first_seed=first_seed)))
        for count in counts:
            state, _ = steps[count](state)
        jax.effects_barrier()
        runs.append([*SEEN])
    straight, resumed, other_seed = runs
    assert straight == resumed
    assert len({*straight, *other_seed}) == 12


class AlwaysRight(Toy):
    def loss(self, params, batch, rng):
        return super().loss(params, batch, rng)[0], {
            kind: jnp.ones((), kind) for kind in ("float32", "bfloat16", "int32", "bool")
        }


def test_the_mean_of_ones_is_one():
    steps = jax.jit(jax.vmap(functools.partial(train_steps, AlwaysRight(), 41)))
    _, metrics = steps(initial_state(toy()))
    del metrics["loss"], metrics["gradient_norm"]
    assert np.all(np.array([*metrics.values()]) == 1)


# --- a run ---


TRACES = []


class Counted(Toy):
    def loss(self, params, batch, rng):
        TRACES.append(len(batch["x"]))
        return super().loss(params, batch, rng)


class WeaklyTyped(Counted):
    def init(self, rng):
        del rng
        return {"w": jnp.broadcast_to(jnp.asarray(0.5), (3,))}  # as a Python number's type is


def test_a_run_is_the_formula_and_lines_are_means(tmp_path):
    steps, ends = 7, [3, 6, 7]
    task = toy(steps=steps, log_every=3, checkpoint_every=30)
    state = train_toy(task, tmp_path).state
    assert state.step.tolist() == [steps, steps]
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == ends
    start = np.asarray(initial_state(task).params["w"], np.float64)
    for seed in range(2):
        batches = [task.batch(rng_of(seed, step, "batch"), size=7) for step in range(steps)]
        w, expected = descent(start[seed], batches)
        np.testing.assert_allclose(state.params["w"][seed], w, rtol=1e-4, atol=1e-6)
        for line, first in zip(lines, [0, *ends], strict=False):
            for name in expected[0]:
                mean = np.mean([each[name] for each in expected[first : line["step"]]])
                np.testing.assert_allclose(line[name][seed], mean, rtol=1e-4)


def test_no_chunk_recompiles(tmp_path):
    counts = []
    for steps in (2, 10):
        TRACES.clear()
        task = toy(WeaklyTyped, steps=steps, log_every=2, checkpoint_every=10)
        train_toy(task, tmp_path / str(steps))
        counts.append(len(TRACES))
    assert counts[0] == counts[1] > 0


def test_metrics_are_on_disk_before_their_checkpoint_whose_loss_is_the_mean(tmp_path, monkeypatch):
    saved, save, on_disk = {}, Checkpoints.save, fsynced(monkeypatch)

    def checked_save(self, step, *arguments, **options):
        assert on_disk(tmp_path / "metrics.jsonl")
        saved[step] = options["metric"]
        save(self, step, *arguments, **options)

    monkeypatch.setattr(Checkpoints, "save", checked_save)
    train_toy(toy(steps=4, log_every=2, checkpoint_every=2), tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert saved == {line["step"]: pytest.approx(np.mean(line["loss"])) for line in lines}
    assert [*saved] == [2, 4]


# --- batches made on the host ---

ROWS = (5, 2)  # of a batch, by step


def rows(batch):
    """Stands for the tokens of a batch."""
    return batch["x"].shape[0]


@dataclasses.dataclass(frozen=True)
class Fed(Counted):
    """Batches of two shapes."""

    asked: ClassVar[list] = []

    def feed(self, folder, *, multiple_of=1):
        return Feed(self.batch_of, note="29 rows")

    def batch_of(self, seed, step):
        assert type(seed) is type(step) is int
        self.asked.append((step, seed))
        rng = np.random.default_rng([seed, step])
        x = rng.normal(size=(ROWS[step % 2], 3)).astype(np.float32)
        return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32)}


def test_a_fed_run_is_the_formula_with_one_program_per_shape(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("attention_jax.training.step.num_tokens", rows)
    task = toy(Fed, first_seed=4, steps=13, log_every=2, checkpoint_every=4, batch_size=None)
    TRACES.clear()
    Fed.asked.clear()
    state = train_toy(task, tmp_path, mesh=MeshShape(seed=1, data=1)).state
    assert "toy: 29 rows" in capsys.readouterr().out
    # Those that the digest, the numbers and the trace need, then each step's and no more.
    of_steps = [(step, seed) for step in range(13) for seed in (4, 5)]
    assert Fed.asked == [(0, 4), (0, 4), *of_steps[:2], *of_steps]
    assert sorted(set(TRACES)) == sorted(ROWS)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12, 13]
    speeds = [(line["tokens_per_second"][0], line["steps_per_second"][0]) for line in lines[1:]]
    np.testing.assert_allclose([tokens / steps for tokens, steps in speeds], [3.5] * 5 + [5])
    start = np.asarray(initial_state(task).params["w"], np.float64)
    for index, seed in enumerate((4, 5)):
        w, _ = descent(start[index], [task.batch_of(seed, step) for step in range(13)])
        np.testing.assert_allclose(state.params["w"][index], w, rtol=1e-5, atol=1e-6)


# --- statistics of gradients ---


@pytest.mark.parametrize("cls", [Toy, Fed])
def test_statistics_are_of_the_next_batch_and_change_nothing(tmp_path, cls):
    size = {"batch_size": None} if cls is Fed else {}
    task = toy(cls, steps=7, log_every=1, checkpoint_every=100, **size)
    logged = train_toy(task, tmp_path / "with", log_gradients=4)
    if cls is Toy:
        assert_bits_equal(logged.state, train_toy(task, tmp_path / "without").state)
    lines = read_lines(tmp_path / "with" / "gradients.jsonl")
    assert [line["step"] for line in lines] == [0, 4, 7]
    of_step = {line["step"]: line for line in read_lines(tmp_path / "with" / "metrics.jsonl")}
    for line in lines[:-1]:
        following = of_step[line["step"] + 1]
        np.testing.assert_allclose(line["value"], following["loss"], rtol=1e-5)
        np.testing.assert_allclose(line["norm"], following["gradient_norm"], rtol=1e-5)
    for seed in range(2):  # at the end, of the batch that would have come
        if cls is Fed:
            batch = task.batch_of(seed, 7)
        else:
            batch = task.batch(rng_of(seed, 7, "batch"), size=7)
        _, (line,) = descent(np.float64(logged.state.params["w"][seed]), [batch])
        np.testing.assert_allclose(lines[-1]["value"][seed], line["loss"], rtol=1e-4)


class Dropped(Toy):
    """Features are multiplied by noise."""

    def loss(self, params, batch, rng):
        return super().loss(params, batch | {"x": batch["x"] * (1 + numbers(rng, 1)[0])}, rng)


def test_statistics_are_of_the_noise_of_the_next_step(tmp_path):
    task = toy(Dropped, steps=2, log_every=1, checkpoint_every=100)
    train_toy(task, tmp_path, log_gradients=1)
    losses = [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")]
    values = [line["value"] for line in read_lines(tmp_path / "gradients.jsonl")]
    np.testing.assert_allclose(values[:2], losses, rtol=1e-5)


# --- one program for runs that differ in numbers alone ---


class Adam(Counted):
    """A task that Adam trains, as `train` says."""

    optimizer = Task.optimizer


class Annealed(Adam):
    """Its loss reads a setting that is otherwise an argument of the program."""

    def loss(self, params, batch, rng):
        loss, metrics = super().loss(params, batch, rng)
        return loss * self.train.learning_rate, metrics


SHORT = {"steps": 12, "log_every": 4, "checkpoint_every": 12, "weight_decay": 0.1}
ARGUMENTS = (
    {}, {"learning_rate": 0.1}, {"schedule": "constant", "warmup_steps": 5}, {"first_seed": 7},
    {"clip_norm": 0.5, "weight_decay": 0.3, "epsilon": 1e-3}, {"schedule": "inverse-sqrt"},
    {"keep": 5, "checkpoint_every": 4},
)  # fmt: skip


def test_runs_that_differ_in_numbers_share_a_program_and_have_the_bits_of_their_own(tmp_path):
    tasks = [toy(Adam, **SHORT | changes) for changes in ARGUMENTS]
    prepared = [prepare(task, tmp_path / f"{n}") for n, task in enumerate(tasks)]
    assert [*tmp_path.iterdir()] == []
    TRACES.clear()
    for each in prepared:
        run(each)
    assert TRACES == []  # `prepare` has traced the first one's step
    assert len({each.compiled for each in prepared}) == 1
    for n, task in enumerate(tasks):
        steps = jax.jit(jax.vmap(functools.partial(train_steps, task, 4)))
        state = initial_state(task)
        for line in read_lines(tmp_path / f"{n}" / "metrics.jsonl"):
            state, metrics = steps(state)
            assert line["loss"] == np.asarray(metrics["loss"]).tolist()
        assert_bits_equal(saved_state(task, tmp_path / f"{n}"), state)


OTHERS = {"beta2": 0.9, "batch_size": 5, "weight_decay": 0.0, "accumulate": 2}


@pytest.mark.parametrize(
    ("cls", "changes"),
    [*((Adam, {name: each}) for name, each in OTHERS.items()), (Annealed, {"learning_rate": 0.1})],
)
def test_other_programs_are_not_shared(tmp_path, cls, changes):
    one, other = (toy(cls, **SHORT | each) for each in ({}, changes))
    assert prepare(one, tmp_path / "a").compiled != prepare(other, tmp_path / "b").compiled
    # config.json has no program of a task of this library: its settings alone keep runs apart.
    recall = Recall(train=one.train)
    model = dataclasses.replace(recall.model, dim=8)
    settings = ({}, {"train": other.train}, {"model": model}, {"length": 40})
    tasks = [dataclasses.replace(recall, **each) for each in settings]
    tasks += [Sort(train=one.train), Copy(Sort.model, one.train)]  # with equal settings
    keys = {program_key(config_of(task), has_arguments=True) for task in tasks}
    assert len(keys) == 5 + (cls is Adam)


class Rated(Adam):
    def loss(self, params, batch, rng):
        loss, metrics = super().loss(params, batch, rng)
        return loss, {**metrics, "steps_per_second": 0 * loss}

    def statistics(self, loss, params, batch, rng):
        return {"rate": jnp.float32(self.train.learning_rate)}


def test_lines_have_the_rate_and_the_speed_and_a_start_its_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("attention_jax.training.step.num_tokens", rows)
    settings = {"schedule": "constant", "warmup_steps": 4, "learning_rate": 0.1, "accumulate": 2}
    train_toy(toy(Adam, **SHORT | settings), tmp_path)
    first, *others = lines = read_lines(tmp_path / "metrics.jsonl")
    # After 2, 4 and 6 updates; the n-th has n quarters of the highest rate.
    assert [line["learning_rate"] for line in lines] == [[0.05] * 2, [0.1] * 2, [0.1] * 2]
    assert "steps_per_second" not in first
    (start,) = read_lines(tmp_path / "timing.jsonl")
    for name, size in (("steps_per_second", 1), ("tokens_per_second", 7)):
        mean = statistics.harmonic_mean([line[name][0] for line in others])
        assert start[name] == pytest.approx(2 * mean)  # of both seeds
        assert others[0][name] == pytest.approx(size * np.array(others[0]["steps_per_second"]))
    now = environment()
    assert {name: start[name] for name in ("packages", "git_commit")} == {
        name: now[name] for name in ("packages", "git_commit")
    }
    for rate in (0.25, 0.5):  # a task's own metrics stay its own, and so do its statistics
        folder = tmp_path / str(rate)
        train_toy(toy(Rated, **SHORT, learning_rate=rate), folder, log_gradients=12)
        assert read_lines(folder / "metrics.jsonl")[-1]["steps_per_second"] == [0, 0]
        assert read_lines(folder / "gradients.jsonl")[-1]["rate"] == [rate] * 2


def test_what_is_compiled_in_the_background_is_not_compiled_again(tmp_path, caplog, monkeypatch):
    task = toy(Adam, **SHORT | {"beta2": 0.97})  # a new program
    prepared = prepare(task, tmp_path / "run")
    compiled = "Finished XLA compilation of jit(train_steps)"
    jax.config.update("jax_log_compiles", True)  # a context would be this thread's alone
    try:
        prepared.begin_compiling().join()
        assert caplog.text.count(compiled) == 1
        run(prepared)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert caplog.text.count(compiled) == 1
    # The first call waits for the background: it would compile too.
    slow, advance = threading.Timer(0.5, int), Compiled.advance

    def advance_after(*arguments):
        assert slow.finished.is_set()
        return advance(*arguments)

    monkeypatch.setattr(Prepared, "begin_compiling", lambda _: slow.start() or slow)
    monkeypatch.setattr(Compiled, "advance", advance_after)
    assert run(prepare(task, tmp_path / "slow")).step == 12
