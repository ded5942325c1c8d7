"""The same attention in PyTorch, on the arrays of JAX: SDPA, a compiled form, FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

_compiled = functools.cache(lambda function: torch.compile(function, dynamic=False))


def prepared(
    name: str, arrays: Sequence[jax.Array], backward: bool
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """A call with these arrays, and a function that waits for its results.

    Raises:
        NotImplementedError: PyTorch has no such attention.
    """
    function = FUNCTIONS[name]
    tensors = [torch.from_dlpack(array).requires_grad_(backward) for array in arrays]

    def wait(_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def with_gradients() -> Any:
        output = function(*tensors[:-1])
        return torch.autograd.grad(output, tensors[:-1], tensors[-1].detach())

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    return (with_gradients if backward else forward), wait


def _sdpa(causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Tokens [B, T, N, H]."""
    tokens = [x.transpose(1, 2) for x in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = query.shape[2] != key.shape[2]
    return attend(*tokens, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _additive(query: Tensor, key: Tensor, value: Tensor, *kernels: Tensor) -> Tensor:
    query_kernel, key_kernel, v = kernels
    hidden = ((query / 8) @ query_kernel)[:, :, None] + ((key / 8) @ key_kernel)[:, None]
    return torch.softmax((torch.tanh(hidden) @ v).float(), -1).to(value.dtype) @ value


def _flex_l2(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """-|q - k|^2 / sqrt(D) by FlexAttention: 2 q . k, then the squares are subtracted."""
    from torch.nn.attention.flex_attention import flex_attention

    scale = query.shape[-1] ** -0.5
    squares = [scale * (x.float() ** 2).sum(-1) for x in (query, key)]

    def subtract(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score - squares[0][b, t] - squares[1][b, s]

    tokens = (x[:, None] for x in (query, key, value))
    return flex_attention(*tokens, score_mod=subtract, scale=2 * scale)[:, 0]


def _flex_user(*_: Tensor) -> Tensor:
    raise NotImplementedError("FlexAttention changes q . k, from which |q - k|_1 does not follow")


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sdpa": functools.partial(_sdpa, False),
    "causal_sdpa": functools.partial(_sdpa, True),
    "additive": lambda *tensors: _compiled(_additive)(*tensors),
    "flex_l2": lambda *tensors: _compiled(_flex_l2)(*tensors),
    "flex_user": _flex_user,
}
