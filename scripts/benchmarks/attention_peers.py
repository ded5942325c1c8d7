"""The peers of the attention benchmark: naive JAX, other libraries, and ours with other options."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attention_jax.kernels.devices import interpret_params
from benchmarks.attention_contestant import (
    Contestant,
    import_peer,
    jax_contestant,
    ours,
    projected,
)
from benchmarks.attention_works import Tree, Work

Array = jax.Array


# --- ours, with other options ---


def _ours_with(**changes: Any) -> Callable[[Work], Contestant]:
    return lambda work: ours(dataclasses.replace(work, **changes))


def _half_as_long(work: Work) -> Contestant:
    return ours(dataclasses.replace(work, length=work.length // 2))


# --- in JAX ---


def _naive(work: Work) -> Contestant:
    """Attention as written in JAX without a library, jitted: all pairs at once."""
    if work.score not in _NAIVE_LOGITS:
        raise LookupError(f"it has no score {work.score}")

    def attend(inputs: Tree) -> Array:
        logits = _NAIVE_LOGITS[work.score](inputs["query"], inputs["key"], inputs["params"])
        mask = _mask_table(work)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return jax.nn.softmax(logits) @ inputs["value"]

    return jax_contestant(work, attend)


def _naive_additive(query: Array, key: Array, params: Tree) -> Array:
    query, key = query @ params["query_kernel"], key @ params["key_kernel"]
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    return jnp.einsum("...tsa,a->...ts", hidden, params["v"])


def _naive_dot(query: Array, key: Array) -> Array:
    return jnp.einsum("...td,...sd->...ts", query, key)


_NAIVE_LOGITS: dict[str, Callable[[Array, Array, Tree], Array]] = {
    "additive": _naive_additive,
    "dot": lambda query, key, params: _naive_dot(query, key),
    "general": lambda query, key, params: _naive_dot(query @ params["kernel"], key),
    "scaled": lambda query, key, params: _naive_dot(query, key) / math.sqrt(key.shape[-1]),
}


def _mask_table(work: Work) -> Array | None:
    mask = work.mask_object()
    return None if mask is None else mask.materialize(*work.lengths)


def _jax_nn(work: Work, implementation: Literal["cudnn"] | None = None) -> Contestant:
    if implementation == "cudnn" and (jax.default_backend() != "gpu" or work.dtype == "float32"):
        raise LookupError("cuDNN needs a GPU and 16-bit floats")
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
            implementation=implementation,
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


def _splash(work: Work) -> Contestant:
    """JAX's splash attention, with blocks of 512 and its fused backward pass."""
    if jax.default_backend() != "tpu" and interpret_params() is None:
        raise LookupError("it needs a TPU")
    if work.window is not None:
        raise LookupError("this benchmark has no window for it")
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    lengths = work.lengths
    t, s = (min(512, length) for length in lengths)
    sizes = kernel.BlockSizes(
        block_q=t, block_kv=s, block_kv_compute=s,
        block_q_dkv=t, block_kv_dkv=s, block_kv_dkv_compute=s, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.CausalMask(lengths) if work.mask == "causal" else masks.FullMask(lengths)
    heads = masks.MultiHeadMask([mask] * work.num_heads)
    splash = kernel.make_splash_mha(mask=heads, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def attend(inputs: Tree) -> Array:
        query, scale = projected(work, inputs)
        output: Array = jax.vmap(splash)(query * scale, inputs["key"], inputs["value"])
        return output

    return jax_contestant(work, attend)


def _tokamax(work: Work) -> Contestant:
    if jax.default_backend() not in ("gpu", "tpu"):
        raise LookupError("it needs a GPU or TPU")
    tokamax = import_peer("tokamax")

    def attend(inputs: Tree) -> Array:
        query, scale = projected(work, inputs)
        return tokamax.dot_product_attention(
            query, inputs["key"], inputs["value"], scale=scale, is_causal=work.mask == "causal"
        )

    if work.window is not None:
        raise LookupError("this benchmark has no window for it")
    return jax_contestant(work, attend, layout="BTND")


# --- in PyTorch, which may be missing ---


def _pytorch(name: str) -> Callable[[Work], Contestant]:
    def contestant(work: Work) -> Contestant:
        import_peer("torch")
        if name == "KeOps":
            import_peer("pykeops")
        from benchmarks import attention_pytorch

        return attention_pytorch.CONTESTANTS[name](work)

    return contestant


PEERS: dict[str, Callable[[Work], Contestant]] = {
    "ours, reference": _ours_with(implementation="reference"),
    "ours, mosaic_gpu": _ours_with(implementation="mosaic_gpu"),
    "ours, not causal": _ours_with(mask=""),
    "ours, forward": _ours_with(jvp=False),
    "ours, scaled dot": _ours_with(score="scaled"),
    "ours, half as long": _half_as_long,
    "naive JAX": _naive,
    "jax.nn": _jax_nn,
    "flax": _flax,
    "Keras": _keras,
    "PyTorch SDPA": _pytorch("SDPA"),
    "PyTorch naive": _pytorch("naive"),
    "KeOps": _pytorch("KeOps"),
    "cuDNN": lambda work: _jax_nn(work, "cudnn"),
    "splash": _splash,
    "tokamax": _tokamax,
}
