"""The peers of the attention benchmark that run on PyTorch: SDPA and KeOps.

The forward pass alone runs without a gradient tape; the backward pass starts from the same
cotangent as JAX's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.contestants import TOKENS, projected
from benchmarks.measure import Contestant, import_peer
from benchmarks.works import FORWARD, OWN, Tree, Work


def sdpa(work: Work) -> Contestant:
    """PyTorch's flash kernel for CPUs; it reads masks that are not causal from a boolean table."""
    projected(work, work.arrays()[0])  # raises for other scores
    table, causal = None, work.mask == "causal"
    if (mask := work.mask_object()) is not None and not causal:
        table = torch.from_numpy(np.array(mask.materialize(*work.lengths)))

    def attend(inputs: Tree) -> Tensor:
        query, scale = projected(work, inputs)
        return torch.nn.functional.scaled_dot_product_attention(
            query, inputs["key"], inputs["value"], attn_mask=table, is_causal=causal, scale=scale
        )

    return _contestant(work, attend)


def keops(work: Work) -> Contestant:
    """KeOps compiles C++ for each formula of a pair, and reduces it in linear memory."""
    if work.score not in _KEOPS_LOGITS or work.mask or work.batch * work.num_heads > 1:
        raise LookupError("it has no such score, or no mask or batch")
    pykeops, lazy = import_peer("pykeops"), import_peer("pykeops.torch").LazyTensor
    pykeops.set_verbose(False)

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

    return _contestant(work, attend, pykeops.__version__)


_KEOPS_LOGITS: dict[str, Callable[[Any, Any, Any], Any]] = {
    # KeOps has no tanh. This form needs no guard: 1 / (e^2x + 1) is right where e^2x overflows.
    "additive": lambda q, k, v: v | (1 - 2 / ((2 * (q + k)).exp() + 1)),
    "scaled": lambda q, k, v: (q | k) / math.sqrt(q.ndim),
    OWN: lambda q, k, v: -((q - k) ** 2).sum(-1),
}


def _contestant(
    work: Work, attend: Callable[[Tree], Tensor], version: str = torch.__version__
) -> Contestant:
    inputs, cotangent = _tensors(work)
    leaves = {name: inputs[name] for name in TOKENS} | inputs["params"]

    def call() -> Any:
        if work.direction == FORWARD:
            with torch.no_grad():
                return attend(inputs)
        for leaf in leaves.values():
            leaf.grad = None
        output = attend(inputs)
        output.backward(cotangent)
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    about = {"layout": "BNTD", "device": "cpu", "version": version}
    return Contestant(call, about | {"threads": torch.get_num_threads()})


def _tensors(work: Work) -> tuple[Tree, Tensor]:
    inputs, cotangent = work.arrays()
    dtype = getattr(torch, work.dtype)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(dtype)

    params = {name: tensor(array) for name, array in inputs["params"].items()}
    tensors = {name: tensor(inputs[name]) for name in TOKENS}
    for leaf in (*tensors.values(), *params.values()):
        leaf.requires_grad_(work.direction != FORWARD)
    return tensors | {"params": params}, tensor(cotangent)
