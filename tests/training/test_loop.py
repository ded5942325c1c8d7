"""The training loop on a toy task whose gradient is written out in numpy."""

import dataclasses
import functools
import json
import os
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import MetricsFile
from attention_jax.training.loop import (
    LoopConfig,
    Records,
    Task,
    Training,
    TrainState,
    initial_state,
    train,
    train_step,
    train_steps,
)

B, D = 7, 3
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def numbers(rng, count):
    """Numbers that differ from key to key: those of a generator take long to compile."""
    # The angles are small, because the rounding error of the sine of a large one is large.
    phase = (jax.random.key_data(rng) % jnp.uint32(1009)).astype(jnp.float32) / 1009
    return jnp.sin(1.3 * jnp.arange(count, dtype=jnp.float32) + 6 * phase[0] + phase[1])


def init(rng):
    return {"w": numbers(rng, D)}


def weakly_typed_init(rng):
    del rng
    return {"w": jnp.broadcast_to(jnp.asarray(0.5), (D,))}  # as a Python number's type is


def batch(rng):
    x = numbers(rng, B * D).reshape(B, D)
    return x, x @ jnp.array([1.0, -2.0, 0.5])


def loss(params, batch, rng):
    del rng
    x, y = batch
    error = x @ params["w"] - y
    return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error))}


TASK = Task(init, batch, loss)
RNG = jax.random.key(8)
drawn_batch = jax.jit(batch)


@jax.jit
def single_step(state, batch):
    return train_step(TASK, OPTIMIZER, state, batch, RNG)


class Hook:
    """Stands where Progress stands: calls a function with every step."""

    def __init__(self, function=None):
        self.steps = []
        self.function = function

    def update(self, step, metrics):
        self.steps.append(step)
        if self.function is not None:
            self.function(step)


def run(folder, config, *, hook=None, interruption=None, task=TASK):
    """What tasks do around `train`: begin or resume in a folder."""
    folder.mkdir(exist_ok=True)
    hook = hook or Hook()
    with Interruption() as entered, Checkpoints(folder / "checkpoints") as checkpoints:
        state = initial_state(task, OPTIMIZER, config)
        restored = checkpoints.restore(state)
        state = state if restored is None else restored.state
        with MetricsFile(folder / "metrics.jsonl", after_step=int(state.step[0])) as metrics_file:
            records = Records(checkpoints, hook, metrics_file)
            return train(Training(task, OPTIMIZER, config), state, records, interruption or entered)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def one_seed(stacked, index=0):
    return jax.tree.map(lambda leaf: leaf[index], stacked)


# --- one step ---


def test_a_step_is_the_formula():
    params = {"w": jnp.array([0.5, 0.25, -1.0])}
    state = TrainState(jnp.int32(4), jnp.int32(9), params, OPTIMIZER.init(params))
    x, y = (np.asarray(array, np.float64) for array in drawn_batch(jax.random.key(0)))
    w, momentum = np.array([0.5, 0.25, -1.0]), np.zeros(D)
    for count in range(1, 4):
        error = x @ w - y
        dw = 2 * x.T @ error / B
        momentum = dw + 0.9 * momentum
        w = w - 0.05 * momentum
        state, metrics = single_step(state, drawn_batch(jax.random.key(0)))
        assert metrics.keys() == {"loss", "worst", "gradient_norm"}
        np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-5)
        np.testing.assert_allclose(metrics["worst"], np.max(np.abs(error)), rtol=1e-5)
        np.testing.assert_allclose(metrics["gradient_norm"], np.linalg.norm(dw), rtol=1e-5)
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)
        assert int(state.step) == 4 + count
        assert int(state.seed) == 9


def test_a_step_is_pure():
    state = one_seed(initial_state(TASK, OPTIMIZER, LoopConfig(seeds=1)))
    before = jax.tree.map(np.array, state)
    once = single_step(state, drawn_batch(jax.random.key(0)))
    again = single_step(state, drawn_batch(jax.random.key(0)))
    assert_same_bits(once, again)
    assert_same_bits(before, jax.tree.map(np.asarray, state))
    assert np.any(np.asarray(once[0].params["w"]) != before.params["w"])


# --- many steps, many seeds ---


def test_a_scan_is_its_steps_and_their_mean_metrics():
    state = one_seed(initial_state(TASK, OPTIMIZER, LoopConfig(seeds=1)))
    single = jax.jit(lambda state: train_steps(TASK, OPTIMIZER, 1, state))
    stepped, lines = state, []
    for _ in range(5):
        stepped, metrics = single(stepped)
        lines.append(metrics)
    scanned, means = jax.jit(lambda state: train_steps(TASK, OPTIMIZER, 5, state))(state)
    assert int(scanned.step) == 5
    np.testing.assert_allclose(scanned.params["w"], stepped.params["w"], rtol=1e-5)
    for name, mean in means.items():
        np.testing.assert_allclose(mean, np.mean([line[name] for line in lines]), rtol=1e-5)


