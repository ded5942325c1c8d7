"""The works of the benchmarks of attention: what is computed, and the peers that compute it too.

works.json has them by table, one a line. The sizes of `small-*` are those of the reversal model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import BlockSizes, attention
from attention_jax.normalizers import get_normalizer
from attention_jax.positions import masks
from attention_jax.scores import Additive, Score, get_score
from benchmarks.measure import FORWARD

Tree = dict[str, Any]
OWN = "own distance"  # a user's own score; the library's "distance" is computed by products


@dataclasses.dataclass(frozen=True)
class Distance(Score):
    """-|q - k|^2 as a user might write it: plain jnp, all pairs at once, no gradient by hand."""

    def pair(self, params, q_features, k_features):
        return -jnp.sum((q_features[:, None, :] - k_features[None, :, :]) ** 2, -1)


@dataclasses.dataclass(frozen=True)
class Work:
    """A computation to measure.

    Attributes:
        name: the name that --works selects it by.
        score: a score's name, or `OWN`.
        length: T, and S unless `key_length` is given.
        direction: the derivatives by query, key, value and all parameters; see
            `measure.derivative`.
        batch: B.
        num_heads: N.
        dim: D of query, key and value.
        hidden_dim: A of the additive score.
        key_length: S, if it differs from T.
        num_key_heads: K, if it differs from N.
        mask: "" for no mask, "causal", or "local 256" for a window of 256 to either side.
        normalizer: the normaliser's name.
        dtype: the dtype of all arrays.
        implementation: our implementation; None for the one that `attention` chooses.
        tile: the number of queries, and of keys, of our tiles.
        peers: names in `peers.PEERS`.
    """

    name: str
    score: str
    length: int
    direction: str = FORWARD
    batch: int = 1
    num_heads: int = 1
    dim: int = 64
    hidden_dim: int | None = None
    key_length: int | None = None
    num_key_heads: int | None = None
    mask: str = ""
    normalizer: str = "softmax"
    dtype: str = "float32"
    implementation: str | None = None
    tile: int | None = None
    peers: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.length, self.key_length or self.length

    def but(self, **changes: Any) -> Work:
        """The same work with other attributes."""
        return dataclasses.replace(self, **changes)

    def described(self) -> dict[str, Any]:
        """The entries of a row that describe the work."""
        target, source = self.lengths
        lengths = f"T=S={target}" if target == source else f"T{target} S{source}"
        hidden = f" A{self.hidden_dim}" if self.hidden_dim else ""
        shape = f"B{self.batch} N{self.num_heads} {lengths} D{self.dim}{hidden}"
        unusual = [self.mask] * bool(self.mask) + [self.dtype] * (self.dtype != "float32")
        what = ", ".join([self.direction, shape, *unusual])
        names = ("score", "normalizer", "direction", "dtype")
        return {"work": self.name, "what": what} | {name: getattr(self, name) for name in names}

    def shrunk(self, factor: int) -> Work:
        """The same work with lengths divided by `factor`, but at least 8."""
        return self.but(length=min(self.length, max(8, self.length // factor)))

    def score_object(self) -> Score:
        if self.score == OWN:
            return Distance()
        return Additive(self.hidden_dim) if self.score == "additive" else get_score(self.score)

    @property
    def window(self) -> int | None:
        """The radius of a local mask."""
        return int(self.mask.removeprefix("local ")) if self.mask.startswith("local ") else None

    def mask_object(self) -> masks.Mask | None:
        if self.window is not None:
            return masks.local_mask(self.window, self.window)
        return masks.causal_mask() if self.mask == "causal" else None

    def mask_table(self) -> Any:
        """The mask, bool [T, S]; None without one."""
        mask = self.mask_object()
        return None if mask is None else mask.materialize(*self.lengths)

    def arrays(self, *, heads_last: bool = False) -> tuple[Tree, jax.Array]:
        """Inputs [B, N, length, D] and parameters, and a cotangent of the output, of fixed seeds.

        With `heads_last` tokens are [B, length, N, D].
        """
        target, source = self.lengths
        queries = self.num_heads, target
        keys = self.num_key_heads or self.num_heads, source
        tokens = (
            _normal(seed, (self.batch, *shape, self.dim), self.dtype, heads_last)
            for seed, shape in enumerate((queries, keys, keys, queries))
        )
        query, key, value, cotangent = tokens
        params = self.score_object().init(jax.random.key(0), self.dim, self.dim)
        others = {
            "params": jax.tree.map(lambda leaf: leaf.astype(self.dtype), params),
            "normalizer_params": get_normalizer(self.normalizer).init(jax.random.key(0)),
        }
        return {"query": query, "key": key, "value": value, **others}, cotangent

    def attend(self, inputs: Tree) -> jax.Array:
        """Our attention."""
        return attention(
            **inputs,
            score=self.score_object(),
            mask=self.mask_object(),
            normalizer=self.normalizer,
            implementation=self.implementation,
            block_sizes=BlockSizes(self.tile, self.tile) if self.tile else None,
        )


@functools.cache  # contestants share them
def _normal(seed: int, shape: tuple[int, ...], dtype: str, heads_last: bool) -> jax.Array:
    numbers = jax.random.normal(jax.random.key(seed), shape, dtype)
    return numbers.swapaxes(1, 2) if heads_last else numbers


def _read(entries: Tree) -> Work:
    return Work(**entries | {"peers": tuple(entries.get("peers", ()))})


WORKS: dict[str, list[Work]] = {
    table: [_read(entries) for entries in works]
    for table, works in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
