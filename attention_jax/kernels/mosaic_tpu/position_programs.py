"""Functions of (query position, key position) split by what each operation depends on.

A kernel evaluates a mask or a bias on one tile, [t] query positions and [s] key positions. Most
operations of such a function depend on one side alone: reading the segment of each query, hashing
the position of each key. They cost O(T + S) and need gathers, which kernels lack. So they run
outside, and the kernel runs only the operations that read both sides:

    values(i, j) = pair(of_query(i), of_key(j), shared)

`split` finds the three parts in the function's program. It works for any mask or bias, also for a
user's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

Array = jax.Array

_SHARED, _QUERY, _KEY, _PAIR = 0, 1, 2, 3  # what a value depends on: a set of two bits


class SideValues(NamedTuple):
    """What a kernel reads: values of each query tile, of each key tile, and of all tiles."""

    query: Any  # list of arrays [query_tiles, ...]
    key: Any  # list of arrays [key_tiles, ...]
    shared: Any  # list of arrays


class PositionProgram(NamedTuple):
    """A function of positions, split in two."""

    outside: Callable[..., SideValues]  # (arrays, query tiles [n, t], key tiles [m, s])
    inside: Callable[..., Any]  # (SideValues of one tile, tables) -> values [t, s]
    shapes: SideValues  # `jax.ShapeDtypeStruct` of each value, for one tile


def split(
    function: Callable[..., Any], arrays: Any, tables: Any, sizes: tuple[int, int]
) -> PositionProgram:
    """Splits function(arrays, tables, query_positions [t], key_positions [s]).

    Args:
        function: a traceable function that returns a pytree of arrays.
        arrays: its arrays, which may be tracers.
        tables: the arrays or `jax.ShapeDtypeStruct` that differ from tile to tile, cut to one tile.
        sizes: (t, s).
    """
    positions = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
    closed, result = jax.make_jaxpr(function, return_shape=True)(arrays, tables, *positions)
    structure = jax.tree.structure(result)
    program = closed.jaxpr
    num_arrays, num_tables = len(jax.tree.leaves(arrays)), len(jax.tree.leaves(tables))
    side = dict.fromkeys(program.constvars, _SHARED)
    sides = [_SHARED] * num_arrays + [_PAIR] * num_tables + [_QUERY, _KEY]
    side.update(zip(program.invars, sides, strict=True))
    from_arrays = {*program.constvars, *program.invars[:num_arrays]}

    outside: list[Any] = []
    inside: list[Any] = []
    computed_inside = set(program.invars[num_arrays : num_arrays + num_tables])
    largest = {_SHARED: max(sizes), _QUERY: sizes[0], _KEY: sizes[1]}
    for equation in program.eqns:
        inputs = [var for var in equation.invars if not isinstance(var, core.Literal)]
        dependence = functools.reduce(int.__or__, (side[var] for var in inputs), _SHARED)
        side.update(dict.fromkeys(equation.outvars, dependence))
        needs_arrays = any(var in from_arrays for var in inputs)
        if needs_arrays:
            from_arrays.update(equation.outvars)
        is_inside = dependence == _PAIR or any(var in computed_inside for var in inputs)
        if not is_inside:
            # A small constant is cheaper to make again; a large array is never passed.
            constant = dependence == _SHARED and not needs_arrays
            small = all(_size(var) <= largest[dependence] for var in equation.outvars)
            is_inside = constant or not small
        if is_inside:
            computed_inside.update(equation.outvars)
        (inside if is_inside else outside).append(equation)

    # The values that the part inside reads from outside.
    read = [var for equation in inside for var in equation.invars] + list(program.outvars)
    frontier = [
        var
        for var in dict.fromkeys(v for v in read if not isinstance(v, core.Literal))
        if var not in computed_inside
    ]
    groups = [[var for var in frontier if side[var] == which] for which in (_QUERY, _KEY, _SHARED)]
    array_vars = [*program.constvars, *program.invars[:num_arrays]]
    table_vars = program.invars[num_arrays : num_arrays + num_tables]
    of_query, of_key, of_all = (
        _function(outside, [*array_vars, *position], group)
        for position, group in zip(
            ([program.invars[-2]], [program.invars[-1]], []), groups, strict=True
        )
    )
    of_pair = _function(inside, [*itertools.chain(*groups), *table_vars], program.outvars)

    def evaluate_outside(arrays: Any, query_tiles: Array, key_tiles: Array) -> SideValues:
        leaves = [*closed.consts, *jax.tree.leaves(arrays)]
        return SideValues(
            jax.vmap(functools.partial(of_query, *leaves))(query_tiles) if groups[0] else [],
            jax.vmap(functools.partial(of_key, *leaves))(key_tiles) if groups[1] else [],
            of_all(*leaves) if groups[2] else [],
        )

    def evaluate_inside(values: SideValues, tables: Any) -> Any:
        results = of_pair(*itertools.chain(*values), *jax.tree.leaves(tables))
        return jax.tree.unflatten(structure, results)

    shapes = SideValues(
        *([jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in group] for group in groups)
    )
    return PositionProgram(evaluate_outside, evaluate_inside, shapes)


def _size(var: Any) -> int:
    return var.aval.size


def _function(equations: Sequence[Any], arguments: Sequence[Any], results: Sequence[Any]) -> Any:
    """The function of `arguments` that computes `results` by those equations that it needs."""
    wanted, needed = {v for v in results if not isinstance(v, core.Literal)}, []
    for equation in reversed(equations):
        if any(var in wanted for var in equation.outvars):
            needed.append(equation)
            wanted.update(v for v in equation.invars if not isinstance(v, core.Literal))
    names = ("",) * len(arguments), ("",) * len(results)
    program = core.Jaxpr(
        (),
        list(arguments),
        list(results),
        needed[::-1],
        debug_info=core.DebugInfo("position function", "split", *names),
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))
