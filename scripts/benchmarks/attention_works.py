"""The works of the attention benchmark: what is computed, and the peers that compute it too."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.pairwise import masks
from attention_jax.scores import SCORES, Additive, Score
from benchmarks.measure import FOUR_SCORES

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
        score: a key of `SCORES`, or `OWN`.
        length: T, and S unless `key_length` is given.
        backward: also compute the gradients of query, key, value and the score's parameters.
        jvp: also compute the output's tangent, for tangents of all of these.
        batch: B.
        num_heads: N.
        dim: D of query, key and value.
        hidden_dim: A of the additive score.
        key_length: S, if it differs from T.
        mask: "" for no mask, "causal", or "local 256" for a window of 256 to either side.
        dtype: the dtype of all arrays.
        implementation: our implementation; None for the one that `attention` chooses.
        peers: names in `attention_peers.PEERS`.
        times_repeats: multiplies the number of repeats, where differences are small.
    """

    name: str
    score: str
    length: int
    backward: bool = False
    jvp: bool = False
    batch: int = 1
    num_heads: int = 1
    dim: int = 64
    hidden_dim: int | None = None
    key_length: int | None = None
    mask: str = ""
    dtype: str = "float32"
    implementation: str | None = None
    peers: tuple[str, ...] = ()
    times_repeats: int = 1

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.length, self.key_length or self.length

    @property
    def direction(self) -> str:
        """Which derivatives are computed."""
        if self.jvp:
            return "jvp"
        return "forward + backward" if self.backward else "forward"

    def described(self) -> dict[str, Any]:
        """The entries of a row that describe the work."""
        target, source = self.lengths
        lengths = f"T=S={target}" if target == source else f"T{target} S{source}"
        shape = f"B{self.batch} N{self.num_heads} {lengths} D{self.dim}"
        return {
            "work": self.name,
            "score": self.score,
            "direction": self.direction,
            "shape": shape + (f" A{self.hidden_dim}" if self.hidden_dim else ""),
            "mask": self.mask or "none",
            "dtype": self.dtype,
        }

    def shrunk(self, factor: int) -> Work:
        """The same work with lengths divided by `factor`, but at least 8."""
        key_length = self.key_length and min(self.key_length, max(8, self.key_length // factor))
        length = min(self.length, max(8, self.length // factor))
        return dataclasses.replace(self, length=length, key_length=key_length)

    def score_object(self) -> Score:
        if self.score == OWN:
            return Distance()
        return Additive(self.hidden_dim) if self.score == "additive" else SCORES[self.score]

    @property
    def window(self) -> int | None:
        """The radius of a local mask."""
        return int(self.mask.removeprefix("local ")) if self.mask.startswith("local ") else None

    def mask_object(self) -> masks.Mask | None:
        if self.window is not None:
            return masks.local_mask(self.window, self.window)
        return masks.causal_mask() if self.mask == "causal" else None

    def arrays(self) -> tuple[Tree, np.ndarray]:
        """Inputs [B, N, length, D] and params, and a cotangent of the output, from a fixed seed.

        All are NumPy arrays in float32; a contestant converts them.
        """
        rng = np.random.default_rng(0)
        target, source = self.lengths

        def normal(length: int) -> np.ndarray:
            shape = self.batch, self.num_heads, length, self.dim
            return rng.standard_normal(shape, dtype=np.float32)

        params = self.score_object().init(jax.random.key(0), self.dim, self.dim)
        inputs = {
            "query": normal(target),
            "key": normal(source),
            "value": normal(source),
            "params": jax.tree.map(np.asarray, params),
        }
        return inputs, normal(target)


_DOT_PEERS = ("naive JAX", "jax.nn", "flax", "PyTorch SDPA")
_ADDITIVE_PEERS = ("naive JAX", "Keras", "PyTorch naive", "KeOps")


def _both_directions(work: Work) -> tuple[Work, Work]:
    return work, dataclasses.replace(work, name=f"{work.name}-grad", backward=True)


def _on_any_device() -> list[Work]:
    scaled = Work("scaled", "scaled", 4096, num_heads=4, peers=_DOT_PEERS)
    causal = dataclasses.replace(
        scaled, name="causal", mask="causal", peers=("ours, not causal", *_DOT_PEERS[1:])
    )
    local = Work(
        "local", "scaled", 8192, backward=True, mask="local 256", peers=("jax.nn", "PyTorch SDPA")
    )
    general = dataclasses.replace(
        scaled, name="general", score="general", peers=("ours, scaled dot", "naive JAX", "jax.nn")
    )
    bfloat16 = dataclasses.replace(
        scaled, name="bfloat16", dtype="bfloat16", peers=("jax.nn", "PyTorch SDPA")
    )
    additive = Work("additive", "additive", 1024, dim=128, hidden_dim=128, peers=_ADDITIVE_PEERS)
    small = Work(  # the sizes of the reversal model
        "small",
        score="",
        length=9,
        backward=True,
        batch=64,
        key_length=8,
        peers=("ours, reference",),
        times_repeats=3,
    )
    local_16k = dataclasses.replace(
        local, name="local-16k", length=16384, peers=("ours, half as long", "jax.nn")
    )
    return [
        *_both_directions(scaled),
        *_both_directions(causal),
        local,
        local_16k,
        *_both_directions(additive),
        *_both_directions(general),
        dataclasses.replace(scaled, name="scaled-jvp", jvp=True, peers=("ours, forward",)),
        Work("additive-jvp", "additive", 4096, hidden_dim=64, jvp=True, peers=("ours, forward",)),
        Work("own-distance", OWN, 4096, backward=True, peers=("ours, reference", "KeOps")),
        *(
            dataclasses.replace(
                small,
                name=f"small-{score}",
                score=score,
                hidden_dim=64 if score == "additive" else None,
            )
            for score in FOUR_SCORES
        ),
        *_both_directions(bfloat16),
    ]


# Backend -> dtype -> the peers of scaled dot; and backend -> those of additive.
_SCALED_PEERS = {
    "gpu": {"float32": ("jax.nn",), "bfloat16": ("jax.nn", "cuDNN", "tokamax")},
    "tpu": {"float32": ("jax.nn", "splash"), "bfloat16": ("jax.nn", "splash", "tokamax")},
}
_ADDITIVE_PEERS_ON = {"gpu": ("naive JAX", "ours, mosaic_gpu"), "tpu": ("naive JAX",)}


def _on_an_accelerator(backend: str) -> list[Work]:
    works: list[Work] = []
    for thousands in (1, 2, 4, 8, 16):
        for dtype, peers in _SCALED_PEERS[backend].items():
            for score, peers_of_score in (
                ("scaled", peers),
                ("additive", _ADDITIVE_PEERS_ON[backend]),
            ):
                work = Work(
                    f"{backend}-{score}-{dtype}-{thousands}k",
                    score,
                    1024 * thousands,
                    num_heads=8,
                    dim=128,
                    hidden_dim=64 if score == "additive" else None,
                    dtype=dtype,
                    peers=peers_of_score,
                )
                works += _both_directions(work)
    return works


def all_works() -> dict[str, Work]:
    """All works for this machine's device, by name."""
    backend = jax.default_backend()
    works = _on_any_device() + (_on_an_accelerator(backend) if backend in _SCALED_PEERS else [])
    return {work.name: work for work in works}


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match any of the patterns, such as "additive*"; all names without patterns."""
    return [
        name
        for name in names
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