class Drawn(NamedTuple):
    """The bits that three steps of two seeds, one seed after the other, were given."""

    batches: list[bytes]
    batch_rngs: list[bytes]
    loss_rngs: list[bytes]


@pytest.fixture(scope="module")
def drawn():
    """Of the runs from seed 0, from seed 0 and resumed at step 2, and from seed 1."""
    seen = Drawn([], [], [])

    def note(bits, array):
        append = lambda value: bits.append(np.asarray(value).tobytes())  # noqa: E731
        jax.debug.callback(append, array, ordered=True)

    def noted_batch(rng):
        note(seen.batch_rngs, jax.random.key_data(rng))
        made = batch(rng)
        note(seen.batches, made[0])
        return made

    def noted_loss(params, batch, rng):
        note(seen.loss_rngs, jax.random.key_data(rng))
        return loss(params, batch, rng)

    task = Task(init, noted_batch, noted_loss)

    @functools.partial(jax.jit, static_argnums=0)
    def trained(counts, stacked):
        def one_seed(state):
            for count in counts:
                state, _ = train_steps(task, OPTIMIZER, count, state)
            return state

        return jax.lax.map(one_seed, stacked)

    runs = []
    for first_seed, counts in ((0, (3,)), (0, (2, 1)), (1, (3,))):
        config = LoopConfig(seeds=2, first_seed=first_seed)
        trained(counts, initial_state(TASK, OPTIMIZER, config))
        jax.effects_barrier()
        runs.append(Drawn(*map(list, seen)))
        for bits in seen:
            bits.clear()
    return runs


def test_batches_differ_between_steps_and_seeds_and_repeat_with_the_seed(drawn):
    both, _, later = (run.batches for run in drawn)
    assert len(set(both)) == len(both) == 6
    assert set(later) & set(both) == set(both[3:])  # seed 1 alone is in both


def test_the_losss_rng_depends_on_seed_and_step_alone(drawn):
    both, resumed, later = drawn
    assert len(both.loss_rngs) == 6
    assert len({*both.loss_rngs, *both.batch_rngs}) == 12  # no two share what they draw from
    assert resumed == both
    # Seed 1 is in both.
    assert set(later.loss_rngs) & set(both.loss_rngs) == set(both.loss_rngs[3:])
    assert not set(later.loss_rngs) & set(both.batch_rngs)


def test_the_loss_gets_its_rng():
    def noisy(params, batch, rng):
        error, metrics = loss(params, batch, rng)
        return error, {**metrics, "drawn": jax.random.uniform(rng)}

    @jax.jit
    def drawn_and_expected(state, rng):
        _, metrics = train_step(Task(init, batch, noisy), OPTIMIZER, state, batch(RNG), rng)
        return metrics["drawn"], jax.random.uniform(rng)

    state = one_seed(initial_state(TASK, OPTIMIZER, LoopConfig(seeds=1)))
    pairs = [drawn_and_expected(state, jax.random.key(seed)) for seed in (8, 9)]
    assert [float(noise) for noise, _ in pairs] == [float(expected) for _, expected in pairs]
    assert pairs[0][0] != pairs[1][0]


