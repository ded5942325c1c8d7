"""`jax.custom_vjp` with forward mode: a backward pass by hand, all other derivatives from a twin.

JAX's own `custom_vjp` has no forward mode, because a hand-written backward pass does not define
tangents. Here a function has a twin: a second function with the same values, which JAX can
differentiate in any way. Reverse mode, at every order, runs the hand-written backward pass. Forward
mode and the derivatives of the backward pass itself come from the twin.

The rule for tangents ends in a linear map that carries its own transpose (`calls.py`). Forward mode
evaluates the map, which is the tangent of the twin. Reverse mode transposes it, which is the
hand-written backward pass.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from attention_jax.core.calls import Leaves, function_of, kept_call, linear_map
from attention_jax.core.meshes import varying_as


class custom_vjp:  # noqa: N801  # the name of the JAX decorator that it replaces
    """A function with a hand-written backward pass, and a twin for all other derivatives.

        f = custom_vjp(fast, twin=plain)
        f.defvjp(fast_fwd, fast_bwd)

    The interface is that of `jax.custom_vjp`, with the twin added:

        the value                              fast (fast_fwd when it is differentiated)
        reverse mode                           fast_bwd, at every order of differentiation
        forward mode, derivatives of fast_bwd  derivatives of plain

    It composes with the transformations of JAX: `jit`, `vmap`, `grad`, `jvp`, `jacfwd`, `jacrev`,
    `hessian`, `linearize`, `checkpoint`, `scan`, `while_loop`, `shard_map`, in any order and depth.
    `jax.linear_transpose` needs `linear`, `jax.experimental.jet` has no rule for it, and `checkify`
    does not look into it.

    Args:
        fun: the function. Arguments and results are pytrees of arrays; integers, booleans and PRNG
            keys are allowed anywhere and have no derivative. All arguments are positional.
        nondiff_argnums: positions of arguments that are static values instead of arrays. They are
            the first arguments of `bwd`, as in `jax.custom_vjp`.
        twin: a function of the same arguments with the same results (same structure, shapes and
            dtypes; equal values), differentiable by JAX as often as derivatives are wanted.
        linear: takes the arguments, and returns those in which the function is linear together;
            None if there are none.

    The functions must not close over a traced value: pass it as an argument. The residuals of `fwd`
    must be a function of the arguments. `jax.custom_vjp`'s options `nondiff_argnames`,
    `symbolic_zeros` and `optimize_remat` do not exist here. Under `jax.shard_map`, all arguments
    are first cast to vary over every mesh axis that any of them varies over, so that sums over
    devices happen before the functions and not inside them.

    Raises:
        AttributeError: the function is called before `defvjp`.
        ValueError: `fun`, `fwd` or `bwd` closes over a traced value.
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
        linear: Callable[..., Any] | None = None,
    ):
        functools.update_wrapper(self, fun)
        self.fun, self.twin, self.nondiff_argnums = fun, twin, tuple(nondiff_argnums)
        self.linear = linear or (lambda *_: None)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Defines the function's rules, as in `jax.custom_vjp`.

        Args:
            fwd: the function's arguments -> (its result, residuals: a pytree of arrays).
            bwd: (*nondiff arguments, residuals, cotangents of the result) -> a tuple with the
                cotangent of each argument; None means zeros, or an argument without a derivative.
        """
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any) -> Any:
        static = {i % len(args): args[i] for i in sorted(self.nondiff_argnums)}
        places = [i for i in range(len(args)) if i not in static]
        arrays = tuple(args[i] for i in places)
        leaves, structure = jax.tree.flatten(varying_as(arrays, arrays))

        def on_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)  # its program names the caller's file
            def of_leaves(*leaves: Any) -> Any:
                arrays = zip(places, jax.tree.unflatten(structure, leaves), strict=True)
                arguments = static | dict(arrays)
                return function(*(arguments[i] for i in range(len(arguments))))

            return of_leaves

        fun, fwd, twin = map(on_leaves, (self.fun, self.fwd, self.twin))
        bwd = functools.partial(self.bwd, *(static[i] for i in sorted(static)))
        name = getattr(self.fun, "__name__", repr(self.fun))
        linear_in = frozenset(jax.tree.leaves(on_leaves(self.linear)(*range(len(leaves)))))
        return _Rules(name, structure, fwd, bwd, twin, linear_in).call(fun, leaves)[0]


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The functions of a `custom_vjp` at its static arguments, on the leaves of its arrays."""

    name: str
    structure: Any  # of the tuple of arrays
    fwd: Callable[..., Any]  # *leaves -> (result, residuals)
    bwd: Callable[..., Any]  # (residuals, cotangents of the result) -> cotangents of the arrays
    twin: Callable[..., Any]  # *leaves -> result
    linear_in: frozenset[int]  # the places of the leaves in which the function is linear

    def call(self, function: Callable[..., Any], leaves: Leaves) -> tuple[Any, core.Jaxpr]:
        """(`function(*leaves)`, its program); the function is `fun` or `fwd`.

        Its derivative is `self.jvp`, which calls `fwd`: so differentiation replaces `fun` by `fwd`,
        and `fwd` by itself.
        """
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*leaves)
        if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
            raise ValueError(f"{self.name} must not close over a traced value: make it an argument")
        types = closed.out_avals
        evaluate = jax.custom_jvp(core.jaxpr_as_fun(closed))

        def result_of_jvp(leaves, tangents):
            """The result, which comes first; for `fwd` the residuals too."""
            outputs, doutputs = self.jvp(leaves, tangents)
            return outputs[: len(types)], doutputs[: len(types)]

        evaluate.defjvp(result_of_jvp, symbolic_zeros=True)
        outputs = kept_call(evaluate, leaves, closed, self.linear_in)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs), closed.jaxpr

    def jvp(self, leaves: Leaves, tangents: Leaves) -> tuple[list[Any], list[Any]]:
        """(the leaves of the result and the residuals of `fwd`, their tangents)"""
        (result, residuals), program = self.call(self.fwd, leaves)
        outputs, structure = jax.tree.flatten((result, residuals))
        # A residual that is an argument stays the argument, so that `vmap` need not batch it.
        argument_of = {id(v): leaf for v, leaf in zip(program.invars, leaves, strict=True)}
        variables = zip(program.outvars, outputs, strict=True)
        saved = [argument_of.get(id(v), output) for v, output in variables]
        residuals = jax.tree.unflatten(structure, saved)[1]
        dresult = self.result_tangents(result, (list(leaves), residuals), tangents)
        # The residuals have tangent 0: only `bwd` reads them, and its derivatives are taken with
        # respect to the arguments.
        zeros = [SymbolicZero(jax.typeof(output).to_tangent_aval()) for output in outputs]
        return outputs, [dresult.get(i, zero) for i, zero in enumerate(zeros)]

    def result_tangents(self, result: Any, saved: Any, tangents: Leaves) -> dict[int, Any]:
        """The tangent of each floating-point leaf of the result, by the leaf's index.

        They are a linear map of the tangents of the perturbed leaves. Forward mode evaluates it
        (`evaluate`), reverse mode transposes it (`transpose`). Both read what is saved, and are
        functions of the leaves that take part: of f(x, n) with an integer n, of x alone.

        Args:
            result: of the function.
            saved: (the leaves of the arguments, the residuals).
            tangents: of the leaves; `SymbolicZero` for a leaf that is not perturbed.
        """
        results, structure = jax.tree.flatten(result)
        types = [jax.typeof(leaf).to_tangent_aval() for leaf in results]
        floats = [i for i, each in enumerate(types) if each.dtype != jax.dtypes.float0]
        perturbed = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def twin_at(leaves):
            """(the twin as a function of the perturbed leaves, these leaves)"""
            return function_of(self.twin, leaves, perturbed), [leaves[i] for i in perturbed]

        def evaluate(saved, tangents):
            """Tangents of the perturbed leaves -> those of the result: by the twin."""
            twin, leaves = twin_at(saved[0])
            dresult = jax.tree.leaves(jax.jvp(twin, leaves, tangents)[1])
            self.check("the tangent of the twin", types, dresult)
            return [dresult[i] for i in floats]

        def of_result(cotangents):
            """The cotangents of the result, from those of its floating-point leaves."""
            given = dict(zip(floats, cotangents, strict=True))
            leaves = [
                given[i] if i in given else np.zeros(each.shape, jax.dtypes.float0)
                for i, each in enumerate(types)
            ]
            return jax.tree.unflatten(structure, leaves)

        @jax.custom_jvp
        def transpose(saved, cotangents):
            """Cotangents of the result -> those of the perturbed leaves: by `bwd`."""
            leaves, residuals = saved
            given = self.by_leaf(self.bwd(residuals, of_result(cotangents)))
            wanted = [leaves[i] for i in perturbed]
            cotangents = [
                varying_as(given.get(i, jnp.zeros_like(leaf)), leaf)
                for i, leaf in zip(perturbed, wanted, strict=True)
            ]
            self.check("the cotangents of bwd", map(jax.typeof, wanted), cotangents)
            return cotangents

        @transpose.defjvp
        def transpose_jvp(primals, tangents):
            """The derivative of `transpose`: that of the twin's transpose, not of `bwd`."""

            def by_twin(saved, cotangents):
                twin, leaves = twin_at(saved[0])
                return list(jax.vjp(twin, *leaves)[1](of_result(cotangents)))

            return transpose(*primals), jax.jvp(by_twin, primals, tangents)[1]

        outputs = linear_map(
            evaluate,
            transpose,
            saved,
            [tangents[i] for i in perturbed],
            [types[i] for i in floats],
        )
        return dict(zip(floats, outputs, strict=True))

    def by_leaf(self, cotangents: Any) -> dict[int, Any]:
        """The cotangents that `bwd` returned, by the index of the leaf; a None has no entry."""
        given = {}

        def give(cotangent, place):
            if cotangent is not None:
                given[operator.index(place)] = cotangent

        places = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        try:
            jax.tree.map(give, tuple(cotangents), places, is_leaf=lambda leaf: leaf is None)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"bwd of {self.name} must return a tuple with the cotangent of each array argument,"
                f" or None for zeros: {self.structure}; got {jax.tree.structure(cotangents)}"
            ) from error
        return given

    def check(self, what: str, types: Iterable[Any], leaves: Leaves) -> None:
        """Raises TypeError unless the leaves have the shapes and dtypes of the types."""
        expected, got = (
            [f"{each.dtype}{list(each.shape)}" for each in group]
            for group in (types, map(jax.typeof, leaves))
        )
        if expected != got:
            raise TypeError(f"{what} of {self.name} must be {expected}; got {got}")
