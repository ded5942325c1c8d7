"""`jax.custom_vjp` with forward mode: a backward pass by hand, all other derivatives from a twin.

JAX's own `custom_vjp` has no forward mode, because a hand-written backward pass does not define
tangents. Here a function has a twin: a second function with the same values, which JAX can
differentiate in any way. Reverse mode, at every order, runs the hand-written backward pass. Forward
mode and the derivatives of the backward pass itself come from the twin.

The rule for tangents ends in a linear map that carries its own transpose (`linear_map.py`). Forward
mode evaluates the map, which is the tangent of the twin. Reverse mode transposes it, which is the
hand-written backward pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.linear_map import call_with_rules, linear_map
from attention_jax.core.partial_jvp import function_of_leaves
from attention_jax.core.varying import varying_as


class custom_vjp:  # noqa: N801  # the name of the JAX decorator that it replaces
    """A function with a hand-written backward pass, and a twin for all other derivatives.

        f = custom_vjp(fast, twin=plain)
        f.defvjp(fast_fwd, fast_bwd)

    The interface is that of `jax.custom_vjp`, with the twin added:

        the value                             fast (fast_fwd when it is differentiated)
        reverse mode                          fast_bwd, at every order of differentiation
        forward mode                          the tangent of plain, or `tangent` if it is given
        derivatives of fast_bwd and `tangent` those of plain

    It composes with the transformations of JAX: `jit`, `vmap`, `grad`, `jvp`, `jacfwd`, `jacrev`,
    `hessian`, `linearize`, `checkpoint`, `scan`, `while_loop`, `shard_map`, `checkify`, in any
    order and depth. `jax.linear_transpose` with respect to arguments in which the function is
    linear also runs `fast_bwd`; it does not check that the function is linear in them.

    Args:
        fun: the function. Arguments and results are pytrees of arrays; integers, booleans and PRNG
            keys are allowed anywhere and have no derivative.
        nondiff_argnums: positions of arguments that are static values instead of arrays. They are
            the first arguments of `bwd` and `tangent`, as in `jax.custom_vjp`.
        twin: a function of the same arguments with the same results (same structure, shapes and
            dtypes; equal values), differentiable by JAX as often as derivatives are wanted.
        shown: a function without arguments that returns programs (jaxprs), see `linear_map`. Only
            a function that calls a kernel with a sharding of its own, as cuDNN's, needs it.

    The functions must not close over a traced value: pass it as an argument. The residuals of `fwd`
    must be a function of the arguments. `jax.custom_vjp`'s options `nondiff_argnames`,
    `symbolic_zeros` and `optimize_remat` do not exist here. Under `jax.shard_map`, all arguments
    are first cast to vary over every mesh axis that any of them varies over, so that sums over
    devices happen before the functions and not inside them.

    Raises:
        AttributeError: the function is called before `defvjp`.
        ValueError: a function closes over a traced value.
        TypeError: the result of `bwd`, `tangent` or the twin does not match the arguments or
            results of the function.

    >>> def stable_log1pexp_fwd(x):
    ...     return stable_log1pexp(x), x
    >>> def stable_log1pexp_bwd(x, ct):
    ...     return (ct * jax.nn.sigmoid(x),)
    >>> stable_log1pexp = custom_vjp(lambda x: jnp.logaddexp(x, 0.0), twin=jax.nn.softplus)
    >>> stable_log1pexp.defvjp(stable_log1pexp_fwd, stable_log1pexp_bwd)
    >>> float(jax.grad(stable_log1pexp)(0.0)), float(jax.jvp(stable_log1pexp, (0.0,), (1.0,))[1])
    (0.5, 0.5)
    >>> float(jax.grad(jax.grad(stable_log1pexp))(0.0))
    0.25
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: Sequence[int] = (),
        *,
        twin: Callable[..., Any],
        shown: Callable[[], tuple[Any, ...]] = tuple,
    ):
        functools.update_wrapper(self, fun)
        self.__name__ = getattr(fun, "__name__", repr(fun))
        self.fun, self.twin, self.shown = fun, twin, shown
        self.nondiff_argnums = frozenset(nondiff_argnums)
        if any(index < 0 for index in self.nondiff_argnums):
            raise ValueError(
                f"nondiff_argnums must count from 0, not from the end; got {tuple(nondiff_argnums)}"
            )
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.tangent: Callable[..., Any] | None = None

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        tangent: Callable[..., Any] | None = None,
    ) -> None:
        """Defines the function's rules.

        Args:
            fwd: the function's arguments -> (its result, residuals: a pytree of arrays).
            bwd: (*nondiff arguments, residuals, cotangents of the result) -> a tuple with the
                cotangent of each argument; None means zeros, or an argument without a derivative.
            tangent: optional, (*nondiff arguments, residuals, tangents) -> the result's tangent,
                for a tangent that is cheaper than the twin's; `tangents` is a tuple with a pytree
                for each argument, with None for each array that is not perturbed. The tangent of an
                integer result is an array of zeros of dtype `jax.dtypes.float0`, as in `jax.jvp`.
        """
        self.fwd, self.bwd, self.tangent = fwd, bwd, tangent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None:
            raise AttributeError(f"{self.__name__} has no rules yet: call its defvjp(fwd, bwd)")
        args = _positional(self.fun, args, kwargs)
        static = tuple(arg for i, arg in enumerate(args) if i in self.nondiff_argnums)
        arrays = tuple(arg for i, arg in enumerate(args) if i not in self.nondiff_argnums)
        arrays = varying_as(arrays, arrays)
        rules = _Rules(self, static, len(args))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
            return _call(rules, arrays)
        return rules.fun(*arrays)


