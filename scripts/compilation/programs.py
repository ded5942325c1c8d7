"""The programs of the report. To add a program, write a function that makes it and list it here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import attention_jax as aj
from compilation import targets
from compilation.tables import FUSED, TILES

DIM = 128
BLOCKS = 512, 512  # queries and keys of a tile, for our kernels and their peers


@dataclasses.dataclass(frozen=True)
class Program:
    """A program for one target.

    Attributes:
        name: what it computes, and of which sizes.
        target: the device that it is compiled for.
        kernels: the names of the kernels whose bundles are counted.
        make: target -> (function, arguments).
    """

    name: str
    target: str
    kernels: tuple[str, ...]
    make: Callable[[str], tuple[Callable[..., Any], tuple[Any, ...]]]


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
    dtype: Any,
    blocks: tuple[int, int] | None,
    params: Any = None,
    implementation: str = "mosaic_tpu",
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Our attention, forward and backward."""
    device = targets.devices(target)[0]
    score = aj.get_score(score)
    if params is None:
        params = jax.eval_shape(lambda: score.init(jax.random.key(0), DIM, DIM))
    params = jax.tree.map(lambda leaf: targets.array(leaf.shape, jnp.float32, device), params)
    tokens = targets.array((length, DIM), dtype, device)

    def forward_and_backward(params, query, key, value, doutput):
        def attend(params, query, key, value):
            return aj.attention(
                query,
                key,
                value,
                score=score,
                params=params,
                implementation=implementation,
                block_sizes=None if blocks is None else aj.BlockSizes(*blocks),
            )

        output, pull_back = jax.vjp(attend, params, query, key, value)
        return output, pull_back(doutput)

    return forward_and_backward, (params, tokens, tokens, tokens, tokens)


def splash(target: str, length: int, fused: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """JAX's splash attention, forward and backward, in bfloat16.

    Its backward pass is two kernels, or with `fused` one that writes the queries' gradients of each
    tile of keys to memory, [S / tile, T, D], for a sum after it.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    device = targets.devices(target)[0]
    t, s = BLOCKS
    sizes = kernel.BlockSizes(
        block_q=t,
        block_kv=s,
        block_kv_compute=s,
        block_q_dkv=t,
        block_kv_dkv=s,
        block_kv_dkv_compute=s,
        block_q_dq=None if fused else t,
        block_kv_dq=None if fused else s,
        use_fused_bwd_kernel=fused,
    )
    mask = masks.MultiHeadMask([masks.FullMask((length, length))])
    attend = kernel.make_splash_mha(mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    tokens = targets.array((1, length, DIM), jnp.bfloat16, device)

    def forward_and_backward(query, key, value, doutput):
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, pull_back(doutput)

    return forward_and_backward, (tokens,) * 4


def programs() -> list[Program]:
    """All programs of the report."""
    ours = ("attention_forward", "attention_backward")
    peer = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")
    of = functools.partial
    listed = []
    for target in targets.TARGETS:
        make = of(attention, score="scaled", length=4096, dtype=jnp.bfloat16, blocks=BLOCKS)
        listed.append(Program("scaled dot, T 4,096", target, ours, make))
        for name, fused in (("splash attention", False), (FUSED, True)):
            make = of(splash, length=4096, fused=fused)
            listed.append(Program(f"{name}, T 4,096", target, peer, make))
        additive = aj.Additive(hidden_dim=DIM)
        make = of(attention, score=additive, length=4096, dtype=jnp.bfloat16, blocks=(256, 512))
        listed.append(Program("additive, T 4,096", target, ours, make))
        make = of(make, blocks=None, implementation="tiled")
        listed.append(Program(TILES, target, (), make))
    for name, score in (("scaled dot", "scaled"), ("additive", aj.Additive(hidden_dim=DIM))):
        make = of(attention, score=score, length=16384, dtype=jnp.bfloat16, blocks=(256, 512))
        listed.append(Program(f"{name}, T 16,384", "v5e", (), make))
    small = {"length": 2048, "dtype": jnp.float32, "blocks": (128, 128)}
    make = of(attention, score=distance, **small)
    listed.append(Program("a user's squared distance, T 2,048", "v5e", ours, make))
    params = {"forms": 8 * [jnp.zeros((DIM, DIM))], "weights": 8 * [jnp.zeros((1, 1))]}
    make = of(attention, score=bilinear_network, params=params, **small)
    listed.append(Program("a user's bilinear network, T 2,048", "v5e", ours, make))
    return listed


TILE_SIZES = ((128, 128), (256, 256), (256, 512), (512, 512), (512, 1024), (1024, 1024))


def tile_programs() -> list[tuple[str, tuple[int, int], Program]]:
    """(score, tile, program) for a v5e: by them the default sizes of tiles were chosen."""
    listed = []
    for tile in TILE_SIZES:
        for name, score in (("scaled dot", "scaled"), ("additive", aj.Additive(hidden_dim=DIM))):
            make = functools.partial(
                attention, score=score, length=4096, dtype=jnp.bfloat16, blocks=tile
            )
            program = f"{name}, tiles of {tile[0]} x {tile[1]}"
            kernels = ("attention_forward", "attention_backward")
            listed.append((name, tile, Program(program, "v5e", kernels, make)))
    return listed
