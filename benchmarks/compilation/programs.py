"""The programs that are compiled. To add a program for TPUs, add it to `programs`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import attention_jax as aj
from benchmarks.compilation import targets
from benchmarks.measure import GRAD, derivative

DIM = 128
TILE = 512  # queries and keys of a tile, for our kernel of scaled dot and its peers
TILE_SIZES = ((128, 128), (256, 256), (256, 512), (512, 512), (512, 1024), (1024, 1024))
Made = tuple[Callable[..., Any], tuple[Any, ...]]  # (function, arguments)


class Program(NamedTuple):
    """A program for one target."""

    name: str  # what it computes, and of which sizes
    target: str  # the device that it is compiled for
    kernels: tuple[str, ...]  # the names of the kernels whose bundles are counted
    make: Callable[[str], Made]
    tile: tuple[int, int] | None = None  # of a program that compares sizes of tiles


def programs() -> Iterator[Program]:
    """All programs for TPUs; those with a tile compare sizes of tiles."""

    def ours(name: str, target: str, score: Any, length: int, *blocks: int, **options: Any) -> Any:
        make = functools.partial(attention, score=score, length=length, blocks=blocks, **options)
        kernels = ("attention_forward", "attention_backward") if length < 16384 else ()
        return Program(name, target, kernels, make)

    additive = aj.Additive(hidden_dim=DIM)
    for target in targets.TARGETS:
        yield ours("scaled dot, T 4,096", target, "scaled", 4096, TILE, TILE)
        for name in ("splash attention", "splash attention with its fused backward"):
            peer = functools.partial(splash, length=4096, fused="fused" in name)
            kernels = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")
            yield Program(f"{name}, T 4,096", target, kernels, peer)
        yield ours("additive, T 4,096", target, additive, 4096, 256, 512)
    for name, score in {"scaled dot": "scaled", "additive": additive}.items():
        yield ours(f"{name}, T 16,384", "v5e", score, 16384, 256, 512)
        for tile in TILE_SIZES:
            yield ours(name, "v5e", score, 4096, *tile)._replace(tile=tile)
    params = {"forms": 8 * [jnp.zeros((DIM, DIM))], "weights": 8 * [jnp.zeros((1, 1))]}
    users: Any = {"squared distance": (distance, None)}
    users["bilinear network"] = (bilinear_network, params)
    for name, (function, params) in users.items():
        options: Any = {"params": params, "dtype": jnp.float32}
        yield ours(f"a user's {name}, T 2,048", "v5e", function, 2048, 128, 128, **options)


def distance(query: jax.Array, key: jax.Array) -> jax.Array:
    """A user's score: the negative squared distance, written as a sum over the features."""
    return -jnp.sum((query[:, None, :] - key[None, :, :]) ** 2, axis=-1)


def bilinear_network(params: Any, query: jax.Array, key: jax.Array) -> jax.Array:
    """A user's score: tanh of eight bilinear forms, and their weighted sum."""
    logits = jnp.zeros((query.shape[0], key.shape[0]))
    for form, weight in zip(params["forms"], params["weights"], strict=True):
        logits += weight * jnp.tanh(jnp.matmul(jnp.matmul(query, form), key.T))
    return logits


def attention(
    target: str,
    score: Any,
    length: int,
    blocks: tuple[int, ...] = (),
    dtype: Any = jnp.bfloat16,
    params: Any = None,
    *,
    batch: tuple[int, ...] = (),
    dim: int = DIM,
    implementation: str = "mosaic_tpu",
    **options: Any,
) -> Made:
    """Our attention, forward and backward."""
    array = functools.partial(targets.array, device=targets.device(target))
    score = aj.get_score(score)
    if params is None:
        params = jax.eval_shape(lambda: score.init(jax.random.key(0), dim, dim))
    params = jax.tree.map(lambda leaf: array(leaf.shape, jnp.float32), params)
    options |= {"score": score, "implementation": implementation}
    options["block_sizes"] = aj.BlockSizes(*blocks) if blocks else None

    def attend(inputs: Any) -> jax.Array:
        params, query, key, value = inputs
        return aj.attention(query, key, value, params=params, **options)

    token = array((*batch, length, dim), dtype)
    inputs = params, token, token, token
    return derivative(GRAD, attend), (inputs, token, inputs)


def splash(target: str, length: int, fused: bool) -> Made:
    """JAX's splash attention, forward and backward, in bfloat16.

    Its backward pass is two kernels, or with `fused` one that writes the queries' gradients of each
    tile of keys to memory, [S / tile, T, D], for a sum after it.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"]
    sizes: Any = {f"block_{name}": TILE for name in names}
    if fused:
        sizes |= {"block_q_dq": None, "block_kv_dq": None, "use_fused_bwd_kernel": True}
    mask = masks.MultiHeadMask([masks.FullMask((length, length))])
    attend = kernel.make_splash_mha(
        mask=mask, block_sizes=kernel.BlockSizes(**sizes), head_shards=1, q_seq_shards=1
    )
    token = targets.array((1, length, DIM), jnp.bfloat16, targets.device(target))
    inputs = token, token, token
    return derivative(GRAD, lambda inputs: attend(*inputs)), (inputs, token, inputs)