class _Rules(NamedTuple):
    """The functions of a `custom_vjp` with its static arguments inserted."""

    function: custom_vjp
    static: tuple[Any, ...]
    num_arguments: int  # including static arguments

    def _arguments(self, arrays: tuple[Any, ...]) -> list[Any]:
        static, dynamic = iter(self.static), iter(arrays)
        nondiff = self.function.nondiff_argnums
        return [next(static if i in nondiff else dynamic) for i in range(self.num_arguments)]

    def fun(self, *arrays: Any) -> Any:
        return self.function.fun(*self._arguments(arrays))

    def twin(self, *arrays: Any) -> Any:
        return self.function.twin(*self._arguments(arrays))

    def fwd(self, *arrays: Any) -> tuple[Any, Any]:
        assert self.function.fwd is not None  # `__call__` has checked
        return self.function.fwd(*self._arguments(arrays))

    def bwd(self, residuals: Any, cotangents: Any) -> Any:
        assert self.function.bwd is not None
        return self.function.bwd(*self.static, residuals, cotangents)


# --- the value, and its derivative as a linear map ---


def _call(rules: _Rules, arrays: tuple[Any, ...]) -> Any:
    """The function's result for traced arguments."""

    def jvp(arrays, tangents):
        result, residuals = _forward(rules, arrays)
        return result, _tangent_map(rules, arrays, residuals, result, tangents)

    return call_with_rules(rules.fun, jvp, arrays, functools.partial(_linear_transpose, rules))


def _forward(rules: _Rules, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    """(the result, the residuals)."""

    def jvp(arrays, tangents):
        result, residuals = _forward(rules, arrays)
        dresult = _tangent_map(rules, arrays, residuals, result, tangents)
        # The residuals have tangent 0: only `_backward` and `_tangent` read them, and the rules of
        # these two differentiate with respect to the arguments.
        return (result, residuals), dresult + [None] * len(jax.tree.leaves(residuals))

    return call_with_rules(rules.fwd, jvp, arrays, has_residuals=True)


def _tangent_map(
    rules: _Rules, arrays: Any, residuals: Any, result: Any, tangents: list[Any]
) -> list[Any]:
    """The tangents of the result's leaves, by a linear map; None for each integer leaf.

    Args:
        rules: the functions.
        arrays: the arguments.
        residuals, result: from `fwd`.
        tangents: of each leaf of the arguments, None where it is not perturbed.
    """
    perturbed = tuple(index for index, tangent in enumerate(tangents) if tangent is not None)
    results, structure = jax.tree.flatten(result)
    if not perturbed:
        return [None] * len(results)
    types = [jax.typeof(leaf) for leaf in results]
    floats = [jnp.issubdtype(leaf_type.dtype, jnp.inexact) for leaf_type in types]

    def only_floats(leaves):
        return [leaf for leaf, is_float in zip(leaves, floats, strict=True) if is_float]

    def evaluate(saved, tangents):
        tangent = jax.tree.leaves(_tangent(rules, perturbed, *saved, tangents))
        _check_tangent(rules, types, tangent)
        return only_floats(tangent)

    def transpose(saved, cotangents):
        cotangents = iter(cotangents)
        leaves = [
            next(cotangents) if is_float else np.zeros(leaf_type.shape, jax.dtypes.float0)
            for leaf_type, is_float in zip(types, floats, strict=True)
        ]
        return _backward(rules, perturbed, *saved, jax.tree.unflatten(structure, leaves))

    saved = arrays, jax.lax.stop_gradient(residuals)
    inputs = [tangents[index] for index in perturbed]
    shown = rules.function.shown()
    outputs = iter(linear_map(evaluate, transpose, saved, inputs, only_floats(results), shown))
    return [next(outputs) if is_float else None for is_float in floats]


# --- the tangent; its derivatives are those of the twin's tangent ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _tangent(
    rules: _Rules, perturbed: tuple[int, ...], arrays: Any, residuals: Any, tangents: Any
) -> Any:
    """The tangent of the result, for tangents of the leaves with the indices `perturbed`."""
    rule = rules.function.tangent
    if rule is None:
        return _twin_tangent(rules, perturbed, arrays, tangents)
    leaves, structure = jax.tree.flatten(arrays)
    tangent_of = dict(zip(perturbed, tangents, strict=True))
    all_tangents = [tangent_of.get(index) for index in range(len(leaves))]
    return rule(*rules.static, residuals, jax.tree.unflatten(structure, all_tangents))


