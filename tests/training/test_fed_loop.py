"""Batches made outside the program: the loop that is fed, against NumPy and single steps."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy_task import train_toy

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import read_lines
from attention_jax.training.loop import FedTask, LoopConfig, initial_state, train_step
from attention_jax.training.sharding import MeshShape

D, EXAMPLES, PER_EPOCH = 3, 29, 5
ROWS = (5, 2)  # of a batch, by step
RATE, MOMENTUM = 0.05, 0.9
OPTIMIZER = optax.sgd(RATE, momentum=MOMENTUM)
X = np.random.default_rng(0).normal(size=(EXAMPLES, D)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)


def feed(seed, step):
    """Epochs of five steps in an order of their own, and batches of two shapes."""
    epoch, index = divmod(step, PER_EPOCH)
    order = np.random.default_rng([seed, epoch]).permutation(EXAMPLES)
    rows = order[index * PER_EPOCH :][: ROWS[step % 2]]
    return {"x": X[rows], "y": Y[rows]}


def init(rng):
    del rng
    return {"w": jnp.array([0.5, 0.25, -1.0])}


def offset(rng):
    """Some number of its own for each key: a generator's takes long to compile."""
    return jnp.sin((jax.random.key_data(rng)[0] % jnp.uint32(1009)).astype(jnp.float32))


def loss(params, batch, rng):
    error = batch["x"] @ params["w"] - batch["y"] + 0.1 * offset(rng)
    rows = jnp.full((), len(error), jnp.float32)
    return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error)), "rows": rows}


TASK = FedTask(init, feed, loss)


def run(folder, config, *, task=TASK, **options):
    """Begins it, or goes on with it."""
    return train_toy(folder, task, OPTIMIZER, config, label="fed", **options)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def loss_rng(seed, step):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), step)


CONFIG = LoopConfig(seeds=2, first_seed=4, steps=13, log_every=2, checkpoint_every=4)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return run(folder, CONFIG).state, folder


# --- what a run is ---


def test_a_run_is_the_formula_and_lines_are_means(never_stopped):
    state, folder = never_stopped
    assert state.step.tolist() == [13, 13]
    assert state.seed.tolist() == [4, 5]
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12, 13]
    for index, seed in enumerate((4, 5)):
        w, momentum = np.array([0.5, 0.25, -1.0]), np.zeros(D)
        found = {"loss": [], "worst": [], "rows": [], "gradient_norm": []}
        for step in range(13):
            x, y = (np.float64(feed(seed, step)[name]) for name in "xy")
            assert len(x) == ROWS[step % 2]
            error = x @ w - y + 0.1 * float(offset(loss_rng(seed, step)))
            dw = 2 * x.T @ error / len(x)
            momentum = dw + MOMENTUM * momentum
            w = w - RATE * momentum
            for name, value in (
                ("loss", np.mean(error**2)), ("worst", np.max(np.abs(error))), ("rows", len(x)),
                ("gradient_norm", np.linalg.norm(dw)),
            ):  # fmt: skip
                found[name].append(value)
        np.testing.assert_allclose(state.params["w"][index], w, rtol=1e-5, atol=1e-6)
        for line in lines:
            last = line["step"]
            own = slice(last - 1 if last == 13 else last - 2, last)
            for name, values in found.items():
                np.testing.assert_allclose(line[name][index], np.mean(values[own]), rtol=1e-4)


def test_a_run_is_single_steps(never_stopped):
    single = jax.jit(lambda *arguments: train_step(TASK, OPTIMIZER, *arguments))
    start = initial_state(TASK, OPTIMIZER, CONFIG)
    for index, seed in enumerate((4, 5)):
        expected = jax.tree.map(lambda leaf, index=index: leaf[index], start)
        for step in range(13):
            expected, _ = single(expected, feed(seed, step), loss_rng(seed, step))
        for one, other in zip(*map(jax.tree.leaves, (never_stopped[0], expected)), strict=True):
            np.testing.assert_allclose(one[index], other, rtol=1e-5, atol=1e-7)


def test_seeds_together_are_each_seed_alone(tmp_path, never_stopped):
    together = never_stopped[0]
    alone = run(tmp_path, dataclasses.replace(CONFIG, seeds=1, first_seed=5)).state
    for one, other in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
        np.testing.assert_allclose(one[1], other[0], rtol=1e-5, atol=1e-7)
    assert np.all(together.params["w"][0] != together.params["w"][1])


def test_on_a_mesh_of_one_device(tmp_path, never_stopped):
    reached = run(tmp_path, CONFIG, mesh=MeshShape(seed=1, data=1, fsdp=1))
    assert_same_bits(reached.state, never_stopped[0])


