"""A plain function as a score."""

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
    """e(q, k) = function(q, k), or function(params, q, k): what `get_score` makes of a function

    The function gets the tokens of one tile, q [t, Dq] and k [s, Dk] in the compute dtype, and
    gives their logits [t, s]. It is called with tokens that no allowed pair contains, whose logits
    are masked afterwards.

    Two such scores are equal if their functions are the same object. Compiled programs are kept by
    that: a `lambda` that is written inside a loop or a training step is a new function in every
    call, and compiles anew. Define the function once, at the top of a file; where it depends on
    settings, make it a `Score` with fields.

    Params: none; or, where the function takes them, any pytree of float arrays, shared by the whole
    batch. (Which of an array's axes are batch axes is known from `Score.init`, and a function has
    none. For parameters per head, and for modules, which have to make their parameters, subclass
    `Score`.) Arrays that the function takes from around it are constants; traced ones are an error.

    Attributes:
        function: takes (q, k) or (params, q, k), all positional.

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
                f"score {self} must not use the traced array {name} from around it, since compiled"
                " programs are kept by the function: take it as a parameter, def score(params, q,"
                " k), and give attention params="
            )

    def __repr__(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__name__)

    @property
    def _takes_params(self) -> bool:
        """Whether the function takes (params, q, k), and not (q, k)."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # of a function that is not written in Python
            signature = inspect.Signature()
        arguments = signature.parameters.values()
        needed = [argument for argument in arguments if argument.default is argument.empty]
        kinds = {argument.kind for argument in needed}
        positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        if len(needed) not in (2, 3) or not kinds <= positional:
            raise ValueError(
                f"score must be a name or a Score, or a function of {SIGNATURES}; got"
                f" {self}{signature}"
            )
        return len(needed) == 3

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        if self._takes_params:
            raise ValueError(
                f"score {self} takes params and is a function, which cannot make them: subclass"
                " Score and define init and pair"
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
            got = f"a {type(logits).__name__}"
        elif logits.shape == expected and jnp.issubdtype(logits.dtype, jnp.floating):
            return logits
        else:
            got = f"{logits.dtype} {list(logits.shape)}"
        raise ValueError(
            f"score {self} must give float logits {list(expected)} of q {list(q_features.shape)}"
            f" and k {list(k_features.shape)}; got {got}"
        )


def _traced_values(function: Any) -> list[str]:
    """The names of what a function takes from around it that is being traced."""
    around: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        around.update({"of a functools.partial": function.args}, **function.keywords)
        function = function.func
    function = inspect.unwrap(function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        try:
            around[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return [
        name
        for name, value in around.items()
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    ]
