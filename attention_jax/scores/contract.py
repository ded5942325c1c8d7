"""What a score is: `Score`, to be subclassed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax

from attention_jax.core.partial_jvp import partial_jvp

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn
Features = Any  # what `pair` reads of tokens: an array [t, F], or a pytree of such arrays
TileCost = Literal["matmul", "elementwise", "materialized"]


@dataclasses.dataclass(frozen=True)
class Score:
    """A score function: subclass it, as a frozen dataclass, and define `pair`; the rest is there.

    Shapes below are for one example: T queries of size Dq, S keys of size Dk.

    A subclass may state three things, as class variables or, where they depend on its fields, as
    properties:

    needs_equal_dims: whether Dq must equal Dk. If so, the sizes are checked before anything runs.
    tile_cost: what `pair` costs on a tile of t queries and s keys. It decides from which size on
        attention works in tiles, and how large the tiles are; it changes speed and memory, never a
        result. "matmul": one matrix product of the features, and little else per logit.
        "elementwise": elementary functions per pair and feature, without an array [t, s, F] in
        memory. "materialized", the default: anything, an array [t, s, F] in memory included.
    finite_slopes: whether every derivative of `pair` is finite at finite features. If not (a
        distance where query and key are equal, an angle where they are parallel), masked pairs are
        kept out of the derivatives one by one, which takes more time. None: the program of `pair`
        decides.
    """

    needs_equal_dims: ClassVar[bool] = False
    tile_cost: ClassVar[TileCost] = "materialized"
    finite_slopes: ClassVar[bool | None] = None

    def __init_subclass__(cls) -> None:
        # What a base class states about the derivatives of its `pair` does not hold for another.
        if "pair" in vars(cls):
            for name in ("pair_vjp", "pair_jvp", "finite_slopes"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Score)[name])

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        """Fresh parameters; for unit-variance queries and keys, logits of standard deviation 1."""
        del rng, query_dim, key_dim
        return {}

    def project_query(self, params: Params, query: Array) -> Features:
        """What `pair` reads of each query token: [T, Dq] -> [T, Fq], or a pytree of such arrays."""
        del params
        return query

    def project_key(self, params: Params, key: Array) -> Features:
        """What `pair` reads of each key token: [S, Dk] -> [S, Fk], or a pytree of such arrays."""
        del params
        return key

    def pair(self, params: Params, q_features: Features, k_features: Features) -> Array:
        """Logits of every pair of a tile: ([t, Fq], [s, Fk]) -> [t, s]."""
        raise NotImplementedError(f"{type(self).__name__} must define pair(params, q, k)")

    def pair_vjp(
        self, params: Params, q_features: Features, k_features: Features, dlogits: Array
    ) -> tuple[Params, Features, Features]:
        """Pulls `dlogits` [t, s] back through `pair`: (dparams, dq_features, dk_features).

        A score overrides it for speed only, never for meaning: derivatives of higher order are
        taken of `pair`.
        """
        logits, pull_back = jax.vjp(self.pair, params, q_features, k_features)
        return pull_back(dlogits.astype(logits.dtype))

    def pair_jvp(
        self,
        params: Params,
        q_features: Features,
        k_features: Features,
        dparams: Any,
        dq_features: Any,
        dk_features: Any,
    ) -> tuple[Array, Array | None]:
        """Logits [t, s] of `pair` and their tangent, for speed only, as `pair_vjp`.

        A tangent has None in place of each array that does not move; the result's is None if no
        array moves.
        """
        primals = (params, q_features, k_features)
        return partial_jvp(self.pair, primals, (dparams, dq_features, dk_features))

    def __call__(self, params: Params, query: Array, key: Array) -> Array:
        """Logits [T, S] of queries [T, Dq] and keys [S, Dk]."""
        q_features = self.project_query(params, query)
        return self.pair(params, q_features, self.project_key(params, key))

    def with_scale(self, params: Params, scale: Any) -> tuple[Score, Params]:
        """The score with `scale` in place of its default factor, and the parameters it then takes.

        Raises:
            ValueError: the score has no default factor, or its factor has been chosen already.
        """
        raise ValueError(
            "scale must be None, or one number where score is 'scaled' without a scale of its own;"
            f" got {scale!r} with score {self}"
        )

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        """What `params` must look like: a pytree of `jax.ShapeDtypeStruct`."""
        del params
        return init_shapes(self, query_dim, key_dim)


@functools.lru_cache(maxsize=256)
def init_shapes(score: Score, query_dim: int, key_dim: int) -> Params:
    return jax.eval_shape(lambda rng: score.init(rng, query_dim, key_dim), jax.random.key(0))
