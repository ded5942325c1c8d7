"""Attention by kernels, and its derivative rule.

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

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.experimental.row_terms import RowTerms, row_terms
from attention_jax.kernels.preparation import operands_of, refuse, twin
from attention_jax.kernels.windows import Windows, padded_windows
from attention_jax.normalizers.softmax_rows import RowSummary, SoftmaxSums
from attention_jax.tiles import tiled
from attention_jax.tiles.features import Operands
from attention_jax.tiles.options import Inputs, Options

Array = jax.Array


class KernelCall(NamedTuple):
    """The static part of a call."""

    options: Options
    tile: tuple[int, int]  # queries and keys
    tiles: tuple[int, int]  # their numbers
    output_dtype: Any

    @property
    def lengths(self) -> tuple[int, int]:
        """(T, S) in whole tiles."""
        return self.tile[0] * self.tiles[0], self.tile[1] * self.tiles[1]


class Kernels(NamedTuple):
    """What an implementation computes; T and S are padded to whole tiles."""

    name: str
    reason_against: Callable[[Options, Inputs], str | None]  # see `refuse`
    tile: Callable[[Options, int, int], tuple[int, int]]  # the tile of these lengths
    # -> output [T, Dv], and sums; the windows are None if each query sees each key.
    forward: Callable[[KernelCall, Operands, Windows | None], tuple[Array, SoftmaxSums]]
    # (..., the results of `row_terms`) -> cotangents of the operands
    backward: Callable[[KernelCall, Operands, Windows | None, Array, RowTerms], Operands]


def attention_by(kernels: Kernels, options: Options, inputs: Inputs) -> Any:
    """One example: output [T, Dv] in the query's dtype, and statistics.

    Raises:
        NotImplementedError: the kernels cannot serve; the message has the reason.
    """
    refuse(kernels.name, kernels.reason_against(options, inputs))
    if 0 in (inputs.query.shape[0], *inputs.value.shape):
        return tiled.attend(options, inputs)  # no kernel has a tile without entries
    return _attend(kernels, options, inputs)


@functools.partial(
    custom_vjp,
    nondiff_argnums=(0, 1),
    twin=lambda _, options, inputs: twin(options, inputs),
    linear=lambda _, options, inputs: inputs.value,
)
def _attend(kernels: Kernels, options: Options, inputs: Inputs) -> Any:
    return _attend_fwd(kernels, options, inputs)[0]


class Residuals(NamedTuple):
    """The arrays that the forward pass saves for the backward pass; T in whole tiles."""

    inputs: Inputs
    sums: SoftmaxSums  # [T]
    output: Array  # [T, Dv]


def _attend_fwd(kernels: Kernels, options: Options, inputs: Inputs) -> tuple[Any, Residuals]:
    call = _call_of(kernels, options, inputs)
    output, sums = kernels.forward(call, *_prepared(call, inputs))
    statistics = None if sums.moment is None else RowSummary.of_sums(*sums).statistics()
    results = output.astype(inputs.query.dtype), statistics
    results = jax.tree.map(lambda rows: rows[: inputs.query.shape[0]], results)
    return results, Residuals(inputs, sums, output)


def _attend_bwd(
    kernels: Kernels, options: Options, residuals: Residuals, cotangents: Any
) -> tuple[Inputs]:
    inputs, sums, output = residuals
    call = _call_of(kernels, options, inputs)
    operands, pull_back, windows = jax.vjp(functools.partial(_prepared, call), inputs, has_aux=True)

    def pad(rows: Array) -> Array:
        padding = call.lengths[0] - rows.shape[0]
        return jnp.pad(rows, ((0, padding), *[(0, 0)] * (rows.ndim - 1)))

    terms = row_terms(sums, output, jax.tree.map(pad, cotangents))
    return pull_back(kernels.backward(call, operands, windows, *terms))


_attend.defvjp(_attend_fwd, _attend_bwd)


def _call_of(kernels: Kernels, options: Options, inputs: Inputs) -> KernelCall:
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    tile = kernels.tile(options, *lengths)
    tiles = (math.ceil(lengths[0] / tile[0]), math.ceil(lengths[1] / tile[1]))
    return KernelCall(options, tile, tiles, inputs.query.dtype)


def _prepared(call: KernelCall, inputs: Inputs) -> tuple[Operands, Windows | None]:
    """What the kernels read, padded to whole tiles."""
    operands, windows = operands_of(call.options, inputs, call.lengths)
    return operands, windows and padded_windows(windows, *call.lengths)
