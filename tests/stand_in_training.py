"""Stands for training where tests need checkpoints and no learning."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import train_run
from attention_jax.training.task import TrainConfig


def scaled(_compiled, state, step, count, _feed, _given):
    """Stands for a compiled call: the parameters are larger after each one."""
    larger = np.float32((6 + step + count) / (6 + step))
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) * larger), state.params)
    metrics = {"loss": np.full(len(state.step), float(step + count))}
    return state._replace(step=state.step + count, params=params), metrics, None


def without_training(advance=scaled):
    """Patches the compiled calls of runs: nothing is traced, compiled or learned."""
    nothing = {"trace": lambda *_: None, "advance": advance}
    return mock.patch.multiple("attention_jax.training.step.Compiled", **nothing)


TASK = Reversal(
    ModelConfig(
        score="general", dim=8, hidden_dim=12, positions="learned", position_limit=13,
        encoder_layers=0, decoder_self_attention=False,
    ),
    TrainConfig(seeds=2, steps=6, log_every=2, checkpoint_every=2, batch_size=3),
)  # fmt: skip


@functools.cache
def run_of_two_seeds() -> Path:
    """The folder of a run of TASK, made once: copy it before you write to it."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with without_training():
        train_run(TASK, folder / "run")
    return folder / "run"
