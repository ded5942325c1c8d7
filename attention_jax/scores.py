"""Score functions: a query and a key become one number, the logit. This file is the mathematics.

A score splits in two: `project` runs once per token, `pair` once per (query, key) pair. Both are
written for one example; batches come from `jax.vmap`. Parameters are an explicit pytree, so that
gradients reach them and a new value recompiles nothing; the `Score` itself is a frozen dataclass,
hashable by value, so that it can be a static argument.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import math
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import pairwise_tanh
from attention_jax.softmax import accumulator_dtype

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn


@dataclasses.dataclass(frozen=True)
class Score:
    """A score function: subclass it, as a frozen dataclass, and define `pair`; the rest is there.

    Shapes below are for one example: T queries of size Dq, S keys of size Dk.
    """

    needs_equal_dims: ClassVar[bool] = False  # True if Dq must equal Dk

    def __init_subclass__(cls) -> None:
        # A new `pair` under an inherited `pair_vjp` would send another function's gradient.
        if "pair" in vars(cls) and "pair_vjp" not in vars(cls):
            cls.pair_vjp = Score.pair_vjp  # type: ignore[method-assign]

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

    def __call__(self, params: Params, query: Array, key: Array) -> Array:
        """Logits [T, S] of queries [T, Dq] and keys [S, Dk]."""
        return self.pair(params, *self.project(params, query, key))

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        """What `params` must look like: a pytree of `jax.ShapeDtypeStruct`."""
        del params
        return _init_shapes(self, query_dim, key_dim)


@functools.lru_cache(maxsize=256)
def _init_shapes(score: Score, query_dim: int, key_dim: int) -> Params:
    return jax.eval_shape(lambda rng: score.init(rng, query_dim, key_dim), jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Dot(Score):
    """e(q, k) = q . k

    Source: Luong, Pham and Manning 2015, section 3.1, "dot" (their h_t is q, their h_s is k).

    >>> Dot()({}, jnp.array([[1.0, -0.5, 0.3, 0.8]]), jnp.array([[0.6, 0.2, -0.4, 1.0]])).round(4)
    Array([[1.18]], dtype=float32)
    """

    needs_equal_dims: ClassVar[bool] = True

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return _einsum("td,sd->ts", q_features, k_features)

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        dq_features = _einsum("ts,sd->td", dlogits, k_features)
        dk_features = tall_product(q_features, dlogits)
        dparams = jax.tree.map(jnp.zeros_like, params)  # General's kernel did its work in `project`
        return dparams, dq_features.astype(q_features.dtype), dk_features.astype(k_features.dtype)


@dataclasses.dataclass(frozen=True)
class ScaledDot(Dot):
    """e(q, k) = scale (q . k), by default with scale = 1 / sqrt(Dk)

    For independent components of mean 0 and variance 1, q . k has variance Dk and e has 1.

    Attributes:
        scale: the factor, any finite float; None for 1 / sqrt(Dk).

    Source: Vaswani et al. 2017, equation 1.

    >>> q, k = jnp.array([[1.0, -0.5, 0.3, 0.8]]), jnp.array([[0.6, 0.2, -0.4, 1.0]])
    >>> ScaledDot()({}, q, k).round(4)
    Array([[0.59]], dtype=float32)
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        real = isinstance(self.scale, numbers.Real) and math.isfinite(self.scale)
        if self.scale is not None and not real:
            raise ValueError(f"scale must be a finite float or None; got {self.scale!r}")

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        scale = 1 / math.sqrt(key.shape[-1]) if self.scale is None else float(self.scale)
        return query * scale, key


@dataclasses.dataclass(frozen=True)
class General(Dot):
    """e(q, k) = q . (W k): a dot product after one of the two has been projected

    The projection is paid once per query, T Dq Dk multiplications, and not once per pair.

    Params: {"kernel": W, [Dq, Dk]}, normal with variance 1 / (Dq Dk).

    Source: Luong, Pham and Manning 2015, section 3.1, "general" (their W_a is W).

    >>> params = {"kernel": jnp.array([[0.0, 1.0], [2.0, 0.0]])}
    >>> General()(params, jnp.array([[1.0, 10.0]]), jnp.array([[3.0, 4.0]]))
    Array([[64.]], dtype=float32)
    """

    needs_equal_dims: ClassVar[bool] = False

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        # Var(sum_ij q_i W_ij k_j) = Dq Dk Var(W).
        return {
            "kernel": jax.random.normal(rng, (query_dim, key_dim)) * (query_dim * key_dim) ** -0.5
        }

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        return _matmul(query, params["kernel"]).astype(query.dtype), key


