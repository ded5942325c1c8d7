"""Training of a toy task by one of many processes, for runs/test_processes.py.

Run as a script with a folder and the options of scripts/train.py for many processes. It trains, and
then prints which rows of a batch this process draws.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from toy_task import Toy, toy

from attention_jax.runs import processes
from attention_jax.runs.processes import Distribution
from attention_jax.training.run import train_run
from attention_jax.training.sharding import Layout, MeshShape, whole_machine

ROWS, FEATURES = 12, 3


@dataclasses.dataclass(frozen=True)
class Shared(Toy):
    """A batch that both processes draw their part of."""

    def optimizer(self):
        return optax.sgd(0.05)

    def init(self, rng):
        return {"w": jax.random.normal(rng, (FEATURES,))}

    def batch(self, rng, *, size, length=None):
        return jax.random.normal(rng, (size, FEATURES))

    def loss(self, params, batch, rng):
        del rng
        return jnp.mean((batch @ params["w"] - 1) ** 2), {}


TASK = toy(Shared, steps=12, log_every=2, checkpoint_every=4, batch_size=ROWS)


def train(folder):
    train_run(TASK, folder)


def print_rows_drawn_here():
    assert whole_machine() == MeshShape(data=jax.process_count())
    layout = Layout(whole_machine())
    drawn = jax.jit(lambda rng: layout.constrained(TASK.batch(rng, size=ROWS), "data"))(
        jax.random.key(3)
    )
    (shard,) = drawn.addressable_shards
    assert shard.data.tolist() == layout.to_host(drawn)[shard.index].tolist()
    print(*shard.index[0].indices(ROWS)[:2])


if __name__ == "__main__":
    _, folder, _, _, coordinator, _, count, _, index = sys.argv
    processes.join(Distribution(coordinator, int(count), int(index)))
    train(Path(folder))
    print_rows_drawn_here()
