"""`jax.custom_vjp` with forward mode: a backward pass by hand, all other derivatives from a twin.

JAX's own `custom_vjp` has no forward mode, because a hand-written backward pass does not define
tangents. Here a function has a twin: a second function with the same values, which JAX can
differentiate in any way. Reverse mode, at every order, runs the hand-written backward pass. Forward
mode and the derivatives of the backward pass itself come from the twin.

The rule for tangents ends in a linear map that carries its own transpose (`calls.py`). Forward mode
evaluates the map, which is the tangent of the twin. Reverse mode transposes it, which is the
hand-written backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.calls import function_of, linear_map, traced_call
from attention_jax.core.meshes import varying_as


class custom_vjp:  # noqa: N801  # the name of the JAX decorator that it replaces
    """A function with a hand-written backward pass, and a twin for all other derivatives.

        f = custom_vjp(fast, twin=plain)
        f.defvjp(fast_fwd, fast_bwd)

    The interface is that of `jax.custom_vjp`, with the twin added:

        the value                             fast (fast_fwd when it is differentiated)
        reverse mode                          fast_bwd, at every order of differentiation
        forward mode, derivatives of fast_bwd those of plain

    It composes with the transformations of JAX: `jit`, `vmap`, `grad`, `jvp`, `jacfwd`, `jacrev`,
    `hessian`, `linearize`, `checkpoint`, `scan`, `while_loop`, `shard_map`, in any order and depth.
    `jax.linear_transpose` has no rule for it, and `checkify` does not look into it.

    Args:
        fun: the function. Arguments and results are pytrees of arrays; integers, booleans and PRNG
            keys are allowed anywhere and have no derivative. All arguments are positional.
        nondiff_argnums: positions of arguments that are static values instead of arrays. They are
            the first arguments of `bwd`, as in `jax.custom_vjp`.
        twin: a function of the same arguments with the same results (same structure, shapes and
            dtypes; equal values), differentiable by JAX as often as derivatives are wanted.

    The functions must not close over a traced value: pass it as an argument. The residuals of `fwd`
    must be a function of the arguments. `jax.custom_vjp`'s options `nondiff_argnames`,
    `symbolic_zeros` and `optimize_remat` do not exist here. Under `jax.shard_map`, all arguments
    are first cast to vary over every mesh axis that any of them varies over, so that sums over
    devices happen before the functions and not inside them.

    Raises:
        AttributeError: the function is called before `defvjp`.
        ValueError: a function closes over a traced value.
        TypeError: the result of `bwd` or the twin does not match the arguments or results of the
            function.

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
        self.fun, self.twin, self.nondiff_argnums = fun, twin, tuple(nondiff_argnums)
        if any(index < 0 for index in self.nondiff_argnums):
            raise ValueError(
                f"nondiff_argnums must count from 0, not from the end; got {self.nondiff_argnums}"
            )
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Defines the function's rules, as in `jax.custom_vjp`.

        Args:
            fwd: the function's arguments -> (its result, residuals: a pytree of arrays).
            bwd: (*nondiff arguments, residuals, cotangents of the result) -> a tuple with the
                cotangent of each argument; None means zeros, or an argument without a derivative.
        """
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any) -> Any:
        name = getattr(self.fun, "__name__", repr(self.fun))
        if self.fwd is None or self.bwd is None:
            raise AttributeError(f"{name} has no rules yet: call its defvjp(fwd, bwd)")
        static = {i: arg for i, arg in enumerate(args) if i in self.nondiff_argnums}
        arrays = tuple(arg for i, arg in enumerate(args) if i not in static)
        leaves, structure = jax.tree.flatten(varying_as(arrays, arrays))
        places = range(len(args))

        def on_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
            def of_leaves(*leaves: Any) -> Any:
                arrays = iter(jax.tree.unflatten(structure, leaves))
                return function(*(static[i] if i in static else next(arrays) for i in places))

            return of_leaves

        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return on_leaves(self.fun)(*leaves)
        fun, fwd, twin = map(on_leaves, (self.fun, self.fwd, self.twin))
        bwd = functools.partial(self.bwd, *static.values())
        return _Rules(name, structure, fun, fwd, bwd, twin).call(leaves)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The functions of a `custom_vjp` at its static arguments, on the leaves of its arrays."""

    name: str
    structure: Any  # of the tuple of arrays
    fun: Callable[..., Any]  # *leaves -> result
    fwd: Callable[..., Any]  # *leaves -> (result, residuals)
    bwd: Callable[..., Any]  # (residuals, cotangents of the result) -> cotangents of the arrays
    twin: Callable[..., Any]  # *leaves -> result

    def call(self, leaves: list[Any]) -> Any:
        """The function's result for traced leaves."""

        def jvp(leaves, tangents):
            result, residuals, program = self.forward(leaves)
            return result, self.tangents(leaves, residuals, result, tangents, program)

        return traced_call(self.fun, leaves, jvp)[0]

    def forward(self, leaves: list[Any]) -> tuple[Any, Any, Any]:
        """(the result, the residuals, the program of `fwd`)"""

        def jvp(leaves, tangents):
            result, residuals, program = self.forward(leaves)
            dresult = self.tangents(leaves, residuals, result, tangents, program)
            # The residuals have tangent 0: only `backward` reads them, and its rule differentiates
            # with respect to the arguments.
            return (result, residuals), dresult + [None] * len(jax.tree.leaves(residuals))

        (result, residuals), program = traced_call(self.fwd, leaves, jvp)
        # A residual that is an argument stays the argument, so that `vmap` need not batch it.
        pairs = zip(program.invars, leaves, strict=True)
        argument_of = {id(variable): leaf for variable, leaf in pairs}
        flat, structure = jax.tree.flatten(residuals)
        variables = program.outvars[len(program.outvars) - len(flat) :]
        flat = [argument_of.get(id(v), leaf) for v, leaf in zip(variables, flat, strict=True)]
        return result, jax.tree.unflatten(structure, flat), program

    # --- the derivative of the result, as a linear map ---

    def tangents(
        self, leaves: list[Any], residuals: Any, result: Any, tangents: list[Any], program: Any
    ) -> list[Any]:
        """The tangents of the result's leaves, None for each integer leaf.

        Args:
            leaves: the arguments.
            residuals, result, program: from `forward`.
            tangents: of each leaf of the arguments, None where it is not perturbed.
        """
        results, result_structure = jax.tree.flatten(result)
        perturbed = [index for index, tangent in enumerate(tangents) if tangent is not None]
        if not perturbed:
            return [None] * len(results)
        types = [jax.typeof(leaf).to_tangent_aval() for leaf in results]
        floats = [i for i, each in enumerate(types) if each.dtype != jax.dtypes.float0]
        flat, residual_structure = jax.tree.flatten(jax.lax.stop_gradient(residuals))
        count = len(leaves)

        def evaluate(saved, tangents):
            leaves = saved[:count]
            twin = function_of(self.twin, leaves, perturbed)
            _, dresult = jax.jvp(twin, [leaves[i] for i in perturbed], tangents)
            dresults = jax.tree.leaves(dresult)
            self.check_twin(types, dresults)
            return [dresults[i] for i in floats]

        def transpose(saved, cotangents):
            all_cotangents = [np.zeros(each.shape, jax.dtypes.float0) for each in types]
            for i, cotangent in zip(floats, cotangents, strict=True):
                all_cotangents[i] = cotangent
            return self.backward(
                perturbed,
                saved[:count],
                jax.tree.unflatten(residual_structure, saved[count:]),
                jax.tree.unflatten(result_structure, all_cotangents),
            )

        outputs = linear_map(
            evaluate,
            transpose,
            [*leaves, *flat],
            [tangents[i] for i in perturbed],
            [types[i] for i in floats],
            program,
        )
        dresults = dict(zip(floats, outputs, strict=True))
        return [dresults.get(i) for i in range(len(results))]

    def check_twin(self, types: list[Any], dresults: list[Any]) -> None:
        """Raises TypeError unless the twin's tangent has the types of the result's tangent."""
        expected = [each.str_short() for each in types]
        got = [jax.typeof(leaf).str_short() for leaf in dresults]
        if expected != got:
            raise TypeError(
                f"the twin of {self.name} must return {expected}, as {self.name} does; got {got}"
            )

    # --- the cotangents of the arguments ---

    def backward(
        self, perturbed: list[int], leaves: list[Any], residuals: Any, cotangents: Any
    ) -> list[Any]:
        """The cotangents of the perturbed leaves; their derivatives are those of the twin's."""

        @jax.custom_jvp
        def backward(leaves, residuals, cotangents):
            return self.checked(perturbed, leaves, self.bwd(residuals, cotangents))

        def backward_of_twin(leaves, cotangents):
            twin = function_of(self.twin, leaves, perturbed)
            return list(jax.vjp(twin, *(leaves[i] for i in perturbed))[1](cotangents))

        @backward.defjvp
        def backward_jvp(primals, tangents):
            _, dleaves = jax.jvp(backward_of_twin, primals[::2], tangents[::2])
            return backward(*primals), dleaves

        return backward(leaves, residuals, cotangents)

    def checked(self, perturbed: list[int], leaves: list[Any], cotangents: Any) -> list[Any]:
        """A cotangent for each perturbed leaf, with the leaf's shape, dtype and mesh axes."""
        arrays = jax.tree.unflatten(self.structure, leaves)
        given: list[Any] = []  # for each leaf; None for zeros

        def give(cotangent: Any, argument: Any) -> None:
            given.extend([cotangent] * len(jax.tree.leaves(argument)))

        try:
            if not isinstance(cotangents, tuple | list):
                raise TypeError("not a tuple")
            jax.tree.map(give, tuple(cotangents), arrays, is_leaf=lambda leaf: leaf is None)
            if sum(each is not None for each in given) != len(jax.tree.leaves(cotangents)):
                raise ValueError("only None may replace an argument of several arrays")
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"bwd of {self.name} must return a tuple with the cotangent of each of its"
                f" {len(arrays)} array arguments, or None for zeros: {self.structure}; got"
                f" {jax.tree.structure(cotangents)}"
            ) from error
        paths = jax.tree_util.tree_leaves_with_path(arrays)
        checked = []
        for index in perturbed:
            (path, leaf), cotangent = paths[index], given[index]
            cotangent = jnp.zeros_like(leaf) if cotangent is None else cotangent
            expected, got = jax.typeof(leaf), jax.typeof(cotangent)
            if (expected.shape, expected.dtype) != (got.shape, got.dtype):
                raise TypeError(
                    f"bwd of {self.name} must return for argument {jax.tree_util.keystr(path)} a"
                    f" cotangent of {expected.dtype}{list(expected.shape)}; got"
                    f" {got.dtype}{list(got.shape)}"
                )
            checked.append(varying_as(cotangent, leaf))
        return checked
