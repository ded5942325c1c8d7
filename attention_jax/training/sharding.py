"""Devices for training: a mesh over seeds and examples, and where each array lies on it.

The models here are small: every device holds all parameters of its seeds. To train a larger model,
shard its parameters with `jax.device_put`.
"""

import dataclasses
import functools
import math
from typing import Any, Self

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax.core.checks import check_integer
from attention_jax.runs.processes import several

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Number of devices along each axis of the mesh.

    Attributes:
        seed: spreads the seeds; divides their number.
        data: spreads the examples of a batch; divides their number.
    """

    seed: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            check_integer(f"mesh {name}", size)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(dataclasses.astuple(self))

    @classmethod
    def default(cls) -> Self:
        """One device; with several processes all their devices, along "data"."""
        return cls(data=jax.device_count() if several() else 1)

    def check(self, *, seeds: int, batch_size: int | None) -> None:
        """Raises ValueError unless the devices exist and the mesh divides the seeds and the batch.

        Args:
            seeds: how many.
            batch_size: examples of a batch; None if batches are made to fit the mesh.
        """
        if self.devices > jax.device_count():
            raise ValueError(
                f"mesh must have at most {jax.device_count()} devices, which there are; got"
                f" seed={self.seed} data={self.data}"
            )
        if several() and self.devices < jax.device_count():
            raise ValueError(
                f"mesh must have all {jax.device_count()} devices of the processes; got"
                f" seed={self.seed} data={self.data}"
            )
        if seeds % self.seed:
            raise ValueError(f"mesh seed must divide the {seeds} seeds; got {self.seed}")
        if batch_size is not None and batch_size % self.data:
            raise ValueError(f"mesh data must divide the batch of {batch_size}; got {self.data}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the sharding of each array of the training loop.

    Attributes:
        shape: of the mesh; None for one device.
    """

    shape: MeshShape | None = None

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices."""
        shape = self.shape or MeshShape()
        sizes = dataclasses.asdict(shape)
        return jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            # Flax's embeddings do not support explicit axes.
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=jax.devices()[: shape.devices],
        )

    @property
    def by_seed(self) -> NamedSharding:
        """The sharding of an array that is stacked over seeds."""
        return NamedSharding(self.mesh, PartitionSpec("seed"))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def placed(self, stacked: Any) -> Any:
        """Shapes, dtypes and shardings of a state: the form that a checkpoint is restored to."""
        by_seed = self.by_seed
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_seed), stacked
        )

    def constrained(self, tree: Any, axis: str | None = None) -> Any:
        """Constrains one seed's arrays, in a program vmapped over "seed".

        Args:
            tree: a state or a batch.
            axis: spreads the first axis of each leaf; None if each device holds the whole leaf.
        """
        if self.mesh.size == 1:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(axis))
        return jax.tree.map(
            lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding) if leaf.ndim else leaf,
            tree,
        )
