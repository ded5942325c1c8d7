"""How fast? The library beside its peers: ceilings, scaled dot, additive, other scores, tiles."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import BlockSizes, attention, causal_mask
from attention_jax.kernels import IMPLEMENTATIONS
from device_checks.programs import Function, Race, measure
from device_checks.record import Record
from device_checks.right import manhattan

Array = jax.Array

FORWARD, GRAD = "forward", "forward + backward"
HEADLINE = "additive, B8 T2048 A128"
# B, N query heads, K heads of keys, T = S, head size.
_SCALED = (
    (8, 16, 16, 2048, 64),
    (8, 16, 16, 2048, 128),
    (8, 16, 4, 2048, 128),
    (4, 16, 16, 8192, 64),
    (8, 8, 8, 2048, 256),
)
_ADDITIVE = ((8, 2048, 128), (8, 2048, 64), (1, 8192, 128), (1, 8192, 64))  # B, T = S, A
_LONGEST_OF_XLA = 2048  # of jax.nn without cuDNN, which materialises the logits


def ceilings(record: Record) -> None:
    """The rate of a large matrix product, and the bandwidth of a copy."""
    size, pages = 8192 // record.shrink, max(1, 256 // record.shrink)
    product = Race(
        "product of matrices", [(size, size)] * 2, {"bfloat16": jnp.matmul}, flop=2 * size**3
    )
    bytes_moved = 2 * 4 * pages * 2**20
    copy = Race(
        "copy", [(pages, 2**20)], {"float32": lambda x: x + 1}, gigabytes=bytes_moved / 1e9,
        dtype="float32",
    )  # fmt: skip
    measure(record, "machine", [product, copy])


def scaled(record: Record) -> None:
    """Multi-head attention as a model calls it: all arrays are [B, T, N, H]."""
    measure(record, "scaled", [*_scaled_races(record.shrink)])


def _scaled_races(shrink: int) -> Iterator[Race]:
    for (b, n, k, t, h), causal, direction in itertools.product(
        _SCALED, (True, False), (FORWARD, GRAD)
    ):
        name = f"scaled, B{b} N{n} K{k} T{t} H{h}, {'causal, ' * causal}{direction}"
        if shrink > 1:
            b, n, k, t = 1, 4, 4 * k // n, t // shrink
        backward = direction == GRAD
        ours = {"ours": None, "ours, cudnn": "cudnn"}
        on_gpu = jax.default_backend() == "gpu"
        theirs = ["cudnn"] * on_gpu + ["xla"] * (t <= _LONGEST_OF_XLA)
        yield Race(
            name,
            [(b, t, n, h), (b, t, k, h), (b, t, k, h)],
            {
                **{x: functools.partial(multi_head, causal, i) for x, i in ours.items()},
                **{f"jax.nn, {x}": functools.partial(_jax_nn, causal, x) for x in theirs},
            },
            {"PyTorch": "causal_sdpa" if causal else "sdpa"},
            backward=backward,
            flop=4 * b * n * t * t * h * (3.5 if backward else 1) / (2 if causal else 1),
        )


def multi_head(
    causal: bool, implementation: str | None, query: Array, key: Array, value: Array
) -> Array:
    """Attention of query [B, T, N, H] and key and value [B, S, K, H] by this library."""
    groups = query.shape[2] // key.shape[2]
    grouped = query.reshape(*query.shape[:2], key.shape[2], groups, query.shape[3])
    tokens = [jnp.moveaxis(x, 1, 3) for x in (grouped, key[:, :, :, None], value[:, :, :, None])]
    mask = causal_mask() if causal else None
    output = attention(*tokens, mask=mask, implementation=implementation)
    return jnp.moveaxis(output, 3, 1).reshape(query.shape)


def _jax_nn(causal: bool, library: Any, query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=library)


def additive(record: Record) -> None:
    """Additive attention, -|q - k|^2, and a user's -|q - k|, in bfloat16."""
    measure(record, "additive", [*_additive_races(record.shrink), *_other_races(record.shrink)])


def _additive_races(shrink: int) -> Iterator[Race]:
    for (b, t, a), direction in itertools.product(_ADDITIVE, (FORWARD, GRAD)):
        name = f"additive, B{b} T{t} A{a}, {direction}"
        tokens = [(b if shrink == 1 else 1, t // shrink, 128)] * 3
        implementations = {f"ours, {x}": x for x in IMPLEMENTATIONS}
        contestants = {
            x: functools.partial(_additive, implementation)
            for x, implementation in {"ours": None, **implementations}.items()
        }
        yield Race(
            name, [*tokens, (128, a), (128, a), (a,)], contestants, {"PyTorch": "additive"},
            backward=direction == GRAD,
        )  # fmt: skip


def _additive(
    implementation: str | None, query: Array, key: Array, value: Array, *kernels: Array
) -> Array:
    params = dict(zip(("query_kernel", "key_kernel", "v"), kernels, strict=True))
    options: Any = {"score": "additive", "params": params, "implementation": implementation}
    return attention(query / 8, key / 8, value, **options)


def _other_races(shrink: int) -> Iterator[Race]:
    for score, direction in itertools.product(("l2", "user"), (FORWARD, GRAD)):
        function: Any = manhattan if score == "user" else score
        contestants = {
            x: functools.partial(attention, score=function, implementation=implementation)
            for x, implementation in {"ours": None, "ours, tiled": "tiled"}.items()
        }
        yield Race(
            f"{score}, B8 T2048 D64, {direction}", [(8, 2048 // shrink, 64)] * 3, contestants,
            {"PyTorch": f"flex_{score}"}, backward=direction == GRAD,
        )  # fmt: skip


def tiles(record: Record) -> None:
    """Sizes of tiles, and one query for many keys, which is a step of decoding."""
    measure(record, "tiles", [*_tile_races(record.shrink)])


def _tile_races(shrink: int) -> Iterator[Race]:
    small, length = shrink > 1, 4096 // shrink
    sizes = (16, 64) if small else (512, 1024, 256, 2048, 128, 64)
    implementations = {"ours": None, "reference": "reference", "tiled": "tiled"}
    yield Race(
        "scaled, B16 T1 S65536 D64, forward",
        [(16, 1, 64), *[(16, 65536 // shrink, 64)] * 2],
        {x: functools.partial(attention, implementation=i) for x, i in implementations.items()},
    )
    of_score: dict[str, Any] = {"scaled": "scaled", "additive": "additive", "user": manhattan}
    for (name, score), direction in itertools.product(of_score.items(), (GRAD, FORWARD)):
        batch = 16 if name == "scaled" and not small else 1
        kernels = [(64, 64), (64, 64), (64,)] if name == "additive" else []
        contestants: dict[str, Function] = {
            f"tiles of {size}": functools.partial(_tiled, score, size) for size in sizes
        }
        yield Race(
            f"{name}, B{batch} T4096 D64, {direction}", [*[(batch, length, 64)] * 3, *kernels],
            contestants, backward=direction == GRAD,
        )  # fmt: skip


def _tiled(score: Any, size: int, query: Array, key: Array, value: Array, *kernels: Array) -> Array:
    names = ("query_kernel", "key_kernel", "v")
    params = dict(zip(names, kernels, strict=True)) if kernels else None
    options: Any = {"score": score, "params": params, "implementation": "tiled"}
    return attention(query / 8, key, value, block_sizes=BlockSizes(size, size), **options)
