"""Additive attention: a network of one hidden layer reads the query and the key."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core import pairwise_tanh
from attention_jax.core.checks import check_integer
from attention_jax.core.names import is_of_this_package
from attention_jax.core.products import matmul
from attention_jax.scores.contract import Params, Score, TileCost, init_shapes

Array = jax.Array

_TANH_VARIANCE = 0.394294  # E[tanh(z)^2] for z ~ N(0, 1)


@dataclasses.dataclass(frozen=True, repr=False)
class Additive(Score):
    """e(q, k) = v . tanh(Wq q + Wk k): a network of one hidden layer reads the pair

    This equals v . tanh(W [q; k]) with W = [Wq Wk]. Splitting W moves both matrix products from
    the pairs to the tokens: a pair costs A tanh and their weighted sum.

    If any projected query of a batch has an entry beyond 5.4, or beyond 33, the whole batch takes a
    slower formula that rounds differently: the last digits of an example can depend on the others
    in its batch.

    Params: {"query_kernel": Wq, [Dq, A]; "key_kernel": Wk, [Dk, A]; "v": [A]}.

    Attributes:
        hidden_dim: A, at least 1. None takes A from the given parameters, or Dk in `init`.
        key_part: False subtracts the logit that a query of zeros gives the same key, e(0, k):
            e(q, k) = v . (tanh(Wq q + Wk k) - tanh(Wk k)).

    Why without the key's part: at the start, most of what the softmax sees of the logits ranks the
    keys equally for all queries. In the initial recall model of `experiments/bench` the
    `query_share` of `analysis.logit_size` is 0.07; without the key's part it is 0.49. (Only e(0, k)
    is subtracted, so half of what is left still ranks the keys equally for all queries.)

    What this costs: a query with Wq q = 0 gives all keys the logit 0, and its weights are uniform;
    |e(q, k)| <= sum_f |v_f (Wq q)_f|. So a preference for some keys cannot be the same for all
    queries if one of these is 0. Otherwise it can: if Wq q is a constant c, as by a constant
    feature or a bias of the query's projection, e depends on the key alone, and tends to
    v . (sign(c) - tanh(Wk k)) as all |c_f| grow.

    The key's part is projected with the key, as its last feature, of A + 1. With
    `coverage_attention` the logits are v . (tanh(Wq q + Wk k + coverage w) - tanh(Wk k)) - coverage
    u, where [w, u] is the coverage kernel.

    Source: Bahdanau, Cho and Bengio 2014, appendix A.1.2 (their W_a, U_a, v_a are Wq, Wk, v);
    `key_part=False` is ours.

    >>> params = {"query_kernel": jnp.eye(2), "key_kernel": jnp.eye(2), "v": jnp.array([1.0, -1.0])}
    >>> Additive()(params, jnp.array([[0.5, 0.0]]), jnp.array([[0.5, 1.0]])).round(4)
    Array([[0.]], dtype=float32)
    >>> Additive(key_part=False)(params, jnp.array([[0.0, 0.0]]), jnp.array([[0.5, 1.0]]))
    Array([[0.]], dtype=float32)
    """

    tile_cost: ClassVar[TileCost] = "elementwise"
    finite_slopes: ClassVar[bool | None] = True
    hidden_dim: int | None = None
    key_part: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.hidden_dim is not None:
            check_integer("hidden_dim", self.hidden_dim)
        if not isinstance(self.key_part, bool):
            raise ValueError(f"key_part must be True or False; got {self.key_part!r}")
        methods = type(self).pair, type(self).project_key
        if not self.key_part and not all(map(is_of_this_package, methods)):
            text = "key_part=False needs the pair and project_key of Additive, Concat or Neural"
            raise ValueError(f"{text}; got those of {type(self).__name__}")

    def __repr__(self) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        if self.key_part:  # runs from before this option are known by the text without it
            names.remove("key_part")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({fields})"

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
        return init_shapes(score, query_dim, key_dim)

    def project_query(self, params: Params, query: Array) -> Array:
        return matmul(query, params["query_kernel"]).astype(query.dtype)

    def project_key(self, params: Params, key: Array) -> Array:
        return self._with_key_part(params, matmul(key, params["key_kernel"]).astype(key.dtype))

    def _with_key_part(self, params: Params, k_features: Array) -> Array:
        """Key features [S, A], and if `pair` is to subtract it, the key's part as one more."""
        if self.key_part:
            return k_features
        hidden = self._hidden(params, k_features)
        key_part = jnp.sum(params["v"][None, :].astype(hidden.dtype) * hidden, -1, keepdims=True)
        # Otherwise XLA:CPU computes its gradient, a sum over queries, anew for each feature.
        key_part = jax.lax.optimization_barrier(key_part)
        return jnp.concatenate([k_features, key_part], axis=-1)

    def _hidden(self, params: Params, features: Array) -> Array:
        return jnp.tanh(features)

    def _without_key_part(self, k_features: Array) -> Array:
        return k_features if self.key_part else k_features[:, :-1]

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        exceeded = params.get("exceeded")  # no parameter: `tile_params` adds it for the tiles
        features = q_features, self._without_key_part(k_features)
        logits = pairwise_tanh.weighted_tanh(params["v"], *features, exceeded)
        return logits if self.key_part else logits - k_features[:, -1:].T

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        features = q_features, self._without_key_part(k_features)
        dv, dq_features, dk_features = pairwise_tanh.weighted_tanh_vjp(
            params["v"], *features, dlogits, params.get("exceeded")
        )
        if not self.key_part:
            dkey_part = -dlogits.sum(0).astype(dk_features.dtype)[:, None]
            dk_features = jnp.concatenate([dk_features, dkey_part], axis=-1)
        # `pair` does not use the kernels, only the projections do.
        dparams = jax.tree.map(jnp.zeros_like, params)
        return {**dparams, "v": dv}, dq_features, dk_features

    def tile_params(self, params: Params, q_features: Array) -> Params:
        return {**params, "exceeded": pairwise_tanh.exceeds(q_features)}


