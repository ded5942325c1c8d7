"""The peers of the attention benchmark: naive JAX, other libraries, and ours with other options."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.implementations import PORTABLE
from benchmarks.contestants import jax_contestant, ours, projected
from benchmarks.measure import Contestant, import_peer
from benchmarks.works import FORWARD, Tree, Work

Array = jax.Array


def _ours_with(**changes: Any) -> Callable[[Work], Contestant]:
    return lambda work: ours(work.but(**changes))


# --- in JAX ---


def _naive(work: Work) -> Contestant:
    """Attention as written in JAX without a library, jitted: all pairs at once."""

    def attend(inputs: Tree) -> Array:
        if work.score == "additive":
            query, key = (
                inputs[name] @ inputs["params"][f"{name}_kernel"] for name in ("query", "key")
            )
            hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
            logits = jnp.einsum("...tsa,a->...ts", hidden, inputs["params"]["v"])
        else:
            query, scale = projected(work, inputs)
            logits = scale * jnp.einsum("...td,...sd->...ts", query, inputs["key"])
        mask = _mask_table(work)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return jax.nn.softmax(logits) @ inputs["value"]

    return jax_contestant(work, attend)


def _mask_table(work: Work) -> Array | None:
    mask = work.mask_object()
    return None if mask is None else mask.materialize(*work.lengths)


def _jax_nn(work: Work) -> Contestant:
    window = None if work.window is None else (work.window, work.window)

    def attend(inputs: Tree) -> Array:
        query, scale = projected(work, inputs)
        return jax.nn.dot_product_attention(
            query,
            inputs["key"],
            inputs["value"],
            scale=scale,
            is_causal=work.mask == "causal",
            local_window_size=window,
        )

    return jax_contestant(work, attend, layout="BTND")


def _flax(work: Work) -> Contestant:
    from flax import nnx

    if work.score != "scaled":
        raise LookupError(f"it has no score {work.score}")

    def attend(inputs: Tree) -> Array:
        return nnx.dot_product_attention(
            inputs["query"], inputs["key"], inputs["value"], mask=_mask_table(work)
        )

    return jax_contestant(work, attend, layout="BTND")


def _keras(work: Work) -> Contestant:
    """Keras's layer has neither projections nor heads, so it receives projected inputs."""
    if work.score != "additive" or work.mask:
        raise LookupError("AdditiveAttention has the additive score without a mask")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = import_peer("keras")
    if keras.backend.backend() != "jax":
        raise LookupError(f"its backend is {keras.backend.backend()}; set KERAS_BACKEND=jax")
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

    return jax_contestant(work, attend, version=keras.__version__)


def _in_pytorch(function: str) -> Callable[[Work], Contestant]:
    return lambda work: getattr(import_peer("benchmarks.pytorch_peers"), function)(work)


PEERS: dict[str, Callable[[Work], Contestant]] = {
    **{f"ours, {name}": _ours_with(implementation=name) for name in PORTABLE},
    "ours, not causal": _ours_with(mask=""),
    "ours, forward": _ours_with(direction=FORWARD),
    "ours, scaled dot": _ours_with(score="scaled"),
    "ours, softmax": _ours_with(normalizer="softmax"),
    "ours, half as long": lambda work: ours(work.but(length=work.length // 2)),
    "naive JAX": _naive,
    "jax.nn": _jax_nn,
    "flax": _flax,
    "Keras": _keras,
    "PyTorch SDPA": _in_pytorch("sdpa"),
    "KeOps": _in_pytorch("keops"),
}
