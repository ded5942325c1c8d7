"""The training loop on a toy task whose gradient is written out in numpy."""

import json
import os
import signal

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


def init(rng):
    return {"w": jax.random.normal(rng, (D,))}


def weakly_typed_init(rng):
    del rng
    return {"w": jnp.broadcast_to(jnp.asarray(0.5), (D,))}  # as a Python number's type is


def batch(rng):
    x = jax.random.normal(rng, (B, D))
    return x, x @ jnp.array([1.0, -2.0, 0.5])


def loss(params, batch, rng):
    del rng
    x, y = batch
    error = x @ params["w"] - y
    return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error))}


TASK = Task(init, batch, loss)
RNG = jax.random.key(8)


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
    x, y = (np.asarray(array, np.float64) for array in batch(jax.random.key(0)))
    w, momentum = np.array([0.5, 0.25, -1.0]), np.zeros(D)
    for count in range(1, 4):
        error = x @ w - y
        dw = 2 * x.T @ error / B
        momentum = dw + 0.9 * momentum
        w = w - 0.05 * momentum
        state, metrics = train_step(TASK, OPTIMIZER, state, batch(jax.random.key(0)), RNG)
        assert list(metrics) == ["loss", "worst", "gradient_norm"]
        np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-5)
        np.testing.assert_allclose(metrics["worst"], np.max(np.abs(error)), rtol=1e-5)
        np.testing.assert_allclose(metrics["gradient_norm"], np.linalg.norm(dw), rtol=1e-5)
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)
        assert int(state.step) == 4 + count
        assert int(state.seed) == 9


def test_a_step_is_pure():
    state = one_seed(initial_state(TASK, OPTIMIZER, LoopConfig(seeds=1)))
    before = jax.tree.map(np.array, state)
    once = train_step(TASK, OPTIMIZER, state, batch(jax.random.key(0)), RNG)
    again = train_step(TASK, OPTIMIZER, state, batch(jax.random.key(0)), RNG)
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


def recording_task(batches):
    """The toy task; every batch that a step sees is noted."""

    def noted(rng):
        made = batch(rng)
        jax.debug.callback(lambda x: batches.append(np.asarray(x).tobytes()), made[0])
        return made

    return Task(init, noted, loss)


def test_batches_differ_between_steps_and_seeds_and_repeat_with_the_seed():
    def seen(first_seed, steps):
        batches = []
        config = LoopConfig(seeds=2, first_seed=first_seed)
        task = recording_task(batches)
        stacked = initial_state(task, OPTIMIZER, config)
        for index in range(2):
            train_steps(task, OPTIMIZER, steps, one_seed(stacked, index))
        jax.effects_barrier()
        return batches

    both = seen(0, 3)
    assert len(set(both)) == len(both) == 6
    assert set(seen(1, 3)) & set(both) == set(both[3:])  # seed 1 alone is in both


def test_the_losss_rng_depends_on_seed_and_step_alone():
    def drawn(first_seed, steps, start=0):
        """What batch and loss drew from in every step of two seeds, resumed at `start`."""
        seen = {"batch": [], "loss": []}

        def note(kind, rng):
            data = jax.random.key_data(rng)
            jax.debug.callback(lambda bits: seen[kind].append(np.asarray(bits).tobytes()), data)

        def noted_batch(rng):
            note("batch", rng)
            return batch(rng)

        def noted_loss(params, batch, rng):
            note("loss", rng)
            return loss(params, batch, rng)

        task = Task(init, noted_batch, noted_loss)
        stacked = initial_state(task, OPTIMIZER, LoopConfig(seeds=2, first_seed=first_seed))
        for index in range(2):
            state = one_seed(stacked, index)
            for count in [start, steps - start] if start else [steps]:
                state, _ = train_steps(task, OPTIMIZER, count, state)
        jax.effects_barrier()
        return seen

    both = drawn(0, 3)
    assert len(both["loss"]) == 6
    assert len({*both["loss"], *both["batch"]}) == 12  # no two draws share what they draw from
    assert drawn(0, 3, start=2) == both
    later = drawn(1, 3)
    assert set(later["loss"]) & set(both["loss"]) == set(both["loss"][3:])  # seed 1 is in both
    assert not set(later["loss"]) & set(both["batch"])


def test_the_loss_gets_its_rng():
    def noisy(params, batch, rng):
        error, metrics = loss(params, batch, rng)
        return error, {**metrics, "drawn": jax.random.uniform(rng)}

    state = one_seed(initial_state(TASK, OPTIMIZER, LoopConfig(seeds=1)))
    noise = [
        float(train_step(Task(init, batch, noisy), OPTIMIZER, state, batch(RNG), rng)[1]["drawn"])
        for rng in jax.random.split(RNG)
    ]
    assert noise == [float(jax.random.uniform(rng)) for rng in jax.random.split(RNG)]
    assert noise[0] != noise[1]


def test_seeds_together_are_each_seed_alone():
    config = LoopConfig(seeds=3, first_seed=5)
    stacked = initial_state(TASK, OPTIMIZER, config)
    assert stacked.seed.tolist() == [5, 6, 7]
    assert stacked.step.tolist() == [0, 0, 0]
    assert len({row.tobytes() for row in np.asarray(stacked.params["w"])}) == 3
    together = jax.jit(jax.vmap(lambda state: train_steps(TASK, OPTIMIZER, 11, state)))
    trained, metrics = together(stacked)
    for index in range(3):
        alone = LoopConfig(seeds=1, first_seed=5 + index)
        state = one_seed(initial_state(TASK, OPTIMIZER, alone))
        expected, line = jax.jit(lambda state: train_steps(TASK, OPTIMIZER, 11, state))(state)
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
        expected, _ = train_step(TASK, OPTIMIZER, expected, batch(rng), RNG)
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


# --- signals and settings ---


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_would_end_the_process(number, status):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interruption() as interruption:
        assert interruption.requested is None
        assert interruption.exit_status == 0
        os.kill(os.getpid(), number)
        assert interruption.requested == number
        assert interruption.exit_status == status
        for either in before:
            assert signal.getsignal(either) == signal.SIG_DFL
    for either, handler in before.items():
        assert signal.getsignal(either) is handler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1; got 0"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"log_every": 0}, "log_every must be at least 1; got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1; got 0"),
        ({"first_seed": -1}, "first_seed must be at least 0; got -1"),
        ({"seeds": 2, "first_seed": 2**31 - 1}, "first_seed must leave all seeds below 2"),
        (
            {"log_every": 20, "checkpoint_every": 30},
            "checkpoint_every must be a multiple of log_every 20; got 30",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(**settings)


def test_the_largest_seed():
    config = LoopConfig(seeds=1, first_seed=2**31 - 1)
    assert initial_state(TASK, OPTIMIZER, config).seed.tolist() == [2**31 - 1]
