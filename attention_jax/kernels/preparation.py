"""What all kernels do to tokens: refuse calls they cannot serve, replace hidden tokens, project.

A kernel never sees what the mask hides. Tokens in no allowed pair are replaced, so that all numbers
are finite.
"""

from typing import Any

import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.kernels.windows import hides_tokens, reason_against_mask, seen_tokens, windows_of
from attention_jax.normalizers import Softmax
from attention_jax.tiles import tiled
from attention_jax.tiles.features import Operands, project_tokens
from attention_jax.tiles.options import Inputs, Options


def reason_against_call(options: Options, inputs: Inputs, *, segments: bool = False) -> str | None:
    """Why no kernel can compute this; None if that depends on the kernel alone.

    Args:
        options: the static options.
        inputs: with or without batch axes.
        segments: whether the kernel takes a mask of segments.
    """
    lengths = inputs.query.shape[-2], inputs.key.shape[-2]
    if options.normalizer != Softmax():
        return f"computes a softmax without a sink, not {options.normalizer}"
    if options.dropout_rate > 0:
        return f"has no dropout; got dropout_rate {options.dropout_rate}"
    if inputs.bias is not None:
        return "has no bias; got a bias"
    if inputs.damping is not None:
        return "does not multiply weights by a Gaussian"
    if any(is_symbolic_dim(length) for length in lengths):
        return f"needs known lengths; got T = {lengths[0]}, S = {lengths[1]}"
    return reason_against_mask(inputs.mask, segments=segments)


def refuse(name: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason."""
    if reason is not None:
        raise NotImplementedError(f"implementation {name!r} {reason}: use 'tiled'")


def project_seen(options: Options, inputs: Inputs, padded: tuple[int, int]) -> tuple[Operands, Any]:
    """The tokens of one example, projected, as the kernel reads them; and the windows of its mask.

    Args:
        options: those of the call.
        inputs: the arrays of one example.
        padded: the lengths to which tokens are padded.

    Returns:
        the second is None if each query sees each key; else `Windows`, not padded.
    """
    lengths, windows = (inputs.query.shape[0], inputs.key.shape[0]), None
    used: Any = None, None
    if inputs.mask is not None or padded != lengths:
        windows = windows_of(inputs.mask, *lengths)
        if padded != lengths or hides_tokens(inputs.mask, *lengths):
            used = seen_tokens(windows, lengths[1])
    return project_tokens(options.score, inputs, padded, used), windows


def twin(options: Options, inputs: Inputs) -> Any:
    """`tiled` without 16-bit products, whose errors would add up."""
    output, statistics = tiled.attend(options, cast_floats(inputs, jnp.dtype(jnp.float32)))
    return output.astype(inputs.query.dtype), statistics