def test_seeds_together_are_each_seed_alone():
    config = LoopConfig(seeds=3, first_seed=5)
    stacked = initial_state(TASK, OPTIMIZER, config)
    assert stacked.seed.tolist() == [5, 6, 7]
    assert stacked.step.tolist() == [0, 0, 0]
    assert len({row.tobytes() for row in np.asarray(stacked.params["w"])}) == 3
    steps = functools.partial(train_steps, TASK, OPTIMIZER, 11)
    trained, metrics = jax.jit(jax.vmap(steps))(stacked)
    steps = jax.jit(steps)
    for index in range(3):
        alone = LoopConfig(seeds=1, first_seed=5 + index)
        state = one_seed(initial_state(TASK, OPTIMIZER, alone))
        expected, line = steps(state)
        np.testing.assert_allclose(trained.params["w"][index], expected.params["w"], rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"][index], line["loss"], rtol=1e-5)


# --- a run ---


@pytest.mark.parametrize(
    ("steps", "log_every", "ends"),
    [(6, 2, [2, 4, 6]), (7, 3, [3, 6, 7]), (2, 5, [2])],
)
def test_a_run_logs_every_chunk_and_learns(tmp_path, steps, log_every, ends):
    config = LoopConfig(seeds=2, steps=steps, log_every=log_every, checkpoint_every=30)
    hook = Hook()
    state = run(tmp_path, config, hook=hook)
    assert hook.steps == ends
    assert state.step.tolist() == [steps, steps]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == ends
    for line in lines:
        assert all(len(line[name]) == 2 for name in ("loss", "worst", "gradient_norm"))
    assert lines[-1]["loss"] < lines[0]["loss"] or len(lines) == 1
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() == steps
        assert_same_bits(checkpoints.restore(state).state, state)
    # The same as single steps, one seed at a time.
    expected = one_seed(initial_state(TASK, OPTIMIZER, config), 1)
    for _ in range(steps):
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 1), expected.step)
        expected, _ = single_step(expected, drawn_batch(rng))
    np.testing.assert_allclose(state.params["w"][1], expected.params["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("init", [init, weakly_typed_init])
def test_no_chunk_recompiles(tmp_path, init):
    def traces(steps):
        count = 0

        def counted(params, batch, rng):
            nonlocal count
            count += 1
            return loss(params, batch, rng)

        config = LoopConfig(seeds=2, steps=steps, log_every=2, checkpoint_every=4)
        run(tmp_path / str(steps), config, task=Task(init, batch, counted))
        return count

    assert traces(10) == traces(2) > 0


CONFIG = LoopConfig(seeds=2, steps=11, log_every=2, checkpoint_every=4)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return run(folder, CONFIG), (folder / "metrics.jsonl").read_bytes()


def raised(number):
    return lambda step: os.kill(os.getpid(), number) if step == 6 else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal_and_resumed_is_bit_identical(tmp_path, never_stopped, number):
    before = signal.getsignal(number)
    stopped = run(tmp_path, CONFIG, hook=Hook(raised(number)))
    assert signal.getsignal(number) is before
    assert stopped.step.tolist() == [6, 6]  # no multiple of checkpoint_every
    hook = Hook()
    resumed = run(tmp_path, CONFIG, hook=hook)
    assert hook.steps == [8, 10, 11]
    assert_same_bits(resumed, never_stopped[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == never_stopped[1]


def test_metrics_are_on_disk_before_their_checkpoint(tmp_path, monkeypatch):
    path, on_disk, saved = tmp_path / "metrics.jsonl", {}, []
    fsync, save = os.fsync, Checkpoints.save

    def recorded_fsync(file):
        fsync(file)
        on_disk[os.fstat(file).st_ino] = os.fstat(file).st_size

    def checked_save(self, step, *arguments, **options):
        assert on_disk[path.stat().st_ino] == path.stat().st_size > 0
        saved.append(step)
        save(self, step, *arguments, **options)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Checkpoints, "save", checked_save)
    run(tmp_path, dataclasses.replace(CONFIG, steps=4, checkpoint_every=2))
    assert saved == [2, 4]


def test_crashed_beyond_the_checkpoint_and_resumed_is_bit_identical(tmp_path, never_stopped):
    def crash(step):
        if step == 6:
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path, CONFIG, hook=Hook(crash))
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert '"step": 6' in lines  # beyond the checkpoint of step 4
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 8, "lo')
    hook = Hook()
    resumed = run(tmp_path, CONFIG, hook=hook)
    assert hook.steps == [6, 8, 10, 11]
    assert_same_bits(resumed, never_stopped[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == never_stopped[1]


def test_resuming_a_finished_run_changes_nothing(tmp_path, never_stopped):
    run(tmp_path, CONFIG)
    hook = Hook()
    assert_same_bits(run(tmp_path, CONFIG, hook=hook), never_stopped[0])
    assert hook.steps == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == never_stopped[1]


def test_chunks_end_at_multiples_of_log_every_wherever_a_run_begins(tmp_path):
    run(tmp_path, LoopConfig(seeds=2, steps=3, log_every=2, checkpoint_every=4))
    hook = Hook()
    run(tmp_path, LoopConfig(seeds=2, steps=7, log_every=2, checkpoint_every=4), hook=hook)
    assert hook.steps == [4, 6, 7]


def test_a_request_before_the_first_step_saves_the_start(tmp_path, never_stopped):
    early = Interruption()
    early.requested = signal.SIGTERM
    assert run(tmp_path, CONFIG, interruption=early).step.tolist() == [0, 0]
    assert run(tmp_path, CONFIG, interruption=early).step.tolist() == [0, 0]  # and once more
    assert_same_bits(run(tmp_path, CONFIG), never_stopped[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == never_stopped[1]


def test_the_largest_seed():
    config = LoopConfig(seeds=1, first_seed=2**31 - 1)
    assert initial_state(TASK, OPTIMIZER, config).seed.tolist() == [2**31 - 1]
