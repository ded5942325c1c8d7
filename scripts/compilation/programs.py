"""The programs for TPUs. To add a program, add it to `programs`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import attention_jax as aj
from compilation import targets

DIM = 128
ADDITIVE = aj.Additive(hidden_dim=DIM)
TILE = 512  # queries and keys of a tile, for our kernel of scaled dot and its peers
TILE_SIZES = ((128, 128), (256, 256), (256, 512), (512, 512), (512, 1024), (1024, 1024))
KERNELS = ("attention_forward", "attention_backward")
PEERS = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")


class Program(NamedTuple):
    """A program for one target."""

    name: str  # what it computes, and of which sizes
    target: str  # the device that it is compiled for
    kernels: tuple[str, ...]  # the names of the kernels whose bundles are counted
    make: Callable[[str], tuple[Callable[..., Any], tuple[Any, ...]]]  # (function, arguments)
    tile: tuple[int, int] | None = None  # of a program that compares sizes of tiles


def programs() -> Iterator[Program]:
    """All programs of the report; those with a tile compare sizes of tiles."""
    ours = functools.partial(functools.partial, attention)
    for target in targets.TARGETS:
        make = ours(score="scaled", length=4096, blocks=(TILE, TILE))
        yield Program("scaled dot, T 4,096", target, KERNELS, make)
        for name in ("splash attention", "splash attention with its fused backward"):
            peer = functools.partial(splash, length=4096, fused="fused" in name)
            yield Program(f"{name}, T 4,096", target, PEERS, peer)
        make = ours(score=ADDITIVE, length=4096, blocks=(256, 512))
        yield Program("additive, T 4,096", target, KERNELS, make)
    for name, score in (("scaled dot", aj.get_score("scaled")), ("additive", ADDITIVE)):
        make = ours(score=score, length=16384, blocks=(256, 512))
        yield Program(f"{name}, T 16,384", "v5e", (), make)
        for tile in TILE_SIZES:
            yield Program(name, "v5e", KERNELS, ours(score=score, length=4096, blocks=tile), tile)
    small = {"length": 2048, "dtype": jnp.float32, "blocks": (128, 128)}
    make = ours(score=distance, **small)
    yield Program("a user's squared distance, T 2,048", "v5e", KERNELS, make)
    params = {"forms": 8 * [jnp.zeros((DIM, DIM))], "weights": 8 * [jnp.zeros((1, 1))]}
    make = ours(score=bilinear_network, params=params, **small)
    yield Program("a user's bilinear network, T 2,048", "v5e", KERNELS, make)


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
    target: str, score: Any, length: int, blocks: Any, dtype: Any = jnp.bfloat16, params: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Our attention, forward and backward."""
    array = functools.partial(targets.array, device=targets.device(target))
    score = aj.get_score(score)
    if params is None:
        params = jax.eval_shape(lambda: score.init(jax.random.key(0), DIM, DIM))
    params = jax.tree.map(lambda leaf: array(leaf.shape, jnp.float32), params)
    attend = functools.partial(
        aj.attention, score=score, implementation="mosaic_tpu", block_sizes=aj.BlockSizes(*blocks)
    )

    def forward_and_backward(params, query, key, value, doutput):
        def attend_with(params, *tokens):
            return attend(*tokens, params=params)

        output, pull_back = jax.vjp(attend_with, params, query, key, value)
        return output, pull_back(doutput)

    return forward_and_backward, (params, *4 * [array((length, DIM), dtype)])


def splash(target: str, length: int, fused: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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

    def forward_and_backward(query, key, value, doutput):
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, pull_back(doutput)

    tokens = targets.array((1, length, DIM), jnp.bfloat16, targets.device(target))
    return forward_and_backward, (tokens,) * 4
