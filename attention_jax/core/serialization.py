"""Pytrees that are arguments and results of programs which `jax.export` stores."""

import ast
from typing import TypeVar

from jax import export

Class = TypeVar("Class", bound=type)


def exported(cls: Class) -> Class:
    """Registers a class of this library for `jax.export`, under its own name.

    Args:
        cls: a NamedTuple; or a class that `jax.tree_util.register_dataclass` has registered, whose
            static fields are Python literals.
    """
    name = f"attention_jax.{cls.__name__}"
    if issubclass(cls, tuple):
        return export.register_namedtuple_serialization(cls, serialized_name=name)  # type: ignore[return-value]
    return export.register_pytree_node_serialization(  # type: ignore[return-value]
        cls,
        serialized_name=name,
        serialize_auxdata=lambda static: repr(static).encode(),
        deserialize_auxdata=lambda text: ast.literal_eval(text.decode()),
    )
