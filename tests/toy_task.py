"""A toy task for tests of training: no model of attention, nothing that takes long to compile."""

import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.training.run import train_run
from attention_jax.training.step import state_shapes
from attention_jax.training.task import Result, Task, TrainConfig


def numbers(rng, count):
    """Numbers that differ from key to key: those of a generator take long to compile."""
    # The angles are small, because the rounding error of the sine of a large one is large.
    phase = (jax.random.key_data(rng) % jnp.uint32(1009)).astype(jnp.float32) / 1009
    return jnp.sin(1.3 * jnp.arange(count, dtype=jnp.float32) + 6 * phase[0] + phase[1])


@dataclasses.dataclass(frozen=True)
class NoModel:
    """Settings of a model of the user's own."""


@dataclasses.dataclass(frozen=True)
class Toy(Task):
    """Linear regression; subclasses at the top of a test file replace its parts."""

    name: ClassVar[str] = "toy"
    dim: ClassVar[int] = 3

    model: NoModel = NoModel()
    train: TrainConfig = TrainConfig(seeds=2, batch_size=7)

    def optimizer(self):
        return optax.sgd(0.05, momentum=0.9)

    def init(self, rng):
        return {"w": numbers(rng, self.dim)}

    def batch(self, rng, *, size, length=None):
        x = numbers(rng, size * self.dim).reshape(size, self.dim)
        return {"x": x, "y": x @ jnp.array([1.0, -2.0, 0.5])}

    def loss(self, params, batch, rng):
        del rng
        error = batch["x"] @ params["w"] - batch["y"]
        return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error))}

    def evaluate(self, params, lengths=(), *, folder=None):
        del lengths, folder
        return {"size": Result(jnp.sum(params["w"], axis=1).tolist(), False)}

    def statistics(self, loss, params, batch, rng):
        (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, rng)
        return {"value": value, "norm": optax.tree.norm(gradient)}


def toy(cls=Toy, **train: Any):
    """A toy task with some settings of its training."""
    settings = {"seeds": 2, "batch_size": 7, **train}
    return cls(train=TrainConfig(**settings))


def train_toy(task, folder, **options):
    """Trains a task, or resumes it: the attributes of `TrainedRun`, and `state`, the last saved."""
    run = train_run(task, folder, resume=True, **options)
    return SimpleNamespace(**vars(run), state=saved_state(task, folder))


def saved_state(task, folder, step="newest"):
    """The state of a checkpoint."""
    like = state_shapes(task)
    return Checkpoints(folder / "checkpoints", read_only=True).restore(like, step)