# --- stopping and going on ---


def test_ended_between_two_lines_and_gone_on(tmp_path, never_stopped):
    """After 7 steps, of which two make a line and five an epoch. And what is asked for."""
    asked, traced = [], []

    def noted_feed(seed, step):
        assert type(seed) is type(step) is int
        asked.append((step, seed))
        return feed(seed, step)

    def noted_loss(params, batch, rng):
        traced.append(len(batch["x"]))
        return loss(params, batch, rng)

    task = TASK._replace(feed=noted_feed, loss=noted_loss)
    for first, steps, lines in ((0, 7, [2, 4, 6, 7]), (7, 13, [2, 4, 6, 7, 8, 10, 12, 13])):
        reached = run(tmp_path, dataclasses.replace(CONFIG, steps=steps), task=task)
        assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == lines
        # What comes next, for each seed, and no more.
        assert asked == [(step, seed) for step in range(first, steps) for seed in (4, 5)]
        assert sorted(traced) == sorted(ROWS)  # one program a shape
        del asked[:], traced[:]
    assert_same_bits(reached.state, never_stopped[0])


def stopping(at, number=signal.SIGTERM):
    """A feed in the middle of which a signal comes."""

    def feed_and_stop(seed, step):
        if step == at and seed == 4:
            os.kill(os.getpid(), number)
        return feed(seed, step)

    return TASK._replace(feed=feed_and_stop)


@pytest.mark.parametrize(
    ("at", "ends"),
    [
        (4, 6),  # no checkpoint's step, and in the middle of an epoch
        pytest.param(0, 2, marks=pytest.mark.slow),
        pytest.param(7, 8, marks=pytest.mark.slow),
        pytest.param(8, 10, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_is_bit_identical(tmp_path, never_stopped, at, ends):
    stopped = run(tmp_path, CONFIG, task=stopping(at))
    assert (stopped.step, stopped.interrupted, stopped.exhausted) == (ends, 143, False)
    resumed = run(tmp_path, CONFIG)
    assert (resumed.step, resumed.interrupted) == (13, 0)
    assert_same_bits(resumed.state, never_stopped[0])
    for name in ("metrics.jsonl", "config.json"):
        assert (tmp_path / name).read_bytes() == (never_stopped[1] / name).read_bytes()


@pytest.mark.slow
def test_stopped_at_every_boundary(tmp_path, never_stopped):
    for at in range(0, 13, 2):
        run(tmp_path, CONFIG, task=stopping(at, signal.SIGINT))
    assert_same_bits(run(tmp_path, CONFIG).state, never_stopped[0])
    straight = (never_stopped[1] / "metrics.jsonl").read_bytes()
    assert (tmp_path / "metrics.jsonl").read_bytes() == straight


def test_what_fails_in_a_feed_is_told_and_can_be_gone_on_with(tmp_path, never_stopped):
    def failing(seed, step):
        if step == 7:
            raise ValueError("the text cannot be read")
        return feed(seed, step)

    with pytest.raises(ValueError, match="the text cannot be read"):
        run(tmp_path, CONFIG, task=TASK._replace(feed=failing))
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["step"] == 6
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest_step() == 4
    assert_same_bits(run(tmp_path, CONFIG).state, never_stopped[0])


# --- statistics beside it ---


def test_gradients_of_the_batch_that_comes_next(tmp_path, never_stopped):
    def statistics(loss, params, batch, rng):
        (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, rng)
        return {"value": value, "norm": optax.tree.norm(gradient)}

    config = dataclasses.replace(CONFIG, log_every=1)
    logged = run(tmp_path, config, log_gradients=3, statistics=statistics)
    assert_same_bits(logged.state, never_stopped[0])
    lines = read_lines(tmp_path / "gradients.jsonl")
    assert [line["step"] for line in lines] == [0, 3, 6, 9, 12, 13]
    trained = {line["step"]: line for line in read_lines(tmp_path / "metrics.jsonl")}
    for line in lines[:-1]:
        following = trained[line["step"] + 1]
        np.testing.assert_allclose(line["value"], following["loss"], rtol=1e-5)
        np.testing.assert_allclose(line["norm"], following["gradient_norm"], rtol=1e-5)
    for index, seed in enumerate((4, 5)):  # at the end, of the batch that would have come
        w, batch = logged.state.params["w"][index], feed(seed, 13)
        error = batch["x"] @ np.float64(w) - batch["y"] + 0.1 * float(offset(loss_rng(seed, 13)))
        np.testing.assert_allclose(lines[-1]["value"][index], np.mean(error**2), rtol=1e-4)
