"""A run of four small arrays in this process, in a quarter of a second: for faults on the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import shutil
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from toy_task import Toy, saved_state, toy, train_toy

from attention_jax.runs.metrics_file import read_lines

from .findings import Ended, Result, hashes

STEPS, NEWEST, BEFORE = 6, 4, 2  # the step to reach, and those that are saved on the way


def _numbers(rng, count):
    phase = jax.random.key_data(rng)[0] % jnp.uint32(1009)
    return jnp.sin(jnp.arange(count, dtype=jnp.float32) + phase.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Small(Toy):
    """Four arrays, and no generator where none is needed: it is what takes long to compile."""

    def optimizer(self):
        return optax.adam(0.1)

    def init(self, rng):
        start = _numbers(rng, 67 * 31 + 1031)
        return {
            "kernel": start[: 67 * 31].reshape(67, 31),
            "table": start[67 * 31 :],
            "bias": jnp.zeros(31),
        }

    def batch(self, rng, *, size, length=None):
        return _numbers(rng, size * 67).reshape(size, 67)

    def loss(self, params, batch, rng):
        del rng
        out = jnp.tanh(batch @ params["kernel"] + params["bias"][None, :])
        return jnp.mean(out**2) + jnp.mean(params["table"] ** 2), {}


TASK = toy(Small, seeds=2, steps=STEPS, log_every=1, checkpoint_every=2, keep=3, batch_size=5)


@functools.cache
def template(home: Path) -> tuple[Path, Result]:
    """A run that was cut off after its step 4 had been saved, and how it ends."""
    folder = home / "small"
    ended = resumed(folder)
    if ended.status or ended.err:
        raise RuntimeError(f"an undisturbed run failed: {ended}")
    reached = result(folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))  # and metrics.jsonl runs ahead
    return folder, reached


def resumed(folder: Path) -> Ended:
    """As scripts/train.py --resume; only that a bug's traceback is of another kind."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            train_toy(TASK, folder)
        except ValueError as error:
            print(f"error: {error}", file=err)
            status = 2
        except Exception:
            traceback.print_exc(file=err)
            status = 1
    return Ended(status, out.getvalue(), err.getvalue())


def result(folder: Path) -> Result:
    """What it left."""
    state = saved_state(TASK, folder, step=STEPS)
    return Result(hashes(state), (folder / "metrics.jsonl").read_bytes())


def resumed_from(folder: Path) -> int:
    """The step that its last session began with."""
    return read_lines(folder / "timing.jsonl")[-1]["from_step"]
