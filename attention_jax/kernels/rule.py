"""Attention by the Pallas kernels, for TPUs and for GPUs, and its derivative rule.

The rule surrounds the whole call, tokens to output: what is done to tokens outside of the kernels
is differentiated by JAX. Reverse mode is a kernel too; all other derivatives are those of `tiled`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.implementations import tiled
from attention_jax.implementations.contract import Inputs, Options
from attention_jax.kernels.rows import RowTerms, Sums, row_terms, statistics_of
from attention_jax.kernels.tokens import Operands, operands_of
from attention_jax.kernels.windows import Windows, padded_windows, windows_of

Array = jax.Array


class Call(NamedTuple):
    """The static part of a call."""

    options: Options
    tile: tuple[int, int]  # queries and keys
    tiles: tuple[int, int]  # their numbers
    output_dtype: Any


class Kernels(NamedTuple):
    """What a kind of device computes; T and S are padded to whole tiles."""

    tile: Callable[[Options, int, int], tuple[int, int]]  # the tile of these lengths
    # -> output [T, Dv] and sums; the windows are None if each query sees each key.
    forward: Callable[[Call, Operands, Windows | None], tuple[Array, Sums]]
    # (..., terms of the rows, the cotangent of the output) -> those of the operands
    backward: Callable[[Call, Operands, Windows | None, RowTerms, Array], Operands]


def in_float32(options: Options, inputs: Inputs) -> Any:
    """The twin of every kernel: `tiled` without 16-bit products, whose errors would add up."""
    output, statistics = tiled.attend(options, cast_floats(inputs, jnp.dtype(jnp.float32)))
    return output.astype(inputs.query.dtype), statistics


def attention_by(kernels: Kernels) -> Callable[[Options, Inputs], Any]:
    """(options, inputs of one example) -> output [T, Dv] in the query's dtype, and statistics."""

    def call_of(options: Options, inputs: Inputs) -> Call:
        lengths = inputs.query.shape[0], inputs.key.shape[0]
        tile = kernels.tile(options, *lengths)
        tiles = [math.ceil(n / size) for n, size in zip(lengths, tile, strict=True)]
        return Call(options, tile, (tiles[0], tiles[1]), inputs.query.dtype)

    def prepared(call: Call, inputs: Inputs) -> tuple[Operands, Windows | None]:
        lengths = inputs.query.shape[0], inputs.key.shape[0]
        padded = [count * size for count, size in zip(call.tiles, call.tile, strict=True)]
        windows = None
        if inputs.mask is not None or padded != list(lengths):
            windows = windows_of(inputs.mask, *lengths)
        operands = operands_of(call.options, inputs, windows, *padded)
        return operands, None if windows is None else padded_windows(windows, *padded)

    def forward(options: Options, inputs: Inputs) -> tuple[Any, tuple[Any, ...]]:
        call, length = call_of(options, inputs), inputs.query.shape[0]
        output, sums = kernels.forward(call, *prepared(call, inputs))
        results = output.astype(inputs.query.dtype), statistics_of(sums)
        return jax.tree.map(lambda rows: rows[:length], results), (inputs, output, sums)

    def backward(options: Options, residuals: Any, cotangents: Any) -> tuple[Inputs]:
        inputs, output, sums = residuals
        call = call_of(options, inputs)
        operands, pull_back, windows = jax.vjp(
            functools.partial(prepared, call), inputs, has_aux=True
        )

        def pad(rows: Array) -> Array:
            padding = output.shape[0] - rows.shape[0]
            return jnp.pad(rows, ((0, padding), *[(0, 0)] * (rows.ndim - 1)))

        cotangents = jax.tree.map(pad, cotangents)
        terms = row_terms(sums, output, cotangents)
        return pull_back(kernels.backward(call, operands, windows, terms, cotangents[0]))

    @functools.partial(custom_vjp, nondiff_argnums=(0,), twin=in_float32)
    def attend(options: Options, inputs: Inputs) -> Any:
        return forward(options, inputs)[0]

    attend.defvjp(forward, backward)
    return attend
