"""The contestants of the attention benchmark that run on PyTorch: SDPA, a naive form, and KeOps.

They run with one thread or PyTorch's default number of threads, whichever is faster. The forward
pass alone runs without a gradient tape; the backward pass starts from the same cotangent as JAX's.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_contestant import Contestant, projected
from benchmarks.attention_works import OWN, Tree, Work
from benchmarks.measure import JSON

_TRIALS = 3  # for each number of threads


def _sdpa(work: Work) -> Contestant:
    """PyTorch's flash kernel for CPUs; it reads masks that are not causal from a boolean table."""
    if work.score not in ("dot", "general", "scaled"):
        raise LookupError(f"it has no score {work.score}")
    mask = work.mask_object()
    causal = work.mask == "causal"
    table = None
    if mask is not None and not causal:
        table = torch.from_numpy(np.array(mask.materialize(*work.lengths)))

    def attend(inputs: Tree) -> Tensor:
        query, scale = projected(work, inputs)
        return torch.nn.functional.scaled_dot_product_attention(
            query, inputs["key"], inputs["value"], attn_mask=table, is_causal=causal, scale=scale
        )

    return _contestant(work, attend)


def _naive(work: Work) -> Contestant:
    """v . tanh(Wq q + Wk k) for all pairs at once."""
    if work.score != "additive" or work.mask:
        raise LookupError("it has the additive score without a mask")

    def attend(inputs: Tree) -> Tensor:
        params = inputs["params"]
        query = inputs["query"] @ params["query_kernel"]
        key = inputs["key"] @ params["key_kernel"]
        logits = torch.tanh(query[..., :, None, :] + key[..., None, :, :]) @ params["v"]
        return torch.softmax(logits, dim=-1) @ inputs["value"]

    return _contestant(work, attend)


def _keops(work: Work) -> Contestant:
    """KeOps compiles C++ for each formula of a pair, and reduces it in linear memory."""
    if work.score not in _KEOPS_LOGITS or work.mask or work.batch * work.num_heads > 1:
        raise LookupError("it has no such score, or no mask or batch")
    with contextlib.redirect_stdout(sys.stderr):  # KeOps prints that there is no GPU
        import pykeops
        from pykeops.torch import LazyTensor
    pykeops.set_verbose(False)

    def attend(inputs: Tree) -> Tensor:
        params = inputs["params"]
        query, key, value = (inputs[name][0, 0] for name in ("query", "key", "value"))
        if work.score == "additive":
            query, key = query @ params["query_kernel"], key @ params["key_kernel"]
        pairs = LazyTensor(query[:, None, :]), LazyTensor(key[None, :, :])
        v = LazyTensor(params["v"]) if params else None
        logits = _KEOPS_LOGITS[work.score](*pairs, v)
        output = logits.sumsoftmaxweight(LazyTensor(value[None, :, :]), axis=1)
        return output[None, None]

    threads = torch.get_num_threads()  # KeOps starts the same number of its own
    inputs, cotangent = _tensors(work)
    about = _about(threads) | {"version": pykeops.__version__}
    return Contestant(_caller(work, attend, inputs, cotangent, threads), about, most_repeats=1)


_KEOPS_LOGITS: dict[str, Callable[[Any, Any, Any], Any]] = {
    # KeOps has no tanh. This form needs no guard: 1 / (e^2x + 1) is right where e^2x overflows.
    "additive": lambda q, k, v: v | (1 - 2 / ((2 * (q + k)).exp() + 1)),
    "scaled": lambda q, k, v: (q | k) / math.sqrt(q.ndim),
    OWN: lambda q, k, v: -((q - k) ** 2).sum(-1),
}


def _contestant(work: Work, attend: Callable[[Tree], Tensor]) -> Contestant:
    inputs, cotangent = _tensors(work)
    seconds = {}
    for threads in {1, torch.get_num_threads()}:
        call = _caller(work, attend, inputs, cotangent, threads)
        call()
        seconds[threads] = statistics.median(_timed(call) for _ in range(_TRIALS))
    threads = min(seconds, key=seconds.__getitem__)
    return Contestant(_caller(work, attend, inputs, cotangent, threads), _about(threads))


def _caller(
    work: Work, attend: Callable[[Tree], Tensor], inputs: Tree, cotangent: Tensor, threads: int
) -> Callable[[], Any]:
    leaves = {name: inputs[name] for name in ("query", "key", "value")} | inputs["params"]

    def call() -> Any:
        previous_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            if not work.backward:
                with torch.no_grad():
                    return attend(inputs)
            for leaf in leaves.values():
                leaf.grad = None
            output = attend(inputs)
            output.backward(cotangent)
            return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}
        finally:
            torch.set_num_threads(previous_threads)

    return call


def _tensors(work: Work) -> tuple[Tree, Tensor]:
    inputs, cotangent = work.arrays()
    dtype = getattr(torch, work.dtype)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(dtype)

    params = {name: tensor(array) for name, array in inputs.pop("params").items()}
    tensors = {name: tensor(array) for name, array in inputs.items()}
    for leaf in (*tensors.values(), *params.values()):
        leaf.requires_grad_(work.backward)
    return tensors | {"params": params}, tensor(cotangent)


def _about(threads: int) -> JSON:
    return {"layout": "BNTD", "device": "cpu", "version": torch.__version__, "threads": threads}


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


CONTESTANTS: dict[str, Callable[[Work], Contestant]] = {
    "SDPA": _sdpa,
    "naive": _naive,
    "KeOps": _keops,
}
