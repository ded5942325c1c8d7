"""Functions of (query position, key position) that are never stored as [T, S].

What masks (which pairs may attend) and biases (what is added to the logits) have in common: they
answer for the positions they are asked about, so that a tiled implementation asks tile by tile.
They are pytrees: options are static and compared by value, arrays are leaves whose leading axes
broadcast to the batch axes `*B`: all of them, or none, for a mask; aligned to the right, as NumPy
does, for a bias.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Function = TypeVar("Function", bound="PositionFunction")

_CORE_AXES = "core_axes"


def array_field(*core_axes: str | int) -> Any:
    """An array leaf `[*B, *core_axes]`.

    Args:
        core_axes: each is "T" or "S" (that length, or 1), another name (any size), or a size.
    """
    return dataclasses.field(metadata={_CORE_AXES: core_axes})


def part_field() -> Any:
    """A leaf that is itself a function of positions."""
    return dataclasses.field(metadata={_CORE_AXES: None})


@dataclass_transform(frozen_default=True)
def position_dataclass(cls):
    """Makes a class of annotated fields a frozen dataclass and a pytree.

    Fields made by `array_field` or `part_field` are leaves; all others are static options. One
    without arrays is hashable by value and may be a static argument of `jax.jit`.
    """
    declared = [
        *getattr(cls, "__dataclass_fields__", {}).values(),  # inherited
        *(getattr(cls, name, None) for name in inspect.get_annotations(cls)),
    ]
    holds_arrays = any(
        isinstance(field, dataclasses.Field) and field.metadata.get(_CORE_AXES) is not None
        for field in declared
    )
    # Arrays have no truth value, so what holds one is compared by identity.
    cls = dataclasses.dataclass(frozen=True, eq=not holds_arrays)(cls)
    leaves = [field.name for field in dataclasses.fields(cls) if _CORE_AXES in field.metadata]
    static = [field.name for field in dataclasses.fields(cls) if field.name not in leaves]
    return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=static)


def check_decorated(function: PositionFunction) -> None:
    """Raises ValueError if `position_dataclass` has not made the function's class a pytree."""
    if jax.tree_util.all_leaves([function]):
        raise ValueError(
            f"{type(function).__name__} must be decorated with @{function.kind}_dataclass"
        )


class PositionFunction:
    """What masks and biases share: how their arrays relate to the batch axes."""

    kind: ClassVar[str]  # what error messages call it
    # Whether an array has all batch axes or none. If not, fewer are aligned to the right.
    all_batch_axes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # Compared by value in static options, arrays would be: gradients would not reach them.
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if _CORE_AXES not in field.metadata and isinstance(value, jax.Array | np.ndarray):
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be declared `{field.name}: Array ="
                    " array_field()` to hold an array; without that it is a static option"
                )

    def core_ndims(self: Function) -> Function:
        """This function with every array replaced by its number of axes without batch axes."""
        return dataclasses.replace(  # type: ignore[type-var]
            self,
            **{
                name: value.core_ndims() if core_axes is None else len(core_axes)
                for name, value, core_axes in self._leaves()
                if value is not None
            },
        )

    def check(
        self, batch_shape: tuple[int, ...] | None, target_length: int, source_length: int
    ) -> None:
        """Raises ValueError unless every array fits inputs of shape [*B, T, D] and [*B, S, D].

        With `batch_shape=None`, any batch axes will do.
        """
        sizes: dict[str | int, int] = {"T": target_length, "S": source_length}
        for name, value, core_axes in self._leaves():
            if value is None:
                continue
            if core_axes is None:
                value.check(batch_shape, target_length, source_length)
                continue
            shape = np.shape(value)
            own = shape[: max(len(shape) - len(core_axes), 0)]
            core = [
                sizes.get(axis, axis if isinstance(axis, int) else size)
                for axis, size in zip(core_axes, shape[len(own) :], strict=False)
            ]
            full = (*(own if batch_shape is None else batch_shape), *core)
            if self.all_batch_axes and batch_shape is not None:
                check_batch_axes(self.label(name), shape, len(core_axes), batch_shape)
            if len(shape) < len(core_axes) or not broadcasts(shape, full):
                expected = [*full, *(sizes.get(axis, axis) for axis in core_axes[len(core) :])]
                raise ValueError(
                    f"{self.label(name)} must broadcast to [{', '.join(map(str, expected))}]"
                    f" ({', '.join(['*B', *map(str, core_axes)])}); got {list(shape)}"
                )

    def label(self, name: str) -> str:
        """What error messages call the array `name`."""
        return f"{self.kind} {name}"

    def _leaves(self) -> Iterator[tuple[str, Any, tuple[str | int, ...] | None]]:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if _CORE_AXES in field.metadata:
                yield field.name, getattr(self, field.name), field.metadata[_CORE_AXES]


def check_batch_axes(
    label: str, shape: tuple[int, ...], core_ndim: int, batch_shape: tuple[int, ...]
) -> None:
    """Raises ValueError if an array has some of the batch axes and lacks others.

    Args:
        label: what the array is called, its name last.
        shape: its shape.
        core_ndim: how many axes it has without batch axes.
        batch_shape: *B.
    """
    own = shape[: max(len(shape) - core_ndim, 0)]
    missing = len(batch_shape) - len(own)
    if not own or missing <= 0:
        return
    name, batch = label.split()[-1], f"[{', '.join(map(str, batch_shape))}]"
    as_first = f"{name}[{', '.join([':'] * len(own) + ['None'] * missing)}]"
    as_last = f"{name}[{', '.join(['None'] * missing)}]"
    fits = [
        code
        for code, axes in ((as_first, batch_shape[: len(own)]), (as_last, batch_shape[missing:]))
        if broadcasts(own, axes)
    ]
    if len(fits) == 2:
        fits = [f"{as_first} if its axes are the first of {batch}", f"{as_last} if the last"]
    raise ValueError(
        f"{label} must have all {len(batch_shape)} batch axes *B = {batch} (size 1 where shared),"
        f" or none; got {list(shape)}" + (f": write {', or '.join(fits)}" if fits else "")
    )


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `full`, and no larger."""
    aligned = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(size in (1, to) for size, to in aligned)


def take(array: Array, positions: Array, axis: int) -> Array:
    """`array` at `positions`, beyond its end the last; an axis of size 1 stands for all of them."""
    size = array.shape[axis]
    if size == 1:
        return array
    # A padded tile asks beyond the end. `mode="clip"` alone would do, but for `checkify`.
    return jnp.take(array, jnp.clip(positions, 0, size - 1), axis=axis, mode="clip")


# Ranks are made equal by hand, so that nothing here depends on implicit rank promotion, which
# careful users turn off.


def pad_rank(array: Array, ndim: int) -> Array:
    """`array` with axes of size 1 in front, `ndim` axes in all."""
    if array.ndim >= ndim:  # a reshape to the same shape costs something outside of `jit`
        return array
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def same_rank(left: Array, right: Array) -> tuple[Array, Array]:
    """Both with as many axes as the one that has more."""
    ndim = max(left.ndim, right.ndim)
    return pad_rank(left, ndim), pad_rank(right, ndim)
