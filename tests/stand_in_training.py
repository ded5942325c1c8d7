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


def scaled_at_each_step(_task, _feed, _layout, state, records, _interruption):
    """Stands for training: each checkpoint has larger parameters than the one before."""
    start = jax.tree.map(np.asarray, state.params)
    for step in (2, 4, 6):
        params = jax.tree.map(lambda leaf, n=step: jnp.asarray(leaf * np.float32(1 + n / 6)), start)
        state = state._replace(step=jnp.full_like(state.step, step), params=params)
        records.checkpoints.save(step, state)
    return state


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
    with mock.patch("attention_jax.training.run.train", scaled_at_each_step):
        train_run(TASK, folder / "run")
    return folder / "run"
