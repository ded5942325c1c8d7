"""Where a run's arrays lie: which axes of states and batches are cut up over which devices.

A mesh of devices has three axes. Along "seed" lie different seeds, which have nothing to say to
each other; along "data" different examples of a batch, whose gradients are added up; along "fsdp"
these too, and pieces of parameters and optimiser state as well, so that no device holds the state
whole; parameters come together for the length of a step. XLA finds the communication that this
asks for (GSPMD); the program is the same on any mesh, and its numbers are too, but for the order
of sums.

Source: Xu et al. 2021 (GSPMD); Rajbhandari et al. 2020 (ZeRO, stage 3: our "fsdp").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax.core.checks import check_integer

Array = jax.Array

_EXAMPLES = ("data", "fsdp")  # the axes over which a batch is cut up


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices along each axis of the mesh; together, how many a run has.

    Attributes:
        seed: over which seeds are spread; divides their number.
        data: over which the examples of a batch are spread.
        fsdp: the same, and parameters and optimiser state too; data * fsdp divides the batch.
    """

    seed: int = 1
    data: int = 1
    fsdp: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            check_integer(f"mesh {name}", size)

    @property
    def devices(self) -> int:
        return math.prod(dataclasses.astuple(self))

    @classmethod
    def from_words(cls, words: Sequence[str]) -> MeshShape:
        """["data=4", "seed=2"] and the like."""
        names = [field.name for field in dataclasses.fields(cls)]
        sizes: dict[str, int] = {}
        for word in words or [""]:
            name, _, size = word.partition("=")
            if name not in names or not size.isdecimal() or name in sizes:
                raise ValueError(
                    f"mesh must be one or more of {', '.join(f'{n}=DEVICES' for n in names)};"
                    f" got {word!r}"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    def to_words(self) -> list[str]:
        """What `from_words` takes."""
        return [f"{name}={size}" for name, size in dataclasses.asdict(self).items()]

    def check(self, *, seeds: int, batch_size: int) -> None:
        """Raises ValueError unless there are so many devices, and the run can be cut up so."""
        if self.devices > jax.device_count():
            raise ValueError(
                f"mesh {' '.join(self.to_words())} needs {self.devices} devices; there are"
                f" {jax.device_count()}"
            )
        if jax.process_count() > 1 and self.devices != jax.device_count():
            raise ValueError(
                f"mesh {' '.join(self.to_words())} must take all {jax.device_count()} devices of"
                f" the {jax.process_count()} processes; it takes {self.devices}"
            )
        if seeds % self.seed:
            raise ValueError(f"mesh seed must divide the {seeds} seeds; got {self.seed}")
        if batch_size % (self.data * self.fsdp):
            raise ValueError(
                f"mesh data times fsdp must divide the batch of {batch_size};"
                f" got {self.data} * {self.fsdp}"
            )


def whole_machine() -> MeshShape:
    """One device; all of them, along "data", for a run of many processes."""
    return MeshShape(data=jax.device_count() if jax.process_count() > 1 else 1)


class Layout:
    """A mesh, and where a training loop's arrays lie on it.

    Args:
        shape: of the mesh, which takes the first devices there are.
    """

    def __init__(self, shape: MeshShape | None = None):
        self.shape = shape or MeshShape()
        sizes = dataclasses.asdict(self.shape)
        self.mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            # Explicit axes, the other kind, do not go through Flax's embeddings.
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=jax.devices()[: self.shape.devices],
        )
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, stacked: Any) -> Any:
        """Of each leaf of a state stacked over seeds, arrays or their shapes."""
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, PartitionSpec("seed", *self._spec(leaf, 1))),
            stacked,
        )

    def placed(self, stacked: Any) -> Any:
        """Its shapes and dtypes, and where they lie: what a checkpoint is restored to."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            stacked,
            self.shardings(stacked),
        )

    def constrained_state(self, state: Any) -> Any:
        """The state of one seed, told where to lie; inside a program vmapped over "seed"."""
        return jax.tree.map(
            lambda leaf: self._told(leaf, self._spec(leaf, 0)) if leaf.ndim else leaf, state
        )

    def gathered(self, params: Any) -> Any:
        """The parameters of one seed, whole: else XLA would send activations in place of them."""
        return jax.tree.map(lambda leaf: self._told(leaf, ()), params)

    def constrained_batch(self, batch: Any) -> Any:
        """The batch of one seed, each leaf's first axis over the devices of its examples."""
        return jax.tree.map(
            lambda leaf: self._told(leaf, (_EXAMPLES,)) if leaf.ndim else leaf, batch
        )

    def fetched(self, array: Array) -> np.ndarray:
        """Its values, on every process."""
        if not array.is_fully_addressable:
            array = jax.jit(jnp.copy, out_shardings=self.everywhere)(array)
        return np.asarray(array)

    def _spec(self, leaf: Any, first: int) -> tuple[str | None, ...]:
        """Over "fsdp", the largest axis from `first` on that it divides; the last of equal ones."""
        sizes = leaf.shape[first:]
        fitting = [size for size in sizes if size % self.shape.fsdp == 0]
        if self.shape.fsdp == 1 or not fitting:
            return (None,) * len(sizes)
        chosen = max(axis for axis, size in enumerate(sizes) if size == max(fitting))
        return tuple("fsdp" if axis == chosen else None for axis in range(len(sizes)))

    def _told(self, leaf: Array, spec: tuple[Any, ...]) -> Array:
        if self.shape.devices == 1:
            return leaf
        return jax.lax.with_sharding_constraint(
            leaf, NamedSharding(self.mesh, PartitionSpec(*spec))
        )
