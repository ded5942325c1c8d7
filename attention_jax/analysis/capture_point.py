"""Capture points: operations that expose the arrays of each attention call in a traced program.

While the context `functional.attention.capturing` holds a `CapturePoint`, every attention call
passes its output through a primitive that returns it unchanged and takes the arrays to capture as
further operands. `analysis.capture` traces a function in that context, evaluates the traced
program, and collects the operands at those points.

A primitive is needed because a Python list would receive tracers, which cannot leave a `scan`,
`vmap` or `checkpoint` inside the function.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attention_jax.core.serialization import exported
from attention_jax.functional.attention import compute_attention, logits_and_weights
from attention_jax.functional.heads import ungroup_heads
from attention_jax.normalizers import AttentionStatistics
from attention_jax.scores import ProjectedKeys
from attention_jax.tiles import Inputs, Options

Array = jax.Array


@exported
class CapturedAttention(NamedTuple):
    """The arrays of one attention call, each with all the batch axes *B.

    The axes of enclosing loops, such as the length of a `scan` or the size of a `vmap`, come before
    *B. Logits and statistics are None for attention whose weights are not a softmax of the logits.
    """

    query: Array  # [*B, T, Dq]
    key: Any  # [*B, S, Dk], or `ProjectedKeys` if the call takes them
    value: Array  # [*B, S, Dv]
    output: Array  # [*B, T, Dv]
    # [*B, T, S] with the bias and the normaliser's factor, -inf where masked; or None
    logits: Array | None = None
    # [*B, T, S] before dropout and damping; None unless matrices are captured
    weights: Array | None = None
    mask: Array | None = None  # bool [*B, T, S]; None unless matrices are captured
    statistics: AttentionStatistics | None = None  # [*B, T]; None without a softmax
    # [*B, T, S] the Gaussian that multiplies the weights; None without one, or without matrices
    damping: Array | None = None


class CapturePoint(NamedTuple):
    """What `functional.attention` calls instead of computing, while a function is captured."""

    matrices: bool  # whether to capture logits, weights and mask, which take memory T S
    grouped_heads: int | None = None  # the number of axes *B if [*B, K, G] is to become [*B, N]

    def compute_attention(
        self, options: Options, inputs: Inputs, implementation: str | None
    ) -> tuple[Array, AttentionStatistics | None]:
        """`functional.attention.compute_attention`, with a capture point."""
        is_softmax = options.normalizer.is_softmax
        # "cudnn" returns no statistics: another call computes them.
        if implementation != "cudnn":
            options = dataclasses.replace(options, return_statistics=is_softmax)
        output, statistics = compute_attention(options, inputs, implementation)
        # The weights before dropout.
        options = dataclasses.replace(options, dropout_rate=0.0, return_statistics=True)
        without_dropout = inputs._replace(dropout_rng=None)
        logits, weights = None, None
        if self.matrices:
            logits, weights = logits_and_weights(options, without_dropout)
        if not is_softmax:
            logits = None  # `analysis` takes captured logits for those of a softmax
        elif statistics is None:
            statistics = compute_attention(options, without_dropout)[1]
        captured = {"logits": logits, "weights": weights, "statistics": statistics}
        return self.point(inputs, output, **captured), statistics

    def point(self, inputs: Inputs, output: Array, **captured: Any) -> Array:
        """Returns `output` unchanged, with a capture point.

        Args:
            inputs: those of the call, with batch axes.
            output: [*B, T, Dv].
            captured: the logits, weights and statistics, as far as there are any.
        """
        *batch_shape, target_length, _ = inputs.query.shape
        shape = (target_length, inputs.key.shape[-2])

        def with_batch_axes(array: Array, core_ndim: int = 2) -> Array:
            return jnp.broadcast_to(array, (*batch_shape, *array.shape[array.ndim - core_ndim :]))

        key, projected = inputs.key, isinstance(inputs.key, ProjectedKeys)
        attention = CapturedAttention(
            query=inputs.query,
            key=key.map(with_batch_axes) if projected else with_batch_axes(key),
            value=with_batch_axes(inputs.value),
            output=output,
            **captured,
        )
        if self.matrices:
            mask = True if inputs.mask is None else inputs.mask.materialize(*shape)
            attention = attention._replace(mask=jnp.broadcast_to(mask, (*batch_shape, *shape)))
            if inputs.damping is not None:
                damping = with_batch_axes(jnp.exp(inputs.damping.materialize(*shape)))
                attention = attention._replace(damping=damping)
        else:
            attention = attention._replace(weights=None)
        if self.grouped_heads is not None:
            attention = ungroup_heads(attention, self.grouped_heads)
        leaves, structure = jax.tree.flatten(attention)
        return capture_p.bind(output, *leaves, structure=structure)


# --- the primitive, which returns its first operand ---

capture_p = Primitive("attention")
capture_p.def_impl(lambda output, *captured, structure: output)
capture_p.def_abstract_eval(lambda output, *captured, structure: output)
mlir.register_lowering(capture_p, lambda context, output, *captured, structure: [output])


def _jvp(primals: Any, tangents: Any, *, structure: Any) -> tuple[Any, Any]:
    return capture_p.bind(*primals, structure=structure), tangents[0]


def _batch(operands: Any, axes: Any, *, structure: Any) -> tuple[Any, int]:
    """Puts the new axis in front of every operand, so that `analysis.capture` knows where it is."""
    size = next(
        operand.shape[axis]
        for operand, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    moved = [batching.bdim_at_front(*each, size) for each in zip(operands, axes, strict=True)]
    return capture_p.bind(*moved, structure=structure), 0


ad.primitive_jvps[capture_p] = _jvp
batching.primitive_batchers[capture_p] = _batch
