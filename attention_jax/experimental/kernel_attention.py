"""Attention by a forward and a backward kernel of one kind of device.

What is done to tokens outside of the kernels is differentiated by JAX. Reverse mode is a kernel
too, and all other derivatives are those of `tiled`.

With x_j the logits of a row, M the largest of them, and

    total = sum_j exp(x_j - M),    moment = sum_j exp(x_j - M) (x_j - M),

the results are logsumexp Z = M + log total and entropy H = log total - moment / total. With weights
w, output O = sum_j w_j v_j and cotangents dO, dZ and dH,

    dv_j = w_j dO,    dx_j = w_j (dO . v_j - dO . O + dZ - dH (log w_j + H)),

since dZ/dx_j = w_j and dH/dx_j = -w_j (log w_j + H), and log w_j + H = x_j - M - moment / total. A
tile has exp(x_j - M) = w_j total, so the cotangents are divided by the total once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.experimental.visible_keys import VisibleKeys, visible_keys
from attention_jax.kernels.preparation import project_seen, refuse, twin
from attention_jax.normalizers.softmax_rows import SoftmaxSums, where_positive
from attention_jax.tiles import tiled
from attention_jax.tiles.features import Operands
from attention_jax.tiles.options import Inputs, Options
from attention_jax.tiles.prepare import Plan

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class KernelPlan(Plan):
    """The static part of a call."""

    output_dtype: Any = None

    @property
    def tiles(self) -> tuple[int, int]:
        """The numbers of tiles of queries and of keys."""
        return self.query_tiles, self.key_tiles


class RowTerms(NamedTuple):
    """What a backward kernel reads for each row: arrays, or the kernel's references to them."""

    reference: Any  # [T] subtracted from the logits; +inf for a row without keys
    offset: Any  # [T] added to the cotangents of the weights
    dentropy: Any = None  # [T]; None without statistics
    # What follows is read outside of the kernels, or in another form.
    dlogsumexp: Any = None  # [T] the sum of the dx_j, 0 without statistics
    doutput: Any = None  # float32 [T, Dv] dO / total


class Kernels(NamedTuple):
    """What an implementation computes; T and S are padded to whole tiles."""

    name: str
    reason_against: Callable[[Options, Inputs], str | None]  # see `refuse`
    tile: Callable[[Options, int, int], tuple[int, int]]  # the tile of these lengths
    # -> output [T, Dv], and sums; the third argument is None if each query sees each key.
    forward: Callable[[KernelPlan, Operands, VisibleKeys | None], tuple[Array, SoftmaxSums]]
    # -> cotangents of the operands
    backward: Callable[[KernelPlan, Operands, VisibleKeys | None, RowTerms], Operands]


def attention_by(kernels: Kernels, options: Options, inputs: Inputs) -> Any:
    """One example: output [T, Dv] in the query's dtype, and statistics.

    Raises:
        NotImplementedError: the kernels cannot serve; the message has the reason.
    """
    refuse(kernels.name, kernels.reason_against(options, inputs))
    if 0 in (inputs.query.shape[0], *inputs.value.shape):
        return tiled.attend(options, inputs)  # no kernel has a tile without entries
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    tile = kernels.tile(options, *lengths)
    plan = KernelPlan(options, tile, lengths, inputs.compute_dtype, output_dtype=inputs.query.dtype)
    return _attend(kernels, plan, inputs)


@functools.partial(
    custom_vjp,
    nondiff_argnums=(0, 1),
    twin=lambda _, plan, inputs: twin(plan.options, inputs),
    linear=lambda _, plan, inputs: inputs.value,
)
def _attend(kernels: Kernels, plan: KernelPlan, inputs: Inputs) -> Any:
    return _attend_fwd(kernels, plan, inputs)[0]


class Residuals(NamedTuple):
    """The arrays that the forward pass saves for the backward pass; T in whole tiles."""

    inputs: Inputs
    sums: SoftmaxSums  # [T]
    output: Array  # [T, Dv]


def _attend_fwd(kernels: Kernels, plan: KernelPlan, inputs: Inputs) -> tuple[Any, Residuals]:
    output, sums = kernels.forward(plan, *_project_whole_tiles(plan, inputs))
    statistics = None if sums.moment is None else sums.summary().statistics()
    results = output.astype(inputs.query.dtype), statistics
    results = jax.tree.map(lambda rows: rows[: plan.lengths[0]], results)
    return results, Residuals(inputs, sums, output)


def _attend_bwd(
    kernels: Kernels, plan: KernelPlan, residuals: Residuals, cotangents: Any
) -> tuple[Inputs]:
    inputs, sums, output = residuals
    operands, pull_back, visible = jax.vjp(
        functools.partial(_project_whole_tiles, plan), inputs, has_aux=True
    )

    def pad(rows: Array) -> Array:
        padding = plan.padded_lengths[0] - rows.shape[0]
        return jnp.pad(rows, ((0, padding), *[(0, 0)] * (rows.ndim - 1)))

    terms = row_terms(sums, output, jax.tree.map(pad, cotangents))
    return pull_back(kernels.backward(plan, operands, visible, terms))


_attend.defvjp(_attend_fwd, _attend_bwd)


def _project_whole_tiles(plan: KernelPlan, inputs: Inputs) -> tuple[Operands, VisibleKeys | None]:
    """The projected tokens that the kernels read, padded to whole tiles, and what queries see."""
    operands, windows = project_seen(plan.options, inputs, plan.padded_lengths)
    return operands, windows and visible_keys(plan, inputs.mask, windows)


def row_terms(sums: SoftmaxSums, output: Array, cotangents: Any) -> RowTerms:
    """The terms of the rows; one without keys sends 0, whatever its cotangent is, NaN included.

    Args:
        sums: of the forward kernel.
        output: [T, Dv].
        cotangents: of output and statistics.
    """
    doutput, dstatistics = cotangents
    empty = sums.total == 0
    scale = inverse_totals(sums.total)
    doutput = doutput.astype(jnp.float32)
    offset = -jnp.sum(doutput * output.astype(jnp.float32), axis=-1)
    dentropy, dlogsumexp = None, jnp.zeros_like(offset)
    if sums.moment is not None:
        dentropy = jnp.where(empty, 0, dstatistics.entropy * scale)
        dlogsumexp = jnp.where(empty, 0, dstatistics.logsumexp)
        offset = offset + dlogsumexp + dentropy * sums.moment
    offset = jnp.where(empty, 0, offset * scale)
    reference = jnp.where(empty, jnp.inf, sums.largest)
    doutput = jnp.where(empty[:, None], 0, doutput * scale[:, None])
    return RowTerms(reference, offset, dentropy, dlogsumexp, doutput)


# --- in a kernel, on a tile ---


def inverse_totals(total: Array) -> Array:
    """1 / total; 0 for a row without keys, and NaN for NaN, which `total > 0` would hide."""
    has_keys = total != 0
    return jnp.where(has_keys, 1 / jnp.where(has_keys, total, 1.0), 0.0)


def tile_cotangents(logits: Array, products: Array, terms: RowTerms) -> tuple[Array, Array]:
    """(exp(x_j - M), dx_j) of a tile, given dO . v_j and terms that are spread to its shape."""
    shifted = logits - terms.reference
    exponentials = jnp.exp(shifted)
    dweights = products + terms.offset
    if terms.dentropy is not None:
        dweights = dweights - terms.dentropy * where_positive(exponentials, shifted)
    return exponentials, exponentials * dweights
