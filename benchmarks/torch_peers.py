"""The peers that run on PyTorch, on the arrays of JAX: SDPA, KeOps and a compiled form.

The forward pass alone runs without a gradient tape; the backward pass starts from the same
cotangent as JAX's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor

from benchmarks.measure import FORWARD, Contestant, import_peer
from benchmarks.peers import TOKENS, projected
from benchmarks.works import OWN, Tree, Work


def sdpa(work: Work) -> Contestant:
    """PyTorch's fused kernel; it reads masks that are not causal from a boolean table."""
    projected(work, work.arrays()[0])  # raises for other scores
    causal = work.mask == "causal"
    table = torch.from_dlpack(work.mask_table()) if work.mask and not causal else None
    options: Any = {"attn_mask": table, "is_causal": causal, "enable_gqa": bool(work.num_key_heads)}

    def attend(inputs: Tree) -> Tensor:
        query, scale = projected(work, inputs)
        tokens = query, inputs["key"], inputs["value"]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*tokens, scale=scale, **options)

    return _contestant(work, attend)


def additive(work: Work) -> Contestant:
    """Additive attention by `torch.compile`."""

    def attend(inputs: Tree) -> Tensor:
        params = inputs["params"]
        query, key = (inputs[name] @ params[f"{name}_kernel"] for name in ("query", "key"))
        hidden = torch.tanh(query[..., :, None, :] + key[..., None, :, :])
        weights = torch.softmax((hidden @ params["v"]).float(), -1)
        return weights.to(inputs["value"].dtype) @ inputs["value"]

    return _contestant(work, torch.compile(attend, dynamic=False))


def keops(work: Work) -> Contestant:
    """KeOps compiles C++ for each formula of a pair, and reduces it in linear memory."""
    if work.score not in _KEOPS_LOGITS or work.mask or work.batch * work.num_heads > 1:
        raise LookupError("it has no such score, or no mask or batch")
    import_peer("pykeops").set_verbose(False)
    lazy = import_peer("pykeops.torch").LazyTensor

    def attend(inputs: Tree) -> Tensor:
        params = inputs["params"]
        query, key, value = (inputs[name][0, 0] for name in TOKENS)
        if work.score == "additive":
            query, key = query @ params["query_kernel"], key @ params["key_kernel"]
        pairs = lazy(query[:, None, :]), lazy(key[None, :, :])
        v = lazy(params["v"]) if params else None
        logits = _KEOPS_LOGITS[work.score](*pairs, v)
        output = logits.sumsoftmaxweight(lazy(value[None, :, :]), axis=1)
        return output[None, None]

    return _contestant(work, attend)


_KEOPS_LOGITS: dict[str, Callable[[Any, Any, Any], Any]] = {
    # KeOps has no tanh. This form needs no guard: 1 / (e^2x + 1) is right where e^2x overflows.
    "additive": lambda q, k, v: v | (1 - 2 / ((2 * (q + k)).exp() + 1)),
    "scaled": lambda q, k, v: (q | k) / math.sqrt(q.ndim),
    OWN: lambda q, k, v: -((q - k) ** 2).sum(-1),
}


def _contestant(work: Work, attend: Callable[[Tree], Tensor]) -> Contestant:
    """A function of the work's inputs as tensors, which share the memory of the arrays."""
    backward = work.direction != FORWARD
    inputs, cotangent = jax.tree.map(torch.from_dlpack, work.arrays())
    leaves, structure = jax.tree.flatten(inputs)
    for leaf in leaves:
        leaf.requires_grad_(backward)

    def call(count: int) -> Any:
        for _ in range(count):
            with torch.set_grad_enabled(backward):
                result: Any = attend(inputs)
            if backward:
                gradients = torch.autograd.grad(result, leaves, cotangent)
                result = result.detach(), jax.tree.unflatten(structure, gradients)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return Contestant(call, {})
