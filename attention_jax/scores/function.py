"""`FunctionScore`, which makes a score of a plain function."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.scores.contract import Params, Score

Array = jax.Array

SIGNATURES = "(q, k) or (params, q, k)"


@dataclasses.dataclass(frozen=True, repr=False)
class FunctionScore(Score):
    """e(q, k) = function(q, k), or function(params, q, k)

    `get_score` wraps a function in this class. The function takes the tokens of one tile, q [t, Dq]
    and k [s, Dk] in the compute dtype, and returns their logits [t, s]. It is also called with
    tokens that no allowed pair contains; their logits are masked afterwards.

    Each call of `attention` traces the function, and so reads the current values of its closure and
    globals. It compiles again only when these have changed.

    Params: {} for (q, k); for (params, q, k) any pytree of float arrays, which the whole batch
    shares. (`Score.init` tells which axes of a parameter are batch axes, and a function has no
    `init`. For parameters per head, and for modules, which create their parameters, subclass
    `Score`.) Arrays from the enclosing scope are constants; a traced one is an error.

    Attributes:
        function: takes (q, k) or (params, q, k) as positional arguments.

    >>> import jax.numpy as jnp
    >>> from attention_jax import attention_weights
    >>> def negative_distance(q, k):
    ...     return -jnp.abs(q - k.T)
    >>> query, key = jnp.array([[0.0]]), jnp.array([[0.0], [1.0]])
    >>> weights = attention_weights(query, key, score=negative_distance)
    >>> [f"{weight:.2f}" for weight in weights[0]]
    ['0.73', '0.27']
    """

    function: Callable[..., Array]

    def __post_init__(self) -> None:
        _ = self._takes_params

    def __repr__(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__name__)

    @functools.cached_property  # a call asks four times
    def _takes_params(self) -> bool:
        """Whether the function takes (params, q, k) rather than (q, k)."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # functions not written in Python have none
            signature = inspect.Signature()
        required = [a for a in signature.parameters.values() if a.default is a.empty]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if len(required) not in (2, 3) or any(a.kind not in kinds for a in required):
            raise ValueError(
                f"score must be a name or a Score, or a function of {SIGNATURES}; got"
                f" {self}{signature}"
            )
        return len(required) == 3

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        if self._takes_params:
            raise ValueError(
                f"score {self} takes params and is a function, which cannot initialise them:"
                " subclass Score and define init and pair"
            )
        return {}

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        if not self._takes_params:
            return {}
        if not jax.tree.leaves(params):
            raise ValueError(
                f"params must be a pytree of float arrays for score {self}, a function of"
                f" (params, q, k); got {params!r}: give attention params="
            )
        return _shapes_of(params)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        arguments = (params,) if self._takes_params else ()
        return self.function(*arguments, q_features, k_features)


@dataclasses.dataclass(frozen=True, repr=False)
class CallableScore(FunctionScore):
    """The score of a callable pytree, whose floating-point leaves are its parameters

    An `nnx.Module`, an Equinox module or a `jax.tree_util.Partial` with a method
    `__call__(q, k) -> logits`. `get_score` wraps it. Each call of `attention` reads its arrays
    again. They are differentiable, and new values compile nothing.

    Params: {path: leaf} of the floating-point leaves; the other leaves are constants. Where no
    params are given, those of the pytree are taken.

    >>> from attention_jax import attention
    >>> def scaled(temperature, q, k):
    ...     return q @ k.T / temperature
    >>> def output(temperature):
    ...     score = jax.tree_util.Partial(scaled, temperature)
    ...     return attention(jnp.eye(2), jnp.eye(2), jnp.eye(2), score=score)[0, 0]
    >>> f"{jax.grad(output)(1.0):.3f}"
    '-0.197'
    """

    function: Any = dataclasses.field(compare=False)
    structure: Any = None  # compared in place of `function`

    def __post_init__(self) -> None:
        object.__setattr__(self, "structure", jax.tree.structure(self.function))
        super().__post_init__()

    @property
    def own_params(self) -> Params:
        """The floating-point leaves, by their paths."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.function)
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if is_float(leaf)}

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return jax.tree.map(jnp.asarray, self.own_params)

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        return _shapes_of(self.own_params)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        def replaced(path: Any, leaf: Any) -> Any:
            return params.get(jax.tree_util.keystr(path), leaf)

        function = jax.tree_util.tree_map_with_path(replaced, self.function)
        return function(q_features, k_features)


def _shapes_of(params: Params) -> Params:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)), params
    )


def is_callable_pytree(value: Any) -> bool:
    """Whether a value can be called and is a pytree with floating-point leaves."""
    leaves = jax.tree.leaves(value) if callable(value) else []
    return any(leaf is not value and is_float(leaf) for leaf in leaves)


def is_float(leaf: Any) -> bool:
    """Whether a leaf of a pytree is a floating-point number or array."""
    dtype = np.dtype(type(leaf)) if isinstance(leaf, float) else getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
