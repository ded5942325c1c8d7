"""Functions of (query position, key position) that are never stored as [T, S].

The base class of masks and biases: `at` computes the entries of a tile from the tile's positions.
They are pytrees: options are static and compared by value; arrays are leaves whose leading axes
broadcast to the batch axes `*B`. A mask's array has all batch axes or none of them; the batch axes
of a bias's array are aligned to the right, as in NumPy.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import pad_rank
from attention_jax.core.names import is_of_this_package
from attention_jax.core.serialization import exported

Array = jax.Array
OwnClass = TypeVar("OwnClass", bound="PositionFunction")

_CORE_AXES = "core_axes"


class PositionFunction:
    """Base of masks and biases: a function of positions, and the batch axes of its arrays."""

    kind: ClassVar[str]  # the name in error messages
    users_name: ClassVar[str] = "at"  # the name of the method `at` in the classes of users
    # Whether an array must have all batch axes or none; else the axes are aligned to the right.
    all_batch_axes: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Users define `allowed` or `values`, the library `at`: the last definition has both names.
        names = cls.users_name, "at"
        if next(name for base in cls.__mro__ for name in names if name in vars(base)) == "at":
            setattr(cls, cls.users_name, cls.at)
        else:
            cls.at = PositionFunction.at  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        # An array as a static option would be compared by value, and have no gradient.
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if _CORE_AXES not in field.metadata and isinstance(value, jax.Array | np.ndarray):
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be declared `{field.name}: Array ="
                    " array_field()` to hold an array; otherwise it is a static option"
                )

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        """A mask's `allowed`, a bias's `values`: int [t] and [s] -> [..., t, s]."""
        return getattr(self, self.users_name)(query_positions, key_positions)

    def materialize(self, target_length: int, source_length: int) -> Array:
        """The whole table, bool or float [..., T, S].

        Raises:
            ValueError: an array does not fit T, S or the batch axes of the other arrays.

        >>> from attention_jax import causal_mask
        >>> causal_mask().materialize(2, 3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0]]
        """
        arrays, ndims = jax.tree.leaves(self), jax.tree.leaves(self.core_ndims())
        batch_shapes = [
            np.shape(array)[: max(np.ndim(array) - ndim, 0)]
            for array, ndim in zip(arrays, ndims, strict=True)
        ]
        self.check(np.broadcast_shapes(*batch_shapes), target_length, source_length)
        return self._table(target_length, source_length)

    def _table(self, target_length: int, source_length: int) -> Array:
        values = self.at(jnp.arange(target_length), jnp.arange(source_length))
        values = pad_rank(values, 2)
        return jnp.broadcast_to(values, (*values.shape[:-2], target_length, source_length))

    def core_ndims(self: OwnClass) -> OwnClass:
        """A copy with every array replaced by its number of axes, excluding batch axes."""
        ndims = [
            value.core_ndims() if core_axes is None else len(core_axes)
            for _, value, core_axes in self._leaves()
        ]
        return jax.tree.unflatten(jax.tree.structure(self), jax.tree.leaves(ndims))

    def check(self, batch_shape: tuple[int, ...], target_length: int, source_length: int) -> None:
        """Raises ValueError unless every array fits inputs of shape [*B, T, D] and [*B, S, D]."""
        sizes: dict[str | int, int] = {"T": target_length, "S": source_length}
        for name, value, core_axes in self._leaves():
            if core_axes is None:
                value.check(batch_shape, target_length, source_length)
                continue
            shape, label = np.shape(value), self.label(name)
            if self.all_batch_axes:
                check_batch_axes(label, shape, len(core_axes), batch_shape)
            full = (*batch_shape, *(sizes.get(axis, axis) for axis in core_axes))
            pairs = zip(reversed(shape), reversed(full), strict=False)
            fits = all(isinstance(to, str) or size in (1, to) for size, to in pairs)
            if not fits or not len(core_axes) <= len(shape) <= len(full):
                raise ValueError(
                    f"{label} must broadcast to [{', '.join(map(str, full))}]"
                    f" ({', '.join(['*B', *map(str, core_axes)])}); got {list(shape)}"
                )

    def label(self, name: str) -> str:
        """The name of the array `name` in error messages."""
        return f"{self.kind} {name}"

    def _leaves(self) -> Iterator[tuple[str, Any, tuple[str | int, ...] | None]]:
        """(name, array or function, core axes or None) of each leaf that is not None."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if _CORE_AXES in field.metadata and value is not None:
                yield field.name, value, field.metadata[_CORE_AXES]


