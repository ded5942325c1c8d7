"""`jax.custom_vjp` with forward mode: a gradient by hand, and every other derivative from a twin.

JAX's own `custom_vjp` has no forward mode, because a hand-written backward pass says nothing about
tangents. Here a function has a twin: a second function with the same values, which JAX can
differentiate in any way. The backward pass by hand serves reverse mode, at every order; the twin
serves forward mode, and the derivatives of the backward pass itself.

How: the rule for tangents ends in a linear map that carries its own transpose (`linear_map.py`).
Forward mode evaluates the map, which is the tangent of the twin. Reverse mode transposes it, which
is the backward pass by hand.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.jvp_of_moving import of_moving
from attention_jax.core.linear_map import call_with_rules, linear_map
from attention_jax.core.varying import varying_as


class custom_vjp:  # noqa: N801  # named as the decorator of JAX that it stands in for
    """A function with a hand-written backward pass, and a twin for all other derivatives.

        f = custom_vjp(fast, twin=plain)
        f.defvjp(fast_fwd, fast_bwd)

    The interface is that of `jax.custom_vjp`, with the twin added. What comes from where:

        the value                             fast (fast_fwd when it is differentiated)
        reverse mode                          fast_bwd, at every order of differentiation
        forward mode                          the tangent of plain, or `tangent` if it is given
        derivatives of fast_bwd and `tangent` those of plain

    It composes with the transformations of JAX: `jit`, `vmap`, `grad`, `jvp`, `jacfwd`, `jacrev`,
    `hessian`, `linearize`, `checkpoint`, `scan`, `while_loop`, `shard_map`, `checkify`, in any
    order and depth. `jax.linear_transpose` with respect to arguments in which the function is
    linear runs `fast_bwd` too; whether it is linear in them is not checked.

    Args:
        fun: the function. Arguments and results are pytrees of arrays; integers, booleans and PRNG
            keys are allowed anywhere and have no derivative.
        nondiff_argnums: positions of arguments that are not arrays but static values. They come
            first in the calls of `bwd` and `tangent`, as in `jax.custom_vjp`.
        twin: a function of the same arguments with the same results (same structure, shapes and
            dtypes; equal values), differentiable by JAX as often as derivatives are wanted.

    None of the functions may close over a traced value: pass it as an argument. What `fwd` saves
    must be a function of the arguments. Of the interface of `jax.custom_vjp`, `nondiff_argnames`,
    `symbolic_zeros` and `optimize_remat` are left out. Under `jax.shard_map`, all arguments are
    first made to vary over every mesh axis that one of them varies over, so that sums over devices
    stand at the entrance and not in the functions.

    Raises:
        AttributeError: it is called before `defvjp`.
        ValueError: a function closes over a traced value.
        TypeError: what `bwd`, `tangent` or the twin gives does not match the arguments or results.

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
    ):
        functools.update_wrapper(self, fun)
        self.__name__ = getattr(fun, "__name__", repr(fun))
        self.fun, self.twin = fun, twin
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
        """Gives the function its rules.

        Args:
            fwd: the function's arguments -> (its result, residuals: a pytree of arrays).
            bwd: (*nondiff arguments, residuals, cotangents of the result) -> a tuple with the
                cotangent of each argument; None stands for zeros, and for what has no derivative.
            tangent: optional, (*nondiff arguments, residuals, tangents) -> the result's tangent,
                where it is cheaper than the twin's; `tangents` is a tuple with one pytree for
                each argument, with None for each array that does not move. The tangent of an
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
    """The functions of a `custom_vjp`, with its static arguments filled in."""

    function: custom_vjp
    static: tuple[Any, ...]
    arguments: int  # how many, static ones included

    def _all(self, arrays: tuple[Any, ...]) -> list[Any]:
        static, moving = iter(self.static), iter(arrays)
        nondiff = self.function.nondiff_argnums
        return [next(static if i in nondiff else moving) for i in range(self.arguments)]

    def fun(self, *arrays: Any) -> Any:
        return self.function.fun(*self._all(arrays))

    def twin(self, *arrays: Any) -> Any:
        return self.function.twin(*self._all(arrays))

    def fwd(self, *arrays: Any) -> tuple[Any, Any]:
        assert self.function.fwd is not None  # the call has checked
        return self.function.fwd(*self._all(arrays))

    def bwd(self, residuals: Any, cotangents: Any) -> Any:
        assert self.function.bwd is not None
        return self.function.bwd(*self.static, residuals, cotangents)


# --- the value, and its derivative as a linear map ---


def _call(rules: _Rules, arrays: tuple[Any, ...]) -> Any:
    """The result, of traced arguments."""

    def push(arrays, tangents):
        result, residuals = _forward(rules, arrays)
        return result, _tangent_map(rules, arrays, residuals, result, tangents)

    pull_back = functools.partial(_pulled_back, rules)
    return call_with_rules(rules.fun, push, arrays, pull_back)


def _forward(rules: _Rules, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    """The result and the residuals."""

    def push(arrays, tangents):
        result, residuals = _forward(rules, arrays)
        dresult = _tangent_map(rules, arrays, residuals, result, tangents)
        # The residuals have the tangent 0: `_backward` and `_tangent`, which read them, have rules
        # of their own for how they change with the arguments.
        return (result, residuals), dresult + [None] * len(jax.tree.leaves(residuals))

    return call_with_rules(rules.fwd, push, arrays, has_residuals=True)


def _tangent_map(
    rules: _Rules, arrays: Any, residuals: Any, result: Any, tangents: list[Any]
) -> list[Any]:
    """The tangents of the result's leaves, by a linear map; None for each that does not move.

    Args:
        rules: the functions.
        arrays: the arguments.
        residuals, result: of `fwd`.
        tangents: of each leaf of the arguments, None where it does not move.
    """
    moving = tuple(index for index, tangent in enumerate(tangents) if tangent is not None)
    results, structure = jax.tree.flatten(result)
    if not moving:
        return [None] * len(results)
    types = [jax.typeof(leaf) for leaf in results]
    floats = [_is_float(leaf) for leaf in results]
    kept = arrays, jax.lax.stop_gradient(residuals)

    def evaluate(kept, tangents):
        tangent = jax.tree.leaves(_tangent(rules, moving, *kept, tangents))
        _check_tangent(rules, types, tangent)
        return [leaf for leaf, floating in zip(tangent, floats, strict=True) if floating]

    def transpose(kept, cotangents):
        cotangents = iter(cotangents)
        full = [
            next(cotangents) if floating else np.zeros(kind.shape, jax.dtypes.float0)
            for kind, floating in zip(types, floats, strict=True)
        ]
        return _backward(rules, moving, *kept, jax.tree.unflatten(structure, full))

    like = [leaf for leaf, floating in zip(results, floats, strict=True) if floating]
    moved = iter(linear_map(evaluate, transpose, kept, [tangents[i] for i in moving], like))
    return [next(moved) if floating else None for floating in floats]


# --- the tangent, and its own derivatives: those of the twin's tangent ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _tangent(
    rules: _Rules, moving: tuple[int, ...], arrays: Any, residuals: Any, tangents: Any
) -> Any:
    """The tangent of the result, for tangents of the leaves numbered `moving`."""
    rule = rules.function.tangent
    if rule is None:
        return _plain_tangent(rules, moving, arrays, tangents)
    leaves, structure = jax.tree.flatten(arrays)
    of_leaf = dict(zip(moving, tangents, strict=True))
    full = jax.tree.unflatten(structure, [of_leaf.get(i) for i in range(len(leaves))])
    return rule(*rules.static, residuals, full)


@_tangent.defjvp
def _tangent_jvp(rules, moving, primals, tangents):
    arrays, residuals, directions = primals
    darrays, _, ddirections = tangents
    _, dresult = jax.jvp(
        lambda arrays, directions: _plain_tangent(rules, moving, arrays, directions),
        (arrays, directions),
        (darrays, ddirections),
    )
    return _tangent(rules, moving, arrays, residuals, directions), dresult


def _plain_tangent(rules: _Rules, moving: tuple[int, ...], arrays: Any, tangents: Any) -> Any:
    twin, leaves = of_moving(rules.twin, arrays, moving)
    return jax.jvp(twin, (leaves,), (list(tangents),))[1]


# --- the cotangents, and their own derivatives: those of the twin's ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward(
    rules: _Rules, moving: tuple[int, ...], arrays: Any, residuals: Any, cotangents: Any
) -> list[Any]:
    """The cotangents of the leaves numbered `moving`."""
    return _checked_cotangents(rules, moving, arrays, rules.bwd(residuals, cotangents))


@_backward.defjvp
def _backward_jvp(rules, moving, primals, tangents):
    arrays, residuals, cotangents = primals
    darrays, _, dcotangents = tangents

    def plain(arrays, cotangents):
        twin, leaves = of_moving(rules.twin, arrays, moving)
        return jax.vjp(twin, leaves)[1](cotangents)[0]

    _, moved = jax.jvp(plain, (arrays, cotangents), (darrays, dcotangents))
    return _backward(rules, moving, arrays, residuals, cotangents), moved


def _pulled_back(rules: _Rules, moving: tuple[int, ...], arrays: Any, cotangents: Any) -> list[Any]:
    """The cotangents of arguments in which the function is linear, whatever they are."""
    _, residuals = rules.fwd(*arrays)
    return _backward(rules, moving, arrays, residuals, cotangents)


def _checked_cotangents(
    rules: _Rules, moving: tuple[int, ...], arrays: Any, cotangents: Any
) -> list[Any]:
    """One cotangent for each leaf numbered `moving`, of its shape, dtype and mesh axes."""
    name = rules.function.__name__
    given: list[Any] = []

    def add(cotangent: Any, argument: Any) -> None:
        leaves = jax.tree.leaves(argument)
        if cotangent is not None and not jax.tree_util.all_leaves([argument]):
            raise ValueError("only None may stand for a whole argument")
        given.extend([cotangent] * len(leaves))

    try:
        if not isinstance(cotangents, tuple | list):
            raise TypeError("not a tuple")
        jax.tree.map(add, tuple(cotangents), arrays, is_leaf=lambda leaf: leaf is None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"bwd of {name} must give a tuple with the cotangent of each of its {len(arrays)} array"
            f" arguments, or None for zeros: {jax.tree.structure(arrays)}; got"
            f" {jax.tree.structure(cotangents)}"
        ) from error
    pairs = list(zip(jax.tree_util.tree_leaves_with_path(arrays), given, strict=True))
    checked = []
    for (path, leaf), cotangent in (pairs[index] for index in moving):
        cotangent = jnp.zeros_like(leaf) if cotangent is None else cotangent
        expected, got = jax.typeof(leaf), jax.typeof(cotangent)
        if (expected.shape, expected.dtype) != (got.shape, got.dtype):
            raise TypeError(
                f"bwd of {name} must give for argument {jax.tree_util.keystr(path)} a cotangent of"
                f" {expected.dtype}{list(expected.shape)}; got {got.dtype}{list(got.shape)}"
            )
        checked.append(varying_as(cotangent, leaf))
    return checked


def _check_tangent(rules: _Rules, types: list[Any], tangent: list[Any]) -> None:
    """Raises TypeError unless the tangent has the shapes and dtypes of the result."""
    expected = [f"{kind.to_tangent_aval().str_short()}" for kind in types]
    got = [f"{jax.typeof(leaf).str_short()}" for leaf in tangent]
    if expected != got:
        name = rules.function.__name__
        which = "twin" if rules.function.tangent is None else "tangent"
        raise TypeError(f"the {which} of {name} must give {expected}, as {name} does; got {got}")


# --- what a call takes ---


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact)


def _positional(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All arguments by position, defaults filled in."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"{function} must have no keyword-only arguments to be a custom_vjp; got"
            f" {', '.join(bound.kwargs)}"
        )
    bound.apply_defaults()
    return bound.args
