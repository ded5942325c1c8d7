"""How fast? The library beside its peers: ceilings, scaled dot, additive, other scores, tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import BlockSizes, attention, causal_mask
from attention_jax.kernels import IMPLEMENTATIONS
from device_checks.programs import Function, Race, measure
from device_checks.record import Record
from device_checks.right import manhattan

Array = jax.Array
Shapes = list[tuple[int, ...]]
Contestants = Mapping[str, Function]

# B, N query heads, K heads of keys and values, T = S, head size. A rehearsal takes every second.
_SCALED = (
    *((8, 16, 16, 2048, 64), (8, 16, 16, 2048, 128), (8, 16, 4, 2048, 128)),
    *((4, 16, 16, 8192, 64), (8, 8, 8, 2048, 256)),
)
_ADDITIVE = ((8, 2048, 128), (8, 2048, 64), (1, 8192, 128), (1, 8192, 64))  # B, T = S, A
_LONGEST_OF_XLA = 2048  # of jax.nn without cuDNN, which stores the logits


def check(part: str, record: Record) -> None:
    """Times the races of a part."""
    measure(record, part, RACES[part](record.shrink))


def ceilings(shrink: int) -> list[Race]:
    """The rate of a large matrix product, and the bandwidth of a copy."""
    size, shape = 8192 // shrink, (256 // shrink, 2**20)
    flop, gigabytes = 2.0 * size**3, 8e-9 * shape[0] * shape[1]
    copy = {"float32": lambda x: x + 1}
    return [
        Race("matrix product", [(size, size)] * 2, {"bfloat16": jnp.matmul}, flop=flop),
        Race("copy", [shape], copy, gigabytes=gigabytes, dtype="float32"),
    ]


def _both(
    work: str, shapes: Shapes, contestants: Contestants, peer: str = "", flop: float = 0.0
) -> list[Race]:
    """The races of the forward pass, and of the forward and the backward pass."""
    return [
        Race(f"{work}, forward", shapes, contestants, peer, flop=flop),
        Race(f"{work}, forward + backward", shapes, contestants, peer, True, 3.5 * flop),
    ]


def _ours(function: Callable[..., Array], *names: str) -> Contestants:
    """Contestants: the library with the implementation that it chooses, and with each by name."""
    named = {f"ours, {name}": functools.partial(function, implementation=name) for name in names}
    return {"ours": functools.partial(function, implementation=None), **named}


def scaled_races(shrink: int) -> list[Race]:
    """Multi-head attention as a model calls it: all arrays are [B, T, N, H]."""
    races = []
    for b, n, k, t, h in _SCALED[:: 1 if shrink == 1 else 2]:
        size = f"scaled, B{b} N{n} K{k} T{t} H{h}"
        if shrink > 1:
            b, n, k, t = 1, 4, 4 * k // n, t // shrink
        theirs = ["cudnn"] * (jax.default_backend() == "gpu") + ["xla"] * (t <= _LONGEST_OF_XLA)
        for causal in (True, False):
            attend: Any = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
            contestants: Contestants = {
                **_ours(functools.partial(multi_head, causal), "cudnn"),
                **{f"jax.nn, {x}": functools.partial(attend, implementation=x) for x in theirs},
            }
            shapes: Shapes = [(b, t, n, h), (b, t, k, h), (b, t, k, h)]
            work, peer = (f"{size}, causal", "causal_sdpa") if causal else (size, "sdpa")
            flop = 4 * b * n * t * t * h / (2 if causal else 1)
            races += _both(work, shapes, contestants, peer, flop=flop)
    return races


def multi_head(
    causal: bool, query: Array, key: Array, value: Array, implementation: str | None
) -> Array:
    """Attention of query [B, T, N, H] and key and value [B, S, K, H] by this library."""
    options: Any = {"mask": causal_mask() if causal else None, "implementation": implementation}
    if query.shape[2] == key.shape[2]:
        tokens = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
        return jnp.swapaxes(attention(*tokens, **options), 1, 2)
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    tokens = [jnp.moveaxis(x, 1, 3) for x in (grouped, key[:, :, :, None], value[:, :, :, None])]
    return jnp.moveaxis(attention(*tokens, **options), 3, 1).reshape(query.shape)


def additive_races(shrink: int) -> list[Race]:
    """Additive attention, -|q - k|^2, and a user's -|q - k|."""
    races = []
    for b, t, a in _ADDITIVE[:: 1 if shrink == 1 else 2]:
        tokens: Shapes = [(b if shrink == 1 else 1, t // shrink, 128)] * 3
        shapes = [*tokens, (128, a), (128, a), (a,)]
        contestants = _ours(functools.partial(_attend, "additive"), *IMPLEMENTATIONS)
        peer = "additive" if a == 128 else ""  # it takes many seconds to compile
        races += _both(f"additive, B{b} T{t} A{a}", shapes, contestants, peer)
    for name, score in {"l2": "l2", "user": manhattan}.items():
        contestants = _ours(functools.partial(_attend, score), "tiled")
        shapes = [(8, 2048 // shrink, 64)] * 3
        races += _both(f"{name}, B8 T2048 D64", shapes, contestants, f"flex_{name}")
    return races


def tile_races(shrink: int) -> list[Race]:
    """Sizes of tiles, and one query for many keys, which is a step of decoding."""
    sizes = (512, 1024, 256, 2048, 128, 64) if shrink == 1 else (16, 64)
    decoding = _ours(functools.partial(_attend, "scaled"), "reference", "tiled")
    shapes: Shapes = [(16, 1, 64), *[(16, 65536 // shrink, 64)] * 2]
    races = [Race("scaled, B16 T1 S65536 D64, forward", shapes, decoding)]
    scores: dict[str, Any] = {"scaled": "scaled", "additive": "additive", "user": manhattan}
    for name, score in scores.items():
        batch = 16 if name == "scaled" else 1
        shapes = [(batch if shrink == 1 else 1, 4096 // shrink, 64)] * 3
        shapes += [(64, 64), (64, 64), (64,)] if name == "additive" else []
        tiled = functools.partial(_attend, score, implementation="tiled")
        contestants = {
            f"tiles of {x}": functools.partial(tiled, block_sizes=BlockSizes(x, x)) for x in sizes
        }
        races += _both(f"{name}, B{batch} T4096 D64", shapes, contestants)
    return races


def _attend(
    score: Any, query: Array, key: Array, value: Array, *kernels: Array, **options: Any
) -> Array:
    """Attention with projections of normal numbers, which are divided by 8 to be of order 1."""
    names = ("query_kernel", "key_kernel", "v")
    params = dict(zip(names, kernels, strict=True)) if kernels else None
    return attention(query / 8, key / 8, value, score=score, params=params, **options)


RACES: dict[str, Callable[[int], list[Race]]] = {
    "machine": ceilings,
    "scaled": scaled_races,
    "additive": additive_races,
    "tiles": tile_races,
}
