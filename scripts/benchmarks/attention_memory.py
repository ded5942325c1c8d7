"""Temporary memory and compile time of derivatives; the programs are compiled and not run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.kernels import IMPLEMENTATIONS
from benchmarks.attention_contestant import forward_backward, our_attention
from benchmarks.attention_works import Tree, Work
from benchmarks.measure import FOUR_SCORES, JSON, compile_cold, print_progress

_LENGTHS = (4096, 16384)

Array = jax.Array
Attend = Callable[[Tree], Array]


def _grad(attend: Attend, inputs: Tree, cotangent: Array, direction: Tree) -> Any:
    return forward_backward(attend)(inputs, cotangent)


def _jvp(attend: Attend, inputs: Tree, cotangent: Array, direction: Tree) -> Any:
    return jax.jvp(attend, (inputs,), (direction,))


def _gradient(attend: Attend, cotangent: Array) -> Callable[[Tree], Tree]:
    return jax.grad(lambda inputs: jnp.vdot(attend(inputs), cotangent))


def _jvp_of_grad(attend: Attend, inputs: Tree, cotangent: Array, direction: Tree) -> Any:
    return jax.jvp(_gradient(attend, cotangent), (inputs,), (direction,))


def _grad_of_grad(attend: Attend, inputs: Tree, cotangent: Array, direction: Tree) -> Any:
    def slope(inputs: Tree) -> Array:
        products = jax.tree.map(jnp.vdot, _gradient(attend, cotangent)(inputs), direction)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    return jax.grad(slope)(inputs)


_DERIVATIVES: dict[str, Callable[[Attend, Tree, Array, Tree], Any]] = {
    "grad": _grad,
    "jvp": _jvp,
    "jvp-of-grad": _jvp_of_grad,
    "grad-of-grad": _grad_of_grad,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A derivative of an implementation, at every length of `_LENGTHS`."""

    implementation: str
    score: str
    hidden_dim: int | None = None
    derivative: str = "grad"

    @property
    def name(self) -> str:
        """The name that --works selects it by."""
        return f"memory-{self.implementation}-{self.score}-{self.derivative}"

    def work(self, length: int) -> Work:
        return Work(
            self.name,
            self.score,
            length,
            hidden_dim=self.hidden_dim,
            implementation=self.implementation,
        )


def all_programs() -> dict[str, Program]:
    """All programs by name."""
    programs = [
        Program(implementation, score, 128 if score == "additive" else None)
        for implementation in ("reference", "tiled")
        for score in FOUR_SCORES
    ] + [
        Program("tiled", score, 64 if score == "additive" else None, derivative)
        for score in ("scaled", "additive")
        for derivative in _DERIVATIVES
        if derivative != "grad"
    ]
    return {program.name: program for program in programs}


def rows_of(programs: Iterable[Program], shrink: int = 1) -> list[JSON]:
    """A row for each program and length, including absent programs.

    A row has "temporary_mib"; "times_shorter", its ratio to the row before, whose length is a
    quarter; and "compile_seconds".
    """
    return [row for program in programs for row in _rows(program, shrink)]


def _rows(program: Program, shrink: int) -> list[JSON]:
    rows: list[JSON] = []
    for length in _LENGTHS:
        work = program.work(length).shrunk(shrink)
        row = {
            **work.described(),
            "direction": program.derivative,
            "implementation": program.implementation,
            "length": length,
        }
        if program.implementation not in IMPLEMENTATIONS:
            rows.append(row | {"absent": f"there is no implementation {program.implementation!r}"})
            continue
        print_progress(f"attention, {program.name}: compiling for length {work.length}")
        derivative = functools.partial(_DERIVATIVES[program.derivative], our_attention(work))
        compiled = compile_cold(derivative, *_shapes(work))
        shorter = rows[-1]["temporary_mib"] if rows else None
        rows.append(
            row
            | {
                "temporary_mib": compiled.temporary_mib,
                "times_shorter": shorter and compiled.temporary_mib / shorter,
                "compile_seconds": compiled.compile_seconds,
            }
        )
    return rows


def _shapes(work: Work) -> tuple[Tree, jax.ShapeDtypeStruct, Tree]:
    """The shapes and dtypes of inputs, cotangent and direction."""
    inputs, cotangent = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), work.arrays()
    )
    return inputs, cotangent, inputs
