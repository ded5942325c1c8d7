"""`FunctionScore`, which makes a score of a plain function."""

from __future__ import annotations

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

    Two such scores are equal if their functions are the same object, and JAX caches compiled
    programs by that equality. A `lambda` inside a loop or a training step is a new function in
    every call, and compiles again. Define the function once, at the top of a file; if it depends on
    settings, write a `Score` with fields.

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
        try:
            hash(self.function)
        except TypeError:
            raise ValueError(f"score must be hashable; got the function {self!r}") from None
        _ = self._takes_params
        for name in _traced_values(self.function):
            raise ValueError(
                f"score {self} must not use the traced array {name} from its enclosing scope, since"
                " compiled programs are cached by the function: take it as a parameter, def"
                " score(params, q, k), and give attention params="
            )

    def __repr__(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__name__)

    @property
    def _takes_params(self) -> bool:
        """Whether the function takes (params, q, k) rather than (q, k)."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # functions not written in Python have none
            signature = inspect.Signature()
        arguments = signature.parameters.values()
        required = [argument for argument in arguments if argument.default is argument.empty]
        kinds = {argument.kind for argument in required}
        positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        if len(required) not in (2, 3) or not kinds <= positional:
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
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params
        )

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        arguments = (params,) if self._takes_params else ()
        logits: Any = self.function(*arguments, q_features, k_features)
        expected = (q_features.shape[0], k_features.shape[0])
        if not hasattr(logits, "dtype"):
            got = "None" if logits is None else f"a {type(logits).__name__}"
        elif logits.shape == expected and jnp.issubdtype(logits.dtype, jnp.floating):
            return logits
        else:
            got = f"{logits.dtype} {list(logits.shape)}"
        raise ValueError(
            f"score {self} must give float logits {list(expected)} of q {list(q_features.shape)}"
            f" and k {list(k_features.shape)}; got {got}"
        )


def _traced_values(function: Any) -> list[str]:
    """The names of the traced arrays in a function's closure or `functools.partial` arguments."""
    captured: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        captured.update({"of a functools.partial": function.args}, **function.keywords)
        function = function.func
    function = inspect.unwrap(function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        try:
            captured[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return [
        name
        for name, value in captured.items()
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    ]