@dataclasses.dataclass(frozen=True)
class Additive(Score):
    """e(q, k) = v . tanh(Wq q + Wk k): a network of one hidden layer looks at the pair

    The same function as v . tanh(W [q; k]) with W = [Wq Wk]; split, both products are paid once
    per token and only the tanh and its sum, A of each, once per pair.

    Params: {"query_kernel": Wq, [Dq, A]; "key_kernel": Wk, [Dk, A]; "v": [A]}.

    Attributes:
        hidden_dim: A, at least 1; None for Dk (or what given parameters have).

    Source: Bahdanau, Cho and Bengio 2014, appendix A.1.2 (their W_a, U_a, v_a are Wq, Wk, v).

    >>> params = {"query_kernel": jnp.eye(2), "key_kernel": jnp.eye(2), "v": jnp.array([1.0, -1.0])}
    >>> Additive()(params, jnp.array([[0.5, 0.0]]), jnp.array([[0.5, 1.0]])).round(4)
    Array([[0.]], dtype=float32)
    """

    hidden_dim: int | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.hidden_dim, numbers.Integral) and self.hidden_dim >= 1
        if self.hidden_dim is not None and not whole:
            raise ValueError(
                f"hidden_dim must be an integer of at least 1, or None for Dk; got"
                f" {self.hidden_dim!r}"
            )

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        hidden_dim = key_dim if self.hidden_dim is None else self.hidden_dim
        query_rng, key_rng, v_rng = jax.random.split(rng, 3)
        # The two kernels give the tanh an input of variance 1, half of it from either side.
        return {
            "query_kernel": jax.random.normal(query_rng, (query_dim, hidden_dim))
            * (2 * query_dim) ** -0.5,
            "key_kernel": jax.random.normal(key_rng, (key_dim, hidden_dim)) * (2 * key_dim) ** -0.5,
            "v": jax.random.normal(v_rng, (hidden_dim,)) * (hidden_dim * _TANH_VARIANCE) ** -0.5,
        }

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        score = self
        v_shape = np.shape(params.get("v", ())) if isinstance(params, dict) else ()
        if self.hidden_dim is None and v_shape and v_shape[-1] > 0:
            score = dataclasses.replace(self, hidden_dim=v_shape[-1])
        return _init_shapes(score, query_dim, key_dim)

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        q_features = _matmul(query, params["query_kernel"]).astype(query.dtype)
        return q_features, _matmul(key, params["key_kernel"]).astype(key.dtype)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return pairwise_tanh.weighted_tanh(params["v"], q_features, k_features)

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        dv, dq_features, dk_features = pairwise_tanh.weighted_tanh_vjp(
            params["v"], q_features, k_features, dlogits
        )
        # The kernels did their work in `project`.
        dparams = jax.tree.map(jnp.zeros_like, params)
        return {**dparams, "v": dv}, dq_features, dk_features


_TANH_VARIANCE = 0.394294  # E[tanh(z)^2] for z ~ N(0, 1)

SCORES: dict[str, Score] = {
    "additive": Additive(),
    "dot": Dot(),
    "general": General(),
    "scaled": ScaledDot(),
}


def get_score(name_or_score: str | Score | type[Score]) -> Score:
    """The `Score` that a name stands for; a `Score` comes back as it is.

    Args:
        name_or_score: a key of `SCORES`; or "module:Name", a `Score` of your own (class or
            instance) in a module that can be imported; or a `Score`.

    Returns:
        a `Score`, hashable by value.

    Raises:
        ValueError: there is no such score, or its value does not say all that it computes.

    >>> get_score("scaled")
    ScaledDot(scale=None)
    """
    found: Any = name_or_score
    if isinstance(name_or_score, str):
        found = SCORES.get(name_or_score)
        if found is None and ":" in name_or_score:
            found = _import_score(name_or_score)
        elif found is None:
            close = difflib.get_close_matches(name_or_score, SCORES, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"score must be one of {', '.join(SCORES)} or 'module:Name';"
                f" got {name_or_score!r}{hint}"
            )
    if isinstance(found, type) and issubclass(found, Score):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(
                f"score must be an instance where the class needs arguments; got {found.__name__}"
                f" ({error})"
            ) from error
    if not isinstance(found, Score):
        raise ValueError(f"score must be a name or a Score; got {name_or_score!r}")
    _check_value_semantics(found)
    return found


def _check_value_semantics(score: Score) -> None:
    """Compiled functions are cached by the score's value: its fields, which must say everything."""
    name = type(score).__name__
    fields = {field.name for field in dataclasses.fields(score)}
    for attribute in set(vars(score)) - fields:
        if not isinstance(getattr(type(score), attribute, None), functools.cached_property):
            raise ValueError(
                f"score must be a frozen dataclass; {name}.{attribute} is not a field, so two"
                f" {name} that differ in it would be taken for equal"
            )
    try:
        hash(score)
    except TypeError:
        raise ValueError(
            f"score must be hashable: make {name} a frozen dataclass with hashable fields"
        ) from None


def _import_score(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"score {name!r}: cannot import module {module_name!r} ({error})"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"score {name!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def tall_product(left: Array, right: Array) -> Array:
    """right^T left, ([t, d], [t, s]) -> [s, d], fast where s is much larger than d.

    As (left^T right)^T: XLA:CPU transposes the larger factor of [s, t] @ [t, d], and takes three
    times as long. The barriers keep it from making one of the other.
    """
    left = jax.lax.optimization_barrier(left.T)
    return jax.lax.optimization_barrier(_einsum("dt,ts->ds", left, right)).T


def _matmul(left: Array, right: Array) -> Array:
    return _einsum("td,da->ta", left, right)


def _einsum(formula: str, left: Array, right: Array) -> Array:
    """A product accumulated in at least float32; on a GPU or TPU, in true float32."""
    dtype = accumulator_dtype(left, right)
    return jnp.einsum(formula, left, right, precision="highest", preferred_element_type=dtype)
