"""Small models of characters learn a text together, and are measured on a text: one program."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.tasks.text import MODEL, Text
from attention_jax.tasks.tokens import without_source
from attention_jax.tasks.vocabulary import FIRST
from attention_jax.training.step import TrainState, train_steps
from attention_jax.training.task import TrainConfig
from experiments.bench.training import started
from experiments.reversal.arms import AtRate

SMALL: Any = {
    "model": dataclasses.replace(MODEL, dim=64, hidden_dim=128, num_heads=2, dropout_rate=0.0),
    "train": TrainConfig(steps=600, batch_size=8),
    "length": 64,
}
WORST = 8.0  # bits of a uniform guess of a byte
Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DrawnText(Text):
    """The same task, whose batches are drawn on the device, from the first eight tenths."""

    def tenths(self) -> tuple[bytes, bytes, bytes]:
        """The text to learn from, the text that chooses, and the text that measures.

        Raises:
            ValueError: as `Text.parts`; or a part has not one batch of windows.
        """
        read, last = self.parts()
        characters = read.decode()
        end = len(characters) - len(last.decode())
        parts = characters[:end].encode(), characters[end:].encode(), last
        least = self.length * (self.train.batch_size or 1) + 1
        if min(map(len, parts)) < least:
            raise ValueError(
                f"each tenth of {self.text} must have {least} bytes; got {min(map(len, parts))}"
            )
        return parts

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Any:
        del length
        text = jnp.asarray(np.frombuffer(self.tenths()[0], np.uint8))
        starts = jax.random.randint(rng, (size, 1), 0, len(text) - self.length)
        ids = FIRST + text[starts + jnp.arange(self.length + 1)[None, :]].astype(jnp.int32)
        return without_source(ids[:, :-1], ids[:, 1:])


def bits_of(task: Any, cells: Sequence[tuple[int, float, float]], text: bytes) -> np.ndarray:
    """Trains a model for each (seed, factor, rate): bits per character of a text, [cells].

    The text is read in windows of `length` bytes that do not overlap; what is left of the last
    batch of windows is left out. A training that diverges has 8 bits.
    """
    size, length = task.train.batch_size, task.length
    count = (len(text) - 1) // (size * length)
    starts = length * np.arange(count * size).reshape(count, size, 1)
    windows = np.frombuffer(text, np.uint8)[starts + np.arange(length + 1)]
    at_once = 2 if jax.default_backend() == "cpu" else len(cells)
    nats = np.concatenate(
        [_nats_of(task, cells[i : i + at_once], windows) for i in range(0, len(cells), at_once)]
    )
    read = count * size * length
    bits = nats / math.log(2) * read / len(text[1 : 1 + read].decode(errors="ignore"))
    return np.minimum(np.nan_to_num(bits, nan=WORST), WORST)


def _nats_of(task: Any, cells: Sequence[tuple[int, float, float]], windows: Array) -> np.ndarray:
    seeds, factors, rates = (np.array(column) for column in zip(*cells, strict=True))
    state = started(task, seeds, factors)
    return np.asarray(_nats_after_training(task, state, jnp.float32(rates), windows), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _nats_after_training(task: Any, state: TrainState, rates: Array, windows: Array) -> Array:
    """Mean nats per byte of windows [n, batch, length + 1], for each training of a stack."""

    def one(state: TrainState, rate: Array) -> Array:
        params = train_steps(AtRate(task, rate), task.train.steps, state)[0].params

        def nats(ids: Array) -> Array:
            ids = FIRST + ids.astype(jnp.int32)
            loss: Array = task.loss(params, without_source(ids[:, :-1], ids[:, 1:]), None)[0]
            return loss

        return jnp.mean(jax.lax.map(nats, windows))

    return jax.vmap(one)(state, rates)
