"""The same attention in PyTorch, on the arrays of JAX: SDPA, a compiled form, FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention


def prepared(name: str, arrays: Sequence[jax.Array], backward: bool) -> Callable[[int], None]:
    """A function that starts a number of calls with these arrays, and waits for the last one.

    Raises:
        NotImplementedError: PyTorch has no such attention.
    """
    tensors = [torch.from_dlpack(array).requires_grad_(backward) for array in arrays]

    def call(count: int) -> None:
        for _ in range(count):
            with torch.set_grad_enabled(backward):
                output = _FUNCTIONS[name](*tensors[: len(tensors) - backward])
            if backward:
                torch.autograd.grad(output, tensors[:-1], tensors[-1].detach())
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return call


def _sdpa(causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Tokens [B, T, N, H]."""
    tokens = [x.transpose(1, 2) for x in (query, key, value)]
    grouped = query.shape[2] != key.shape[2]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*tokens, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _additive(query: Tensor, key: Tensor, value: Tensor, *kernels: Tensor) -> Tensor:
    query_kernel, key_kernel, v = kernels
    hidden = (query / 8 @ query_kernel)[:, :, None] + (key / 8 @ key_kernel)[:, None]
    return torch.softmax((torch.tanh(hidden) @ v).float(), -1).to(value.dtype) @ value


def _flex_l2(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """-|q - k|^2 / sqrt(D): FlexAttention computes 2 q . k, from which squares are subtracted."""
    query, key, scale = query / 8, key / 8, query.shape[-1] ** -0.5
    squares = [scale * (x.float() ** 2).sum(-1) for x in (query, key)]

    def subtract(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score - squares[0][b, t] - squares[1][b, s]

    tokens = (x[:, None] for x in (query, key, value))
    return flex_attention(*tokens, score_mod=subtract, scale=2 * scale)[:, 0]


def _flex_user(*_: Tensor) -> Tensor:
    raise NotImplementedError("FlexAttention changes q . k, from which |q - k| does not follow")


_FUNCTIONS: dict[str, Any] = {
    "sdpa": functools.partial(_sdpa, False),
    "causal_sdpa": functools.partial(_sdpa, True),
    "additive": torch.compile(_additive, dynamic=False),
    "flex_l2": torch.compile(_flex_l2, dynamic=False),
    "flex_user": _flex_user,
}
