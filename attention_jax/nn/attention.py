"""Attention as Flax NNX modules, which hold the parameters of the score."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import cast_floats, float_array
from attention_jax.core.serialization import exported
from attention_jax.functional.attention import attention, attention_weights
from attention_jax.functional.checks import checked_implementation, score_of_sizes
from attention_jax.functional.memory import Memory, key_and_value, remember
from attention_jax.nn.dropout import DropoutModule, RandomModule
from attention_jax.nn.parameters import (
    Dtype,
    check_dtypes,
    check_rngs,
    checked_tokens,
    initial_score_params,
    normalizer_params,
    score_params,
    values_of,
)
from attention_jax.normalizers import DEFAULT_NORMALIZER, NormalizerLike, get_normalizer
from attention_jax.positions.contract import Bias, Mask
from attention_jax.scores import Additive, ScaledDot, Score

Array = jax.Array
Carry = Any  # state that a call passes to the call with the next queries: [*B, S], a cache or None


@exported
class Attended(NamedTuple):
    """The result of `attend`, the same for every kind of attention.

    >>> layer = Attention("dot", 4, 4, rngs=nnx.Rngs(0))
    >>> layer.attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 4)), return_weights=True).weights.shape
    (2, 5, 7)
    """

    output: Array  # [*B, T, Dv]
    weights: Array | None  # [*B, T, S], means over heads; None unless asked for
    carry: Carry  # None if the kind carries nothing


class ScoreModule(RandomModule):
    """A score between tokens of two sizes, and its parameters.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        dtype: dtype to which inputs and parameters are cast, and of the output; None for no cast
            and an output in the query's dtype.
        param_dtype: dtype of the parameters.
        rngs: the stream of the initial parameters.

    Raises:
        ValueError: there is no such score, or it cannot pair Dq with Dk.
    """

    dropout_rate: float
    implementation: str | None
    # Each kind implements it: (the arguments of its function, the other arguments of `attend`).
    _attend: Callable[..., Attended]

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.score, self.query_dim, self.key_dim = score_of_sizes(score, query_dim, key_dim)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        check_rngs(rngs)
        self.dtype, self.param_dtype = dtype, param_dtype
        params = initial_score_params(self.score, rngs.params(), (query_dim, key_dim))
        self.params_of_score = score_params(params, param_dtype)

    def remember(self, key: Array, value: Array | None = None) -> Memory:
        """Projects keys once, for many calls that take the result as `key`.

        Args:
            key: float [*B, S, Dk].
            value: float [*B, S, Dv]; None for `key`.
        """
        key = self._cast(checked_tokens("key", key, self.key_dim))
        value = None if value is None else self._cast(float_array("value", value))
        params = values_of(self.params_of_score, self.dtype)
        return remember(self.score, params, key, value, query_dim=self.query_dim)

    def first_carry(self, shape: tuple[int, ...], dtype: Dtype) -> Carry:
        """The carry before the first query, [*B, S]; None if this kind carries nothing."""
        return None

    def attend(
        self,
        query: Array,
        memory: Array | Memory,
        value: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        lengths: Array | None = None,
        first: Array | int = 0,
        position_ids: Any = None,  # not read: `CrossAttention` rotates the tokens of one head
        carry: Carry = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """Computes attention.

        All kinds of attention take the same arguments, described in `CrossAttention`, and ignore
        those that they do not need. `value` is float [*B, S, Dv], or None for `memory`; `bias` is
        as in `Attention`.
        """
        query = self._cast(checked_tokens("query", query, self.query_dim))
        if not isinstance(memory, Memory):  # a `Memory` has been cast already
            memory = self._cast(checked_tokens("key", memory, self.key_dim))
        value = None if value is None else self._cast(float_array("value", value))
        key, value = key_and_value(memory, value)
        arguments: Any = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
        arguments |= {"score": self.score, "params": values_of(self.params_of_score, self.dtype)}
        options: Any = {"rng": rng, "return_weights": return_weights}
        output, weights, after = self._attend(
            arguments, lengths=lengths, first=first, carry=carry, **options
        )
        weights = None if weights is None else weights.astype(query.dtype)
        if carry is not None and after is not None:
            # A loop needs the carry to keep its dtype, whatever the parameters have.
            after = after.astype(carry.dtype)
        return Attended(output.astype(query.dtype), weights, after)

    def _dropped(
        self,
        functions: tuple[Callable[..., Array], Callable[..., Array]],
        arguments: dict[str, Any],
        rng: Array | None,
        return_weights: bool,
    ) -> Attended:
        """Output and weights by the two functions; with a PRNG key the output has dropout."""
        attend, weigh = functions
        output = attend(
            **arguments,
            dropout_rate=0.0 if rng is None else self.dropout_rate,
            dropout_rng=rng,
            implementation=self.implementation,
        )
        del arguments["value"]
        return Attended(output, weigh(**arguments) if return_weights else None, None)

    def _cast(self, array: Array) -> Array:
        """The array in this module's dtype."""
        return array if self.dtype is None else cast_floats(array, self.dtype)


