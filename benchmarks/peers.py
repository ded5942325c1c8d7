"""The contestants of the attention benchmark that run in JAX, by name: ours, and its peers.

Every contestant computes the same output from the same inputs, including the score's projections,
and the same derivatives. Arrays are in a contestant's own layout before its turns.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import FORWARD, Contestant, compiled, derivative, import_peer
from benchmarks.works import Tree, Work

Array = jax.Array
TOKENS = ("query", "key", "value")


def jax_contestant(
    work: Work, attend: Callable[[Tree], Array], *, heads_last: bool = False, **others: Any
) -> Contestant:
    """A function of the work's inputs, or with `others` beside them; with tokens [B, T, N, D]."""
    inputs, cotangent = work.arrays(heads_last=heads_last)
    inputs |= others
    return compiled(derivative(work.direction, attend), inputs, cotangent, inputs)


def ours(work: Work, **changes: Any) -> Contestant:
    """`attention_jax.attention`; with changes, for another work."""
    changed = work.but(**changes)
    return jax_contestant(changed, changed.attend)


def projected(work: Work, inputs: Any) -> tuple[Any, float]:
    """(query, scale) with which the score is scale times a dot product; for any library's arrays.

    Raises:
        LookupError: the score is not a dot product.
    """
    if work.score == "general":
        return inputs["query"] @ inputs["params"]["kernel"], 1.0
    if work.score not in ("dot", "scaled"):
        raise LookupError(f"it has no score {work.score}")
    return inputs["query"], 1.0 if work.score == "dot" else 1 / math.sqrt(work.dim)


def _naive(work: Work) -> Contestant:
    """Attention as written in JAX without a library, jitted: all pairs at once."""

    def attend(inputs: Tree) -> Array:
        if work.score == "additive":
            params = inputs["params"]
            query, key = (inputs[name] @ params[f"{name}_kernel"] for name in ("query", "key"))
            hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
            logits = jnp.einsum("...tsa,a->...ts", hidden, params["v"])
        else:
            query, scale = projected(work, inputs)
            logits = scale * jnp.einsum("...td,...sd->...ts", query, inputs["key"])
        if work.mask:
            logits = jnp.where(work.mask_table(), logits, -jnp.inf)
        return jax.nn.softmax(logits) @ inputs["value"]

    return jax_contestant(work, attend)


def jax_nn(work: Work, module: Any = jax.nn, implementation: str | None = None) -> Contestant:
    """`dot_product_attention` of `jax.nn`, or of our `interop`."""
    window = None if work.window is None else (work.window, work.window)
    options: Any = {"is_causal": work.mask == "causal", "local_window_size": window}
    options |= {"implementation": implementation}
    options |= {} if work.score == "scaled" else {"scale": 1.0}

    def attend(inputs: Tree) -> Array:
        query, _ = projected(work, inputs)
        return module.dot_product_attention(query, inputs["key"], inputs["value"], **options)

    return jax_contestant(work, attend, heads_last=True)


def _flax(work: Work) -> Contestant:
    from flax import nnx

    if work.score != "scaled":
        raise LookupError(f"it has no score {work.score}")

    def attend(inputs: Tree) -> Array:
        query, key, value = (inputs[name] for name in TOKENS)
        return nnx.dot_product_attention(query, key, value, mask=work.mask_table())

    return jax_contestant(work, attend, heads_last=True)


def _keras(work: Work) -> Contestant:
    """Keras's layer has neither projections nor heads, so it receives projected inputs."""
    if work.score != "additive" or work.mask:
        raise LookupError("AdditiveAttention has the additive score without a mask")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = import_peer("keras")
    target, source = work.lengths
    rows, features = work.batch * work.num_heads, work.hidden_dim
    layer = keras.layers.AdditiveAttention(use_scale=True)
    layer.build([(rows, target, features), (rows, source, work.dim), (rows, source, features)])

    def attend(inputs: Tree) -> Array:
        params = inputs["params"]
        query = inputs["query"] @ params["query_kernel"]
        key = inputs["key"] @ params["key_kernel"]
        merged = [x.reshape(rows, *x.shape[2:]) for x in (query, inputs["value"], key)]
        output, _ = layer.stateless_call([params["v"]], [], merged)
        return output.reshape(inputs["query"].shape)

    return jax_contestant(work, attend)


def in_pytorch(name: str) -> Callable[[Work], Contestant]:
    return lambda work: getattr(import_peer("benchmarks.torch_peers"), name)(work)


PEERS: dict[str, Callable[[Work], Contestant]] = {
    "ours, reference": functools.partial(ours, implementation="reference"),
    "ours, tiled": functools.partial(ours, implementation="tiled"),
    "ours, not causal": functools.partial(ours, mask=""),
    "ours, forward": functools.partial(ours, direction=FORWARD),
    "ours, scaled dot": functools.partial(ours, score="scaled"),
    "ours, softmax": functools.partial(ours, normalizer="softmax"),
    "ours, half as long": lambda work: ours(work, length=work.length // 2),
    "naive JAX": _naive,
    "jax.nn": jax_nn,
    "flax": _flax,
    "Keras": _keras,
    "PyTorch SDPA": in_pytorch("sdpa"),
    "KeOps": in_pytorch("keops"),
}