@dataclasses.dataclass(frozen=True, repr=False)
class Concat(Additive):
    """e(q, k) = v . tanh(W [q; k]): `Additive` with both kernels in one matrix

    With W = [Wq Wk] it equals `Additive`, and it costs the same. An optimiser sees one matrix with
    one norm instead of two.

    Params: {"kernel": W, [Dq + Dk, A]; "v": [A]}. The first Dq rows of W multiply the query.

    Attributes:
        hidden_dim: A, at least 1. None takes A from the given parameters, or Dk in `init`.
        key_part: as in `Additive`.

    Source: Luong, Pham and Manning 2015, section 3.1, "concat" (their h_t is q, their h_s is k,
    their W_a and v_a are W and v).

    >>> params = {"kernel": jnp.array([[1.0], [0.5], [2.0]]), "v": jnp.array([3.0])}
    >>> Concat()(params, jnp.array([[0.3, 0.4]]), jnp.array([[-0.25]]))
    Array([[0.]], dtype=float32)
    """

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        split = super().init(rng, query_dim, key_dim)
        kernel = jnp.concatenate([split["query_kernel"], split["key_kernel"]])
        return {"kernel": kernel, "v": split["v"]}

    def project_query(self, params: Params, query: Array) -> Array:
        return matmul(query, params["kernel"][: query.shape[-1]]).astype(query.dtype)

    def project_key(self, params: Params, key: Array) -> Array:
        k_features = matmul(key, params["kernel"][-key.shape[-1] :]).astype(key.dtype)
        return self._with_key_part(params, k_features)


@dataclasses.dataclass(frozen=True, repr=False)
class Neural(Additive):
    """e(q, k) = v . relu(Wq q + Wk k + b): `Additive` with another nonlinearity and a bias

    Params: {"query_kernel": Wq, [Dq, A]; "key_kernel": Wk, [Dk, A]; "bias": b, [A]; "v": [A]},
    initially those of `Additive`, with b = 0.

    Attributes:
        hidden_dim: A, at least 1. None takes A from the given parameters, or Dk in `init`.
        key_part: False subtracts the logit of a query of zeros, as in `Additive`:
            e(q, k) = v . (relu(Wq q + Wk k + b) - relu(Wk k + b)). The `query_share` of the initial
            recall model rises from 0.14 to 0.59.

    Source: DiGiugno and Mahmood 2025, "Neural Attention", arXiv 2502.17206. They report a
    perplexity that is 2 per cent lower than with dot products. Their code has one more hidden
    layer, and keeps the hidden layers of all pairs in memory.

    >>> params = {"query_kernel": jnp.eye(2), "key_kernel": jnp.eye(2)}
    >>> params |= {"bias": jnp.array([0.0, -1.0]), "v": jnp.array([1.0, -1.0])}
    >>> Neural()(params, jnp.array([[0.5, 0.0]]), jnp.array([[0.5, 3.0], [-2.0, 3.0]]))
    Array([[-1., -2.]], dtype=float32)
    """

    tile_cost = "materialized"
    finite_slopes = True

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        params = super().init(rng, query_dim, key_dim)
        return {**params, "bias": jnp.zeros_like(params["v"])}

    def project_query(self, params: Params, query: Array) -> Array:
        return super().project_query(params, query) + params["bias"][None, :].astype(query.dtype)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        pairs = q_features[:, None, :] + self._without_key_part(k_features)[None, :, :]
        hidden = jax.nn.relu(pairs)
        logits = jnp.sum(params["v"][None, None, :].astype(hidden.dtype) * hidden, axis=-1)
        return logits if self.key_part else logits - k_features[:, -1:].T

    def _hidden(self, params: Params, features: Array) -> Array:
        return jax.nn.relu(features + params["bias"][None, :].astype(features.dtype))
