"""Multi-head attention with any score, between learned projections."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import pad_rank
from attention_jax.core.checks import check_entries, check_integer
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.core.serialization import exported
from attention_jax.functional.attention import attention, attention_weights
from attention_jax.functional.checks import hinted
from attention_jax.functional.heads import heads_as_one_axis, ungroup_heads
from attention_jax.functional.memory import Memory, key_and_value, remember
from attention_jax.nn.attention import Attended
from attention_jax.nn.heads import Heads
from attention_jax.nn.parameters import Dtype, check_dtypes, checked_tokens
from attention_jax.positions.contract import Bias, Mask, ShiftedBias, ShiftedMask, Shifts
from attention_jax.positions.masks import causal_mask

Array = jax.Array


@exported
class KeyValueCache(NamedTuple):
    """The keys and values of the tokens so far, and room for more."""

    memory: Memory  # [*B, K, G or 1, max_length, ...], projected as the score wants them
    length: Array  # int32 [], how many tokens it holds; or [*B], one number for each row


class MultiHeadAttention(Heads):
    """N heads of attention between learned projections.

        head_n = attention(W_q,n x, W_k,g y, W_v,g y),  g = n // (N / K)
        output = sum_n W_o,n head_n

    Every head has its own parameters of score and normaliser. With score "scaled" it computes what
    `flax.nnx.MultiHeadAttention` does, with the same shapes of kernels, dropout, dtypes and
    initializers, but without biases by default. Padding changes no output, and a NaN cotangent at a
    query without keys changes no gradient. NaN in padded tokens does reach the gradients of the
    projections of query, key and value, which are sums over tokens.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: size of x.
        num_heads: N.
        key_dim: size of y; None for `query_dim`.
        value_dim: size of values, if they are other tokens than y; None for `key_dim`.
        num_key_heads: K, the number of heads of keys and values, a divisor of N (grouped-query
            attention; multi-query for 1); None for N.
        qkv_dim: total size of all heads, a multiple of N; None for `query_dim`.
        output_dim: size of the output; None for `query_dim`.
        use_bias: whether the projections add a bias.
        normalize_qk: layer normalisation, with a learned scale, of each head's queries and keys.
        normalizer: a name in `NORMALIZERS`, "module:Name", or a `Normalizer`; every head has
            parameters of its own.
        output_gate: whether each feature of each head's output is multiplied by a factor between 0
            and 1 that depends on the query: head_n * sigmoid(W_gate,n x).
        output_mod: a function of (output, value), which replaces the output of every token before
            gate and projection; None for none. It is called for one token: both arguments and the
            result are float [N, qkv_dim / N], the token's output and its own value. (Heads that
            share a value each have it.) It is for self attention alone, in one call or with a
            cache. The output of a query without keys stays 0.
        rotary_wavelength: the `max_wavelength` with which `rotary` rotates queries and keys by
            their position ids; None for no rotation. A head has an even number of features.
        dropout_rate: probability that a weight is dropped.
        deterministic: True disables dropout, False enables it; `module.eval()` and `module.train()`
            set it. With None and a `dropout_rate` above 0, each call needs `deterministic` or a
            `dropout_rng`.
        implementation: as in `attention_jax.attention`.
        dtype: dtype of the computation and of the output, to which inputs and parameters are cast;
            None for the dtype that these promote to.
        param_dtype: dtype of the parameters, the score's included.
        kernel_init: initializer of the projections' kernels; by default that of `nnx.Linear`.
        bias_init: initializer of the projections' biases, if `use_bias`.
        rngs: the streams of the initial parameters and of "dropout".
        keep_rngs: whether a module with dropout keeps a stream forked from `rngs.dropout`. Without
            it the module's state is its parameters alone, and dropout needs a `dropout_rng`.

    Raises:
        ValueError: there is no such score, sizes do not divide, `output_mod` does not return what
            it must, or `rngs` lacks a stream.

    >>> from flax import nnx
    >>> attend = MultiHeadAttention("dot", 12, num_heads=6, num_key_heads=2, rngs=nnx.Rngs(0))
    >>> attend(jnp.ones((2, 5, 12)), mask=causal_mask()).shape
    (2, 5, 12)

    Exclusive self attention, y - (y . v) v / |v|^2, removes what a token says of itself:

    >>> def exclusive(output, value):
    ...     shared, squares = (jnp.sum(x * value, -1, keepdims=True) for x in (output, value))
    ...     return output - shared / (squares + 1e-9) * value  # a value of 0 changes nothing
    >>> attend = MultiHeadAttention(
    ...     "additive", 12, num_heads=6, output_mod=exclusive, rngs=nnx.Rngs(0)
    ... )
    >>> attend(jnp.ones((2, 5, 12))).round(5).max()  # all tokens are equal: nothing is left
    Array(0., dtype=float32)

    Source: Vaswani et al. 2017, section 3.2.2 (their h is N); Ainslie et al. 2023 for K < N;
    Dehghani et al. 2023, section 2.1, for `normalize_qk`; Qiu et al. 2025, "Gated Attention for
    Large Language Models", section 2.2, for `output_gate`; Zhai 2026, "Exclusive Self Attention"
    (arXiv 2603.09078).
    """

    @hinted
    def __call__(
        self,
        query: Array,
        key: Array | Memory | None = None,
        value: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        position_ids: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes attention.

        Args:
            query: float [*B, T, query_dim].
            key: float [*B, S, key_dim]; a `Memory` that `remember` made; None for `query` (self
                attention).
            value: float [*B, S, value_dim]; None for `key`.
            mask: a `Mask` whose arrays' leading axes broadcast to *B, the same for all heads; or
                bool [*B, T, S] (sizes may be 1) or [T, S], or [*B, N, T, S] with all its axes.
            bias: a `Bias` whose arrays' leading axes broadcast to [*B, N] (ALiBi's slopes are [N]);
                or float [*B, N, T, S] with all its axes (sizes may be 1), or [T, S]; added to the
                logits. An array without the axis of the batch or that of the heads is refused: a
                bias per example is [*B, 1, T, S], one per head [1, N, T, S].
            position_ids: of the queries, and in self attention of the keys, for rotation: int [T],
                or [*B, T]; None for 0, 1, 2, ... Other keys have 0, 1, 2, ..., or the ids of their
                `remember`.
            deterministic: True disables dropout, False enables it; None for the module's setting.
            dropout_rng: one PRNG key, which enables dropout whatever the module's setting; None for
                the next key of the module's stream, if dropout is enabled.
            return_weights: also return the weights [*B, N, T, S], before dropout.

        Returns:
            output [*B, T, output_dim]; or (output, weights).

        Raises:
            ValueError: an argument has the wrong shape or dtype; a module with dropout lacks
                `deterministic` or a PRNG key; or one with `output_mod` is given a key.
        """
        if key is not None and self.output_mod is not None:
            raise ValueError(
                "key must be None with output_mod, which takes the value of the query's own token;"
                f" got {type(key).__name__}"
            )
        query = checked_tokens("query", query, *self.query.in_features)
        queries = self._queries(query, position_ids)
        if isinstance(key, Memory):
            keys, values = key_and_value(key, value)
        else:
            key_position_ids = position_ids if key is None else None
            key = query if key is None else key
            value = key if value is None else value
            keys, values = self._keys_and_values(key, value, key_position_ids)
        lengths = queries.shape[-2], keys.shape[-2]
        arguments = self._arguments(mask, bias, query.shape[:-2], *lengths)
        dropout_rng = self._dropout_rng(dropout_rng, deterministic)
        output = self._attended(query, queries, keys, values, values, dropout_rng, **arguments)
        if not return_weights:
            return output
        weights = attention_weights(queries, keys, **arguments).astype(queries.dtype)
        return output, ungroup_heads(weights, query.ndim - 2)

    def attend(
        self,
        query: Array,
        memory: Array | Memory | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        position_ids: Array | None = None,
        lengths: Array | None = None,  # only other kinds need it
        first: Array | int = 0,  # the same
        carry: KeyValueCache | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """A call, or `extend` if `carry` is a cache; the arguments are those of `CrossAttention`.

        The weights are averaged over heads.
        """
        if carry is not None:
            output, carry = self.extend(
                query, carry, mask=mask, bias=bias, position_ids=position_ids
            )
            return Attended(output, None, carry)
        result = self(
            query,
            memory,
            mask=mask,
            bias=bias,
            position_ids=position_ids,
            deterministic=rng is None,
            dropout_rng=rng,
            return_weights=return_weights,
        )
        output, weights = result if return_weights else (result, None)
        return Attended(output, None if weights is None else jnp.mean(weights, axis=-3), None)

    def remember(
        self, key: Array, value: Array | None = None, *, position_ids: Array | None = None
    ) -> Memory:
        """Projects keys and values once, for many calls that take the result as `key`.

        Args:
            key: float [*B, S, key_dim].
            value: float [*B, S, value_dim]; None for `key`.
            position_ids: of the keys, for rotation: int [S] or [*B, S]; None for 0, 1, 2, ...

        Raises:
            ValueError: an argument has the wrong shape.
        """
        keys, values = self._keys_and_values(key, key if value is None else value, position_ids)
        params = self._grouped(self.params_of_score)
        return remember(self.score, params, keys, values, query_dim=self.head_dim)

    def empty_cache(
        self, batch_shape: tuple[int, ...], max_length: int, dtype: Dtype | None = None
    ) -> KeyValueCache:
        """A cache for `extend`, for the keys and values of `max_length` tokens [*B].

        It has the floating-point `dtype`, to which keys and values are rounded: bfloat16 halves
        the memory of float32, float8_e4m3fn quarters it. Attention computes in the dtype of the
        layer. With None the cache is that of float32 tokens without rounding.
        """
        if not isinstance(batch_shape, tuple):
            raise ValueError(f"batch_shape must be a tuple, *B; got {batch_shape!r}")
        max_length = check_integer("max_length", max_length)
        check_dtypes(dtype=dtype)
        tokens = jax.ShapeDtypeStruct((*batch_shape, max_length, *self.key.in_features), "float32")
        shapes = jax.eval_shape(self.remember, tokens)
        memory = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), shapes)
        return KeyValueCache(memory, jnp.zeros((), jnp.int32))

    def extend(
        self,
        x: Array,
        cache: KeyValueCache,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        position_ids: Array | None = None,
    ) -> tuple[Array, KeyValueCache]:
        """Self attention of the next tokens to themselves and all earlier tokens: a decoding step.

        Token by token, or several at a time, the outputs are those of one call with all tokens and
        `mask & causal_mask()`, without dropout. Rows may hold unequal numbers of tokens: after an
        `extend` with padded prompts, `cache._replace(length=lengths)` forgets their padding.

        Args:
            x: float [*B, t, query_dim], the tokens at positions `cache.length` and on.
            cache: from `empty_cache` or the previous step. It keeps its dtype.
            mask, bias: as in a call with all tokens: positions count from the first token, and
                arrays are [max_length, max_length].
            position_ids: of these tokens, for rotation: int [t] or [*B, t]; None for
                `cache.length` and on.

        Returns:
            (output [*B, t, output_dim], the cache with these tokens). Under `jit`, the output of a
            row is NaN if the cache has no room for all of its tokens.

        Raises:
            ValueError: an argument has the wrong shape or dtype; or, outside of `jit`, the cache
                has no room for these tokens.

        >>> from flax import nnx
        >>> attend = MultiHeadAttention("dot", 4, num_heads=2, rngs=nnx.Rngs(0))
        >>> cache, extend = attend.empty_cache((), max_length=3), jax.jit(attend.extend)
        >>> for token in jnp.eye(3, 4):
        ...     output, cache = extend(token[None], cache)
        >>> at_once = jax.jit(attend)(jnp.eye(3, 4), mask=causal_mask())
        >>> int(cache.length), bool(jnp.allclose(output, at_once[-1:], atol=1e-6))
        (3, True)
        """
        x = checked_tokens("x", x, *self.query.in_features)
        if not isinstance(cache, KeyValueCache):
            raise ValueError(f"cache must be a KeyValueCache; got {type(cache).__name__}")
        count, first, room = x.shape[-2], cache.length, cache.memory.values.shape[-2]
        got, expected = cache.memory.values.shape, (*x.shape[:-2], self.num_key_heads, 1, room)
        if got != (*expected, self.head_dim):
            raise ValueError(
                f"cache must be this module's empty_cache({x.shape[:-2]}, ...) for x"
                f" {list(x.shape)}; got values {list(got)}"
            )
        if count > room:
            raise ValueError(f"x must have at most {room} tokens, as the cache has; got {count}")
        if first.shape not in ((), x.shape[:-2]):
            raise ValueError(
                f"cache.length must be int [], or {list(x.shape[:-2])} for x {list(x.shape)}; got"
                f" {list(first.shape)}"
            )
        name = f"cache.length (room for {room} tokens, {count} to add)"
        check_entries(name, first, 0, room - count)
        if position_ids is None:
            position_ids = pad_rank(jnp.arange(count), first.ndim + 1) + first[..., None]
        queries = self._queries(x, position_ids)
        new = self.remember(x, position_ids=position_ids)
        extended = _appended(cache, new)
        memory: Memory = jax.tree.map(
            lambda kept, own: kept.astype(own.dtype), extended.memory, new
        )
        # Entries of the cache without a token come after every query: the causal mask hides them.
        mask = causal_mask() if mask is None else causal_mask() & mask
        arguments = self._arguments(mask, bias, x.shape[:-2], room, room)
        starts = first.reshape(*first.shape, *[1] * (3 if first.ndim else 1))  # [*B, 1, 1, 1]
        shifts = Shifts(queries=starts, keys=jnp.zeros(1, int))
        arguments["mask"] = ShiftedMask(arguments["mask"], shifts)
        if arguments["bias"] is not None:
            arguments["bias"] = ShiftedBias(arguments["bias"], shifts)
        output = self._attended(x, queries, *memory, new.values, None, **arguments)
        has_room = (first + count <= room)[..., None, None]
        return jnp.where(pad_rank(has_room, output.ndim), output, jnp.nan), extended

    def _attended(
        self,
        tokens: Array,
        queries: Array,
        keys: Any,
        values: Array,
        own_values: Array,
        rng: Array | None,
        **arguments: Any,
    ) -> Array:
        """The output for these tokens, whose own values are given; with dropout if there is a key.

        `own_values` matter in self attention alone.
        """
        with heads_as_one_axis(tokens.ndim - 2):
            heads = attention(
                queries,
                keys,
                values,
                **arguments,
                dropout_rate=0.0 if rng is None else self.dropout_rate,
                dropout_rng=rng,
                implementation=self.implementation,
            )
        return self._merged(heads.astype(queries.dtype), tokens, own_values)


def _appended(cache: KeyValueCache, new: Memory) -> KeyValueCache:
    """The cache with the next tokens, `new` [*B, K, G or 1, t, ...], after those that it holds."""

    def written(old: Array, new: Array, axis: int) -> Array:
        def write(old: Array, new: Array, length: Array) -> Array:
            place: Any = functools.partial(
                jax.lax.dynamic_update_slice_in_dim, axis=axis - length.ndim
            )
            for _ in range(length.ndim):
                place = jax.vmap(place)
            return place(old, new.astype(old.dtype), length)

        # Sharded over Explicit mesh axes as the tokens are.
        return on_automatic_axes(write, explicit_spec(new), old, new, cache.length)

    keys: Any = new.keys
    is_array = isinstance(keys, jax.Array)
    axes = keys.ndim - 2 if is_array else keys.map(lambda leaf, ndim: leaf.ndim - ndim)
    token_axes: Any = (axes, new.values.ndim - 2)
    memory = jax.tree.map(written, cache.memory, new, Memory(*token_axes))
    return KeyValueCache(memory, cache.length + new.values.shape[-2])
