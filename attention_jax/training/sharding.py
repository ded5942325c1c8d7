"""How a run's arrays are sharded over a mesh of devices.

The mesh has three axes. "seed" spreads the seeds, which are independent of each other. "data"
spreads the examples of a batch, whose gradients are summed. "fsdp" spreads the examples too, and
also the parameters and the optimiser state, so that no device holds the whole state: the loss
gathers each parameter where it reads it, forward and again backward, and each gradient is summed
onto the devices that hold the parameter's parts (a reduce-scatter). XLA inserts the communication
(GSPMD). The program is the same on any mesh, and so are its numbers, except for rounding in sums
whose order differs.

Source: Xu et al. 2021 (GSPMD); Rajbhandari et al. 2020 (ZeRO, stage 3: our "fsdp").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax.core.checks import check_integer

Array = jax.Array

_GATHERED = "gathered parameter"  # the name of values that the backward pass computes again
_EXAMPLES = ("data", "fsdp")  # mesh axes that spread the examples of a batch


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Number of devices along each axis of the mesh.

    Attributes:
        seed: spreads the seeds; divides their number.
        data: spreads the examples of a batch.
        fsdp: spreads the examples, and parameters and optimiser state as well; data * fsdp divides
            the batch.
    """

    seed: int = 1
    data: int = 1
    fsdp: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            check_integer(f"mesh {name}", size)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(dataclasses.astuple(self))

    @classmethod
    def from_words(cls, words: Sequence[str]) -> MeshShape:
        """Parses words such as ["data=4", "seed=2"]."""
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
        """The words that `from_words` parses."""
        return [f"{name}={size}" for name, size in dataclasses.asdict(self).items()]

    def check(self, *, seeds: int, batch_size: int | None) -> None:
        """Raises ValueError unless the devices exist and the mesh divides the seeds and the batch.

        Args:
            seeds: how many.
            batch_size: examples of a batch; None if batches are made to fit the mesh.
        """
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
        if batch_size is not None and batch_size % (self.data * self.fsdp):
            raise ValueError(
                f"mesh data times fsdp must divide the batch of {batch_size};"
                f" got {self.data} * {self.fsdp}"
            )


def whole_machine() -> MeshShape:
    """The default mesh: one device, or in a run of many processes all devices along "data"."""
    return MeshShape(data=jax.device_count() if jax.process_count() > 1 else 1)


class Layout:
    """A mesh, and the sharding of each array of the training loop.

    Attributes:
        shape: of the mesh.
        mesh: the devices.
        replicated: the sharding of an array that every device holds whole.
    """

    def __init__(self, shape: MeshShape | None = None, devices: Sequence[jax.Device] | None = None):
        """The default for `devices` is the first of the available ones."""
        self.shape = shape or MeshShape()
        sizes = dataclasses.asdict(self.shape)
        self.mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            # Flax's embeddings do not support explicit axes.
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=(devices or jax.devices())[: self.shape.devices],
        )
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, stacked: Any) -> Any:
        """The sharding of each leaf of a state stacked over seeds; leaves are arrays or shapes."""
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, PartitionSpec("seed", *self._spec(leaf, 1))),
            stacked,
        )

    def placed(self, stacked: Any) -> Any:
        """Shapes, dtypes and shardings of a state: the form that a checkpoint is restored to."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            stacked,
            self.shardings(stacked),
        )

    def constrained_state(self, state: Any) -> Any:
        """Constrains the sharding of one seed's state, in a program vmapped over "seed"."""
        return jax.tree.map(
            lambda leaf: self._constrained(leaf, self._spec(leaf, 0)) if leaf.ndim else leaf, state
        )

    def with_gathered_params(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(params, ...)` of one seed, computed from parameters that "fsdp" cuts up.

        Each parameter is gathered on its own; otherwise XLA would communicate activations instead.
        The backward pass gathers it again, so that no device holds all parameters between the
        passes, and leaves each device the part of the gradient that belongs to its part.
        """
        if self.shape.devices == 1:
            return function

        def gathered(params: Any, *arguments: Any) -> Any:
            return function(jax.tree.map(self._gathered, params), *arguments)

        if self.shape.fsdp == 1:
            return gathered
        policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
        return jax.checkpoint(gathered, policy=policy)

    def _gathered(self, leaf: Array) -> Array:
        """The whole array on every device; the gradient is cut up like the parameter."""
        spec = self._spec(leaf, 0)

        @jax.custom_vjp
        def gather(leaf: Array) -> Array:
            return self._constrained(leaf, ())

        gather.defvjp(
            lambda leaf: (gather(leaf), None),
            lambda _, gradient: (self._constrained(gradient, spec),),
        )
        return checkpoint_name(gather(leaf), _GATHERED)

    def constrained_batch(self, batch: Any) -> Any:
        """Spreads the first axis of each leaf of one seed's batch over "data" and "fsdp"."""
        return jax.tree.map(
            lambda leaf: self._constrained(leaf, (_EXAMPLES,)) if leaf.ndim else leaf, batch
        )

    def to_host(self, array: Array) -> np.ndarray:
        """The values of an array on the host, on every process."""
        if not array.is_fully_addressable:
            array = jax.jit(jnp.copy, out_shardings=self.replicated)(array)
        return np.asarray(array)

    def _spec(self, leaf: Any, first: int) -> tuple[str | None, ...]:
        """Cuts the largest axis, from `first` on, that "fsdp" divides; the last of equal axes."""
        sizes = leaf.shape[first:]
        fitting = [size for size in sizes if size % self.shape.fsdp == 0]
        if self.shape.fsdp == 1 or not fitting:
            return (None,) * len(sizes)
        chosen = max(axis for axis, size in enumerate(sizes) if size == max(fitting))
        return tuple("fsdp" if axis == chosen else None for axis in range(len(sizes)))

    def _constrained(self, leaf: Array, spec: tuple[Any, ...]) -> Array:
        if self.shape.devices == 1:
            return leaf
        return jax.lax.with_sharding_constraint(
            leaf, NamedSharding(self.mesh, PartitionSpec(*spec))
        )
