"""An identity that forward-mode differentiation may not pass, and that says what to do instead.

JAX's own message for a function with a hand-written gradient names neither the function nor a way
out. Here the tangents run through a linear primitive of our own: reverse mode only ever transposes
it, forward mode has to evaluate it, and that is an error. Like JAX's, the error comes when the
tangent is computed or compiled, not when it is traced: only then is it known that it is wanted.
Under `jax.vmap` (so in `jax.jacfwd`) JAX's own error comes first; the front door replaces it, but
for a function that the caller has jitted, which is differentiated after the door has closed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class ForwardModeError(NotImplementedError, TypeError):
    """Forward mode through a hand-written gradient; also the TypeError that JAX raises for it."""


NO_FORWARD_MODE = (
    "implementation 'tiled' has no forward mode (jvp, jacfwd, linearize): use"
    " implementation='checkpointed', which has every derivative in linear memory, or 'reference'"
)


@contextlib.contextmanager
def forward_mode_explained() -> Iterator[None]:
    """Replaces JAX's error about a `custom_vjp` function by ours."""
    try:
        yield
    except TypeError as error:
        if isinstance(error, ForwardModeError) or "forward-mode" not in str(error):
            raise
        raise ForwardModeError(NO_FORWARD_MODE) from error


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def reverse_only(tree: Any, message: str = NO_FORWARD_MODE) -> Any:
    """`tree` as it is; `ForwardModeError(message)` where its tangent is evaluated.

    Args:
        tree: a pytree of arrays.
        message: what the error says.
    """
    del message
    return tree


def _jvp(message, primals, tangents):
    (tree,), (dtree,) = primals, tangents
    leaves, structure = jax.tree.flatten(dtree, is_leaf=_is_symbolic_zero)
    moving = [leaf for leaf in leaves if not _is_symbolic_zero(leaf)]
    # All in one: a tangent that is a constant (an array of zeros, say) is evaluated at once if it
    # comes alone, in reverse mode too.
    passed = iter(_tangent_p.bind(*moving, message=message))
    leaves = [leaf if _is_symbolic_zero(leaf) else next(passed) for leaf in leaves]
    return tree, jax.tree.unflatten(structure, leaves)


reverse_only.defjvp(_jvp, symbolic_zeros=True)


def _is_symbolic_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


_tangent_p = Primitive("reverse_only_tangent")
_tangent_p.multiple_results = True


def _refuse(*_, message, **__):
    raise ForwardModeError(message)


def _batch(tangents, axes, *, message):
    return _tangent_p.bind(*tangents, message=message), axes


def _transpose(cotangents, *_, message):
    del message
    return cotangents


_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda *avals, message: avals)
ad.deflinear2(_tangent_p, _transpose)
batching.primitive_batchers[_tangent_p] = _batch
mlir.register_lowering(_tangent_p, _refuse)