@_tangent.defjvp
def _tangent_jvp(rules, perturbed, primals, tangents):
    arrays, residuals, directions = primals
    darrays, _, ddirections = tangents
    _, dresult = jax.jvp(
        functools.partial(_twin_tangent, rules, perturbed),
        (arrays, directions),
        (darrays, ddirections),
    )
    return _tangent(rules, perturbed, arrays, residuals, directions), dresult


def _twin_tangent(rules: _Rules, perturbed: tuple[int, ...], arrays: Any, tangents: Any) -> Any:
    twin, leaves = function_of_leaves(rules.twin, arrays, perturbed)
    return jax.jvp(twin, (leaves,), (list(tangents),))[1]


# --- the cotangents; their derivatives are those of the twin's cotangents ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward(
    rules: _Rules, perturbed: tuple[int, ...], arrays: Any, residuals: Any, cotangents: Any
) -> list[Any]:
    """The cotangents of the leaves with the indices `perturbed`."""
    return _checked_cotangents(rules, perturbed, arrays, rules.bwd(residuals, cotangents))


@_backward.defjvp
def _backward_jvp(rules, perturbed, primals, tangents):
    arrays, residuals, cotangents = primals
    darrays, _, dcotangents = tangents

    def twin_backward(arrays, cotangents):
        twin, leaves = function_of_leaves(rules.twin, arrays, perturbed)
        return jax.vjp(twin, leaves)[1](cotangents)[0]

    _, dleaves = jax.jvp(twin_backward, (arrays, cotangents), (darrays, dcotangents))
    return _backward(rules, perturbed, arrays, residuals, cotangents), dleaves


def _linear_transpose(
    rules: _Rules, linear: tuple[int, ...], arrays: Any, cotangents: Any
) -> list[Any]:
    """The cotangents of leaves in which the function is linear; their values do not matter."""
    _, residuals = rules.fwd(*arrays)
    return _backward(rules, linear, arrays, residuals, cotangents)


def _checked_cotangents(
    rules: _Rules, perturbed: tuple[int, ...], arrays: Any, cotangents: Any
) -> list[Any]:
    """A cotangent for each perturbed leaf, with the leaf's shape, dtype and mesh axes."""
    name = rules.function.__name__
    leaf_cotangents: list[Any] = []

    def add(cotangent: Any, argument: Any) -> None:
        leaves = jax.tree.leaves(argument)
        if cotangent is not None and not jax.tree_util.all_leaves([argument]):
            raise ValueError("only None may replace a whole argument")
        leaf_cotangents.extend([cotangent] * len(leaves))

    try:
        if not isinstance(cotangents, tuple | list):
            raise TypeError("not a tuple")
        jax.tree.map(add, tuple(cotangents), arrays, is_leaf=lambda leaf: leaf is None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"bwd of {name} must return a tuple with the cotangent of each of its {len(arrays)}"
            f" array arguments, or None for zeros: {jax.tree.structure(arrays)}; got"
            f" {jax.tree.structure(cotangents)}"
        ) from error
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(arrays)
    checked = []
    for index in perturbed:
        (path, leaf), cotangent = paths_and_leaves[index], leaf_cotangents[index]
        cotangent = jnp.zeros_like(leaf) if cotangent is None else cotangent
        expected, got = jax.typeof(leaf), jax.typeof(cotangent)
        if (expected.shape, expected.dtype) != (got.shape, got.dtype):
            raise TypeError(
                f"bwd of {name} must return for argument {jax.tree_util.keystr(path)} a cotangent"
                f" of {expected.dtype}{list(expected.shape)}; got {got.dtype}{list(got.shape)}"
            )
        checked.append(varying_as(cotangent, leaf))
    return checked


def _check_tangent(rules: _Rules, types: list[Any], tangent: list[Any]) -> None:
    """Raises TypeError unless the tangent has the shapes and dtypes of the result."""
    expected = [leaf_type.to_tangent_aval().str_short() for leaf_type in types]
    got = [jax.typeof(leaf).str_short() for leaf in tangent]
    if expected != got:
        name = rules.function.__name__
        rule = "twin" if rules.function.tangent is None else "tangent"
        raise TypeError(f"the {rule} of {name} must return {expected}, as {name} does; got {got}")


def _positional(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All arguments by position, with defaults for missing arguments."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"{function} must have no keyword-only arguments to be a custom_vjp; got"
            f" {', '.join(bound.kwargs)}"
        )
    bound.apply_defaults()
    return bound.args