def array_field(
    *core_axes: str | int, default: Any = dataclasses.MISSING, kw_only: bool = False
) -> Any:
    """A field of a mask or bias that holds an array [*B, *core_axes], a differentiable leaf.

    Args:
        core_axes: for each axis, "T" or "S" (this length, or 1), another name (any size), or a
            size.
        default: the array where none is given; it may be None. Without a default the field must not
            follow one that has a default, unless it is keyword-only.
        kw_only: whether the array is given by its name, and may follow any field.

    >>> from attention_jax import Bias, bias_dataclass
    >>> @bias_dataclass
    ... class PerKey(Bias):
    ...     bias_of_key: Array = array_field("S")
    ...     def values(self, query_positions, key_positions):
    ...         return self.bias_of_key[..., None, key_positions]
    >>> PerKey(jnp.array([0.0, -1.0, 2.0])).materialize(2, 3).tolist()
    [[0.0, -1.0, 2.0], [0.0, -1.0, 2.0]]
    """
    options: dict[str, Any] = {"metadata": {_CORE_AXES: core_axes}, "kw_only": kw_only}
    if default is not dataclasses.MISSING:
        options["default_factory"] = lambda: default  # an array is no default: it has no hash
    return dataclasses.field(**options)


def function_field() -> Any:
    """A field that holds another function of positions, whose arrays are leaves."""
    return dataclasses.field(metadata={_CORE_AXES: None})


@dataclass_transform(frozen_default=True, field_specifiers=(array_field, function_field))
def position_dataclass(cls):
    """Makes a class of annotated fields a frozen dataclass and a pytree.

    Fields made by `array_field` or `function_field` are leaves; all others are static options. An
    instance without arrays is hashable by value, and can be a static argument of `jax.jit`. JAX
    rebuilds instances with other leaves, such as axes, and without batch axes; what a
    `__post_init__` raises then is ignored. `mask_dataclass` and `bias_dataclass` are this
    decorator.

    >>> from attention_jax import Mask, mask_dataclass
    >>> @mask_dataclass
    ... class After(Mask):
    ...     gap: int  # a static option
    ...     start: Array = array_field()  # a leaf
    ...     def allowed(self, query_positions, key_positions):
    ...         del query_positions
    ...         return key_positions[None, :] >= self.start + self.gap
    >>> mask = After(gap=1, start=jnp.array(1))
    >>> mask.materialize(1, 4).astype(int).tolist(), jax.tree.leaves(mask)
    ([[0, 0, 1, 1]], [Array(1, dtype=int32, weak_type=True)])
    """
    try:
        cls = dataclasses.dataclass(frozen=True)(cls)
    except TypeError as error:  # such as "non-default argument 'rate' follows default argument"
        raise ValueError(f"{cls.__name__}: {error}; see array_field(default=, kw_only=)") from error
    fields = dataclasses.fields(cls)
    if any(field.metadata.get(_CORE_AXES) is not None for field in fields):
        # Comparison of arrays has no truth value, so functions with arrays compare by identity.
        cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__
    leaves = [field.name for field in fields if _CORE_AXES in field.metadata]
    static = [field.name for field in fields if _CORE_AXES not in field.metadata]
    keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

    def flatten(function: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children = [getattr(function, name) for name in leaves]
        return children, tuple(getattr(function, name) for name in static)

    def flatten_with_keys(function: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, options = flatten(function)
        return list(zip(keys, children, strict=True)), options

    def unflatten(options: tuple[Any, ...], children: Any) -> Any:
        """An instance with any leaves: nothing is checked or cast."""
        function = object.__new__(cls)
        values = dict(zip((*static, *leaves), (*options, *children), strict=True))
        vars(function).update(values)
        if cls.__post_init__ is not PositionFunction.__post_init__:
            with contextlib.suppress(Exception):
                function.__post_init__()  # for the attributes that it derives
            vars(function).update(values)
        return function

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return exported(cls) if is_of_this_package(cls) else cls


def check_decorated(function: PositionFunction) -> None:
    """Raises ValueError if `position_dataclass` has not made the function's class a pytree."""
    if jax.tree_util.all_leaves([function]):
        raise ValueError(
            f"{type(function).__name__} must be decorated with @{function.kind}_dataclass"
        )


def check_batch_axes(
    label: str, shape: tuple[int, ...], core_ndim: int, batch_shape: tuple[int, ...]
) -> None:
    """Raises ValueError if an array has some of the batch axes and lacks others.

    Args:
        label: the label of the array in error messages; its last word is the array's name.
        shape: the array's shape.
        core_ndim: the array's number of axes, excluding batch axes.
        batch_shape: *B.
    """
    array_batch = shape[: max(len(shape) - core_ndim, 0)]
    count = len(array_batch)
    missing = len(batch_shape) - count
    if not array_batch or missing <= 0:
        return
    name, batch = label.split()[-1], f"[{', '.join(map(str, batch_shape))}]"
    as_first = f"{name}[{', '.join([':'] * count + ['None'] * missing)}]"
    as_last = f"{name}[{', '.join(['None'] * missing)}]"
    raise ValueError(
        f"{label} must have all {len(batch_shape)} batch axes *B = {batch} (size 1 where shared),"
        f" or none; got {list(shape)}: write {as_first} if its axes are the first of {batch}, or"
        f" {as_last} if the last"
    )


def take(array: Array, positions: Array, axis: int) -> Array:
    """`array` at `positions`, its last entry beyond the end; an axis of size 1 is kept."""
    size = array.shape[axis]
    if size == 1:
        return array
    # A padded tile has positions beyond the end. `mode="clip"` alone would fail under `checkify`.
    return jnp.take(array, jnp.clip(positions, 0, size - 1), axis=axis, mode="clip")
