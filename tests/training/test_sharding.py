"""Meshes of eight devices: what is the same, what is cut up, what is sent."""

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from saved_files import assert_bits_equal
from toy_task import Toy, toy, train_toy

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import load_run
from attention_jax.training.sharding import Layout, MeshShape
from attention_jax.training.step import initial_state
from attention_jax.training.task import Feed, TrainConfig

MESHES = {
    "data": MeshShape(data=8),
    "seed": MeshShape(seed=4),
    "all": MeshShape(data=4, seed=2),
}
TOLERANCE = 3e-6  # the gradient's sums are taken in another order


@dataclasses.dataclass(frozen=True)
class Drawn(Toy):
    """Each device draws its own part of a batch."""

    train: TrainConfig = TrainConfig(
        seeds=4, steps=6, log_every=2, checkpoint_every=2, batch_size=16
    )

    def init(self, rng):
        return {"kernel": jax.random.normal(rng, (16, 24)), "out": jnp.linspace(-1.0, 1.0, 24)}

    def batch(self, rng, *, size, length=None):
        return jax.random.normal(rng, (size, 16))

    def loss(self, params, batch, rng):
        noise = 0.1 * jax.random.normal(rng, (len(batch),))
        return jnp.mean((jnp.tanh(batch @ params["kernel"]) @ params["out"] + noise) ** 2), {}


class Fed(Drawn):
    """Batches made on the host; each device gets its part."""

    def feed(self, folder, *, multiple_of=1):
        def batch(seed, step):
            rng = np.random.default_rng([seed, step])
            return rng.normal(size=(8, 16)).astype(np.float32)

        return Feed(batch)


FED = Fed(train=dataclasses.replace(Drawn.train, batch_size=None))


@functools.cache
def trained(task, mesh):
    """Trains over a mesh, or on one device for None: the folder, and the run."""
    folder = Path(tempfile.mkdtemp())
    return folder, train_toy(task, folder, mesh=MESHES.get(mesh))


def losses(folder):
    return np.array([line["loss"] for line in read_lines(folder / "metrics.jsonl")])


def assert_spread(stacked, mesh):
    """Asserts that devices hold their seeds."""
    for leaf in jax.tree.leaves(stacked):
        assert len(leaf.addressable_shards) == mesh.devices
        for shard in leaf.addressable_shards:
            assert shard.data.shape[0] * mesh.seed == leaf.shape[0]
            assert shard.data.size * mesh.seed == leaf.size


SLOW = [pytest.param(Drawn(), mesh, marks=pytest.mark.slow) for mesh in ("data", "seed")]


@pytest.mark.parametrize(("task", "mesh"), [(Drawn(), "all"), (FED, "all"), *SLOW])
def test_trains_as_one_device_does(task, mesh):
    (folder, spread), (folder_of_one, alone) = trained(task, mesh), trained(task, None)
    expected = losses(folder_of_one)
    assert expected.shape == (3, 4)
    assert len(np.unique(expected)) == expected.size
    np.testing.assert_allclose(losses(folder), expected, rtol=TOLERANCE)
    for one, other in zip(*map(jax.tree.leaves, (spread.params, alone.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert_spread(spread.params, MESHES[mesh])
    state = initial_state(task, Layout(MESHES[mesh]))
    assert_spread(state, MESHES[mesh])
    assert_bits_equal(state, initial_state(task))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(None, "all"), ("all", None), ("data", "seed"), ("seed", "data")]
)
def test_goes_on_over_others(before, after):
    """A state saved on one mesh is restored on another, and training reaches the same losses."""
    task, folder = Drawn(), Path(tempfile.mkdtemp()) / "run"
    shutil.copytree(trained(task, before)[0], folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    layout = Layout(MESHES.get(after))
    start = functools.partial(initial_state, task)
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    alone = checkpoints.restore(jax.eval_shape(start))
    spread = checkpoints.restore(layout.placed(jax.eval_shape(start)))
    assert {*alone.step.tolist()} == {4}
    assert_bits_equal(alone, spread)
    assert_spread(spread, MESHES.get(after, MeshShape()))
    train_toy(task, folder, mesh=MESHES.get(after))
    np.testing.assert_allclose(losses(folder), losses(trained(task, None)[0]), rtol=TOLERANCE)


class Filled(Drawn):
    """Batches made on the host, whose size depends on the mesh."""

    def feed(self, folder, *, multiple_of=1):
        return Feed(lambda seed, step: np.ones((multiple_of, 16), np.float32))


@pytest.mark.slow
def test_filled_up_batches_do_not_change_the_program():
    folder = Path(tempfile.mkdtemp())
    task = toy(Filled, seeds=4, steps=2, log_every=2, checkpoint_every=2, batch_size=None)
    train_toy(task, folder, mesh=MESHES["all"])
    assert load_run(folder).step == 2


def test_each_part_is_drawn_where_it_is_used():
    layout, task = Layout(MeshShape(data=8)), Reversal()
    rng = jax.random.key(5)
    draw = jax.jit(lambda rng: layout.constrained(task.batch(rng, size=16), "data"))
    assert collectives(draw.lower(rng).compile()) == []
    drawn = draw(rng)
    assert_bits_equal(drawn, jax.jit(lambda rng: task.batch(rng, size=16))(rng))
    for leaf in jax.tree.leaves(drawn):
        rows = [shard.index[0].indices(16)[:2] for shard in leaf.addressable_shards]
        assert sorted(rows) == [(first, first + 2) for first in range(0, 16, 2)]