class Attention(ScoreModule, DropoutModule):
    """Attention with any score: `attention_jax.attention` with parameters of its own.

    Dropout, `deterministic`, `rngs` and the dtypes are as in `flax.nnx.MultiHeadAttention`.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        normalizer: a name in `NORMALIZERS`, "module:Name", or a `Normalizer`; the module holds its
            parameters.
        dropout_rate: probability that a weight is dropped.
        deterministic: True disables dropout, False enables it; `module.eval()` and `module.train()`
            set it. With None and a `dropout_rate` above 0, each call needs `deterministic` or a
            `dropout_rng`.
        implementation: as in `attention_jax.attention`.
        dtype: dtype to which inputs and parameters are cast, and of the output; None for no cast
            and an output in the query's dtype.
        param_dtype: dtype of the parameters.
        rngs: the streams of the initial parameters and of "dropout".
        keep_rngs: whether a module with dropout keeps a stream forked from `rngs.dropout`. Without
            it the module's state is its parameters alone, and dropout needs a `dropout_rng`.

    Raises:
        ValueError: there is no such score, it cannot pair Dq with Dk, or `rngs` lacks a stream.

    >>> attend = Attention("additive", 4, 6, dropout_rate=0.5, rngs=nnx.Rngs(0))
    >>> attend.train()
    >>> attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 6))).shape
    (2, 5, 6)
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        normalizer: NormalizerLike = DEFAULT_NORMALIZER,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        implementation: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        super().__init__(score, query_dim, key_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.normalizer = get_normalizer(normalizer)
        self.normalizer_params = normalizer_params(self.normalizer, rngs, param_dtype)
        self.implementation = checked_implementation(implementation)
        self._set_dropout(dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes attention.

        Args:
            query: float [*B, T, Dq].
            key: float [*B, S, Dk]; or a `Memory` that `remember` made.
            value: float [*B, S, Dv]; None for `key` (as in Bahdanau 2014 and Luong 2015).
            mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
            bias: a `Bias`, or float broadcastable to [*B, T, S]; added to the logits.
            deterministic: True disables dropout, False enables it; None for the module's setting.
            dropout_rng: one PRNG key, which enables dropout whatever the module's setting; None for
                the next key of the module's stream, if dropout is enabled.
            return_weights: also return the weights [*B, T, S], before dropout.

        Returns:
            output [*B, T, Dv]; or (output, weights).

        Raises:
            ValueError: an argument has the wrong shape or dtype; or a module with dropout lacks
                `deterministic` or a PRNG key.
        """
        rng = self._dropout_rng(dropout_rng, deterministic)
        options: Any = {"mask": mask, "bias": bias, "rng": rng, "return_weights": return_weights}
        return super().__call__(query, key, value, **options)

    def _attend(
        self, arguments: dict[str, Any], *, rng: Array | None, return_weights: bool, **others: Any
    ) -> Attended:
        arguments["normalizer"] = self.normalizer
        arguments["normalizer_params"] = values_of(self.normalizer_params, self.dtype)
        return self._dropped((attention, attention_weights), arguments, rng, return_weights)


class AdditiveAttention(Attention):
    """`Attention("additive")`, whose hidden size is `hidden_dim`: Bahdanau, Cho and Bengio 2014."""

    def __init__(
        self, query_dim: int, key_dim: int, *, hidden_dim: int | None = None, **options: Any
    ):
        super().__init__(Additive(hidden_dim), query_dim, key_dim, **options)


class DotAttention(Attention):
    """`Attention("dot")`: Luong, Pham and Manning 2015."""

    def __init__(self, query_dim: int, key_dim: int, **options: Any):
        super().__init__("dot", query_dim, key_dim, **options)


class GeneralAttention(Attention):
    """`Attention("general")`: Luong, Pham and Manning 2015."""

    def __init__(self, query_dim: int, key_dim: int, **options: Any):
        super().__init__("general", query_dim, key_dim, **options)


class ScaledDotAttention(Attention):
    """`Attention("scaled")`, whose factor is `scale`: Vaswani et al. 2017."""

    def __init__(self, query_dim: int, key_dim: int, *, scale: float | None = None, **options: Any):
        super().__init__(ScaledDot(scale), query_dim, key_dim, **options)
