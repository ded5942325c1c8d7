"""`Score`, the base class of every score function."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import with_hints
from attention_jax.core.names import is_of_library
from attention_jax.scores.origin import origin_of

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn
Features = Any  # projected tokens, which `pair` reads: an array [t, F], or a pytree of such arrays
# What `pair` costs on a tile; see `Score`.
TileCost = Literal["matmul", "elementwise", "materialized"]
Side = Literal["query", "key"]
# What a class says about its logits, and the methods about which it says that.
_DESCRIBED = {
    **dict.fromkeys(("pair_vjp", "round", "tile_params", "finite_slopes"), ("pair",)),
    "translation_invariant": ("pair", "project_query", "project_key"),
}


@dataclasses.dataclass(frozen=True)
class Score:
    """The base class of score functions: a subclass is a frozen dataclass that defines `pair`.

    Shapes below are for one example: T queries of size Dq, S keys of size Dk.

    A subclass may define four class variables, or properties where they depend on its fields.

    Class variables:
        needs_equal_dims: whether Dq must equal Dk. If True, the sizes are checked before anything
            runs.
        tile_cost: what `pair` costs on a tile of t queries and s keys. It decides from which size
            on attention works in tiles, and how large the tiles are. It changes speed and memory,
            never a result. "matmul": one matrix product of the features, and little else per logit.
            "elementwise": elementary functions per pair and feature, without an array [t, s, F] in
            memory. "materialized", the default: anything, including an array [t, s, F] in memory.
        finite_slopes: whether every derivative of `pair` is finite at finite features. If False (a
            distance where query and key are equal, an angle where they are parallel), each masked
            pair is differentiated at stand-in features, which takes more time. None, the default:
            the operations in the program of `pair` decide.
        translation_invariant: whether the logits stay the same if one vector is subtracted from all
            queries and keys, which then have the same size. If True, attention subtracts the mean
            of the keys before it projects tokens, so that a `pair` that subtracts squares loses no
            digits where all tokens share an offset. The mean is that of the keys which the mask
            leaves; `remember` therefore keeps the keys themselves, and each call projects them.

    `pair_vjp`, `round`, `tile_params` and `finite_slopes` describe a `pair`. A class that replaces
    the `pair` of a base class has the defaults of this class again, unless it defines them itself.
    So does `translation_invariant` in a class that replaces `pair` or a projection.

    >>> import jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True)
    ... class Manhattan(Score):
    ...     needs_equal_dims = True
    ...     def pair(self, params, q, k):
    ...         return -jnp.sum(jnp.abs(q[:, None, :] - k[None, :, :]), axis=-1)
    >>> Manhattan()({}, jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0], [3.0, 2.5]])).tolist()
    [[-2.0, -2.5]]
    """

    needs_equal_dims: ClassVar[bool] = False
    tile_cost: ClassVar[TileCost] = "materialized"
    finite_slopes: ClassVar[bool | None] = None
    translation_invariant: ClassVar[bool] = False
    own_params: ClassVar[Params] = {}  # the default of `params`; see `CallableScore`

    def __init_subclass__(cls) -> None:
        """Resets what base classes said about a method that the class replaces."""
        for name, methods in _DESCRIBED.items():
            first = next(base for base in cls.__mro__ if vars(base).keys() & {name, *methods})
            if name not in vars(first) and getattr(cls, name) is not getattr(Score, name):
                setattr(cls, name, getattr(Score, name))

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        """Initial parameters, {} if there are none to learn."""
        return {}

    def project_query(self, params: Params, query: Array) -> Features:
        """The query features that `pair` reads: [T, Dq] -> [T, Fq], or a pytree of such arrays."""
        return query

    def project_key(self, params: Params, key: Array) -> Features:
        """The key features that `pair` reads: [S, Dk] -> [S, Fk], or a pytree of such arrays."""
        return key

    def pair(self, params: Params, q_features: Features, k_features: Features) -> Array:
        """The logits of all pairs of a tile: ([t, Fq], [s, Fk]) -> [t, s]."""
        raise ValueError(f"score {self} must define pair(params, q_features, k_features)")

    def pair_vjp(
        self, params: Params, q_features: Features, k_features: Features, dlogits: Array
    ) -> tuple[Params, Features, Features]:
        """Pulls `dlogits` [t, s] back through `pair`: (dparams, dq_features, dk_features).

        Override it for speed only: it must equal the derivative of `pair`, from which JAX takes
        the higher derivatives.
        """
        logits, pull_back = jax.vjp(self.pair, params, q_features, k_features)
        return pull_back(dlogits.astype(logits.dtype))

    def round(self, features: Features, side: Side, dtype: Any) -> Features:
        """The features that `pair` reads when tokens are of a 16-bit `dtype`.

        `side` is "query" or "key".

        By default they stay float32. A score whose `pair` multiplies matrices rounds them to
        `dtype`, for a tensor core; that must hardly change the logits. Rounding twice must equal
        rounding once, because `remember` keeps rounded features.
        """
        return features

    def tile_params(self, params: Params, q_features: Features) -> Params:
        """The parameters that `pair` reads on tiles, given the features of all queries.

        Attention calls it once, before it loops over tiles. Override it for speed only, to add what
        `pair` would otherwise decide on each tile, such as whether any query of the batch is large
        (`core/batches.py`): on a sharded batch, that would take communication for each tile.
        """
        return params

    @with_hints({"mask": "Flax attention_fn=interop.flax_attention_fn(score, params)"})
    def __call__(self, params: Params, query: Array, key: Array) -> Array:
        """The logits [T, S] of queries [T, Dq] and keys [S, Dk]."""
        if self.translation_invariant:
            dtype = accumulator_dtype(query, key)
            query, key = query.astype(dtype), key.astype(dtype)
            origin = origin_of(key)
            query, key = query - origin, key - origin
        q_features = self.project_query(params, query)
        return self.pair(params, q_features, self.project_key(params, key))

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        """The expected shapes of `params`: a pytree of `jax.ShapeDtypeStruct`."""
        return {} if type(self).init is Score.init else init_shapes(self, query_dim, key_dim)


def init_shapes(part: Any, *sizes: int) -> Params:
    """The shapes of the parameters that `init` of a score or normaliser makes of these sizes.

    They are a pytree of `jax.ShapeDtypeStruct`.
    """
    shapes = _init_shapes if is_of_library(part) else _init_shapes.__wrapped__
    return shapes(part, jax.dtypes.canonicalize_dtype(float), *sizes)


@functools.lru_cache(maxsize=256)
def _init_shapes(part: Any, default_dtype: Any, *sizes: int) -> Params:
    # `default_dtype`, that of arrays which `init` makes, changes with `jax.enable_x64`.
    # Here the PRNG key is traced; outside, each call with a part of a user would compute it.
    return jax.eval_shape(lambda: part.init(jax.random.key(0), *sizes))
