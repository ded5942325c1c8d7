"""What a score is: `Score`, to be subclassed."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, ClassVar, Literal

import jax

from attention_jax.core.partial_jvp import partial_jvp

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn
PairCost = Literal["additive", "dot", "other"]


@dataclasses.dataclass(frozen=True)
class Score:
    """A score function: subclass it, as a frozen dataclass, and define `pair`; the rest is there.

    Shapes below are for one example: T queries of size Dq, S keys of size Dk.

    Three things a subclass may say about itself, as class variables or, where they depend on its
    fields, as properties:

    needs_equal_dims: whether Dq must equal Dk, which is then checked before anything runs.
    pair_cost: what `pair` costs. It decides from which size on attention works in tiles, and in
        how large ones: speed only, never a result. "dot": one matrix product of the features (and
        little for each logit besides); "additive": one tanh for each pair and feature, no [t, s, A]
        in memory; "other": anything, a [t, s, D] in memory included. A subclass with a `pair` of
        its own is "other" until it says otherwise.
    finite_slopes: whether every derivative of `pair` is finite at finite features. If not (a
        distance where query and key are equal, an angle where they are parallel), masked pairs are
        kept out of the derivatives one by one, which takes more time. None: the program of `pair`
        is looked at.
    """

    needs_equal_dims: ClassVar[bool] = False
    pair_cost: ClassVar[PairCost] = "other"
    finite_slopes: ClassVar[bool | None] = None

    def __init_subclass__(cls) -> None:
        if "pair" in vars(cls):
            # A new `pair` under an inherited `pair_vjp` would send another function's gradient.
            if "pair_vjp" not in vars(cls):
                cls.pair_vjp = Score.pair_vjp  # type: ignore[method-assign]
            if "pair_jvp" not in vars(cls):
                cls.pair_jvp = Score.pair_jvp  # type: ignore[method-assign]
            if "pair_cost" not in vars(cls):
                cls.pair_cost = "other"
            if "finite_slopes" not in vars(cls):
                cls.finite_slopes = None
        said, known = vars(cls).get("pair_cost"), typing.get_args(PairCost)
        if isinstance(said, str) and said not in known:
            raise ValueError(
                f"pair_cost of {cls.__name__} must be one of {', '.join(known)}; got {said!r}"
            )

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        """Fresh parameters; for unit-variance queries and keys, logits of standard deviation 1."""
        del rng, query_dim, key_dim
        return {}

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        """What `pair` needs of each token: ([T, Dq], [S, Dk]) -> ([T, Fq], [S, Fk])."""
        del params
        return query, key

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        """Logits of every pair of a tile: ([t, Fq], [s, Fk]) -> [t, s]."""
        raise NotImplementedError(f"{type(self).__name__} must define pair(params, q, k)")

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        """Pulls `dlogits` [t, s] back through `pair`: (dparams, dq_features, dk_features).

        A score overrides it for speed only, never for meaning: derivatives of higher order are
        taken of `pair`.
        """
        logits, pull_back = jax.vjp(self.pair, params, q_features, k_features)
        return pull_back(dlogits.astype(logits.dtype))

    def pair_jvp(
        self,
        params: Params,
        q_features: Array,
        k_features: Array,
        dparams: Params,
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
        return self.pair(params, *self.project(params, query, key))

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        """What `params` must look like: a pytree of `jax.ShapeDtypeStruct`."""
        del params
        return init_shapes(self, query_dim, key_dim)


@functools.lru_cache(maxsize=256)
def init_shapes(score: Score, query_dim: int, key_dim: int) -> Params:
    return jax.eval_shape(lambda rng: score.init(rng, query_dim, key_dim), jax.random.key(0))
