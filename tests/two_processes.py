"""Training of a toy task by one of many processes, for runs/test_processes.py.

Run as a script with a folder and the options of scripts/train.py for many processes. It trains, and
then prints which rows of a batch this process draws.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from attention_jax.training.task_definition import TaskDefinition
from toy_task import ToyConfig

from attention_jax.runs import processes
from attention_jax.runs.processes import Distribution
from attention_jax.training.loop import LoopConfig, Task
from attention_jax.training.run import train_run
from attention_jax.training.sharding import Layout, MeshShape, whole_machine

ROWS, FEATURES = 12, 3
LOOP = LoopConfig(seeds=2, steps=12, log_every=2, checkpoint_every=4)


def init(rng):
    return {"w": jax.random.normal(rng, (FEATURES,))}


def batch(rng):
    return jax.random.normal(rng, (ROWS, FEATURES))


def loss(params, batch, rng):
    del rng
    return jnp.mean((batch @ params["w"] - 1) ** 2), {}


TASK = Task(init, batch, loss)
DEFINITION = TaskDefinition(
    "toy",
    ToyConfig,
    task=lambda config: TASK,
    optimizer=lambda config: optax.sgd(0.05),
    batch_size=lambda config: ROWS,
)


def train(folder):
    train_run(DEFINITION, ToyConfig(LOOP, folder.name), folder)


def print_rows_drawn_here():
    assert whole_machine() == MeshShape(data=jax.process_count())
    layout = Layout(whole_machine())
    drawn = jax.jit(lambda rng: layout.constrained_batch(batch(rng)))(jax.random.key(3))
    (shard,) = drawn.addressable_shards
    assert shard.data.tolist() == layout.to_host(drawn)[shard.index].tolist()
    print(*shard.index[0].indices(ROWS)[:2])


if __name__ == "__main__":
    _, folder, _, _, coordinator, _, count, _, index = sys.argv
    processes.join(Distribution(coordinator, int(count), int(index)))
    train(Path(folder))
    print_rows_drawn_here()
