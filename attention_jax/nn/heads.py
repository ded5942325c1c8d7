"""The heads of multi-head attention: from tokens to heads, in groups, and back."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.checks import check_integer, check_real, with_hints
from attention_jax.functional.checks import checked_implementation
from attention_jax.functional.heads import group_heads, group_positions, ungroup_heads
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.empty_rows import gated_rows, modified_rows, project_rows
from attention_jax.nn.parameters import (
    BIAS_INIT,
    KERNEL_INIT,
    Dtype,
    check_dtypes,
    check_rngs,
    checked_tokens,
    initial_score_params,
    layer_norm,
    normalizer_params,
    score_params,
    values_of,
)
from attention_jax.nn.positions import rotary
from attention_jax.normalizers import DEFAULT_NORMALIZER, NormalizerLike, get_normalizer
from attention_jax.parts.user_code import UserCode
from attention_jax.positions.contract import Bias, DenseBias, Mask, as_bias, as_mask
from attention_jax.positions.function import check_batch_axes
from attention_jax.scores import Score, get_score

Array = jax.Array


class Heads(DropoutModule):
    """The projections and parameters of N heads in K groups: the base of `MultiHeadAttention`."""

    @with_hints(
        {  # what to write in place of the arguments of PyTorch's layer
            "embed_dim": "query_dim",
            "kdim": "key_dim",
            "vdim": "value_dim",
            "dropout": "dropout_rate",
            "bias": "use_bias",
            "add_zero_attn": "normalizer=Softmax(sink=True)",
            "add_bias_kv": "nothing, it has no counterpart",
            "batch_first": "nothing, tokens are [*B, length, size]",
            "device": "nothing, and place the parameters with jax.device_put",
        }
    )
    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        *,
        num_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        qkv_dim: int | None = None,
        output_dim: int | None = None,
        use_bias: bool = False,
        normalize_qk: bool = False,
        normalizer: NormalizerLike = DEFAULT_NORMALIZER,
        output_gate: bool = False,
        output_mod: Callable[[Array, Array], Array] | None = None,
        rotary_wavelength: float | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        implementation: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        bias_init: nnx.Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        if isinstance(score, int):
            raise ValueError(
                f"score must come first, then query_dim, then num_heads={score} by name; got the"
                " order of Flax's layer"
            )
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        check_rngs(rngs)
        self.score = get_score(score)
        self.normalizer = get_normalizer(normalizer)
        key_dim = query_dim if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        qkv_dim = query_dim if qkv_dim is None else qkv_dim
        output_dim = query_dim if output_dim is None else output_dim
        num_heads = check_integer("num_heads", num_heads)
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        sizes = {"query_dim": query_dim, "key_dim": key_dim, "value_dim": value_dim}
        sizes |= {"qkv_dim": qkv_dim, "output_dim": output_dim, "num_key_heads": num_key_heads}
        for name, size in sizes.items():
            check_integer(name, size)
        if qkv_dim % num_heads:
            raise ValueError(f"qkv_dim must be a multiple of {num_heads} heads; got {qkv_dim}")
        if num_heads % num_key_heads:
            raise ValueError(f"num_key_heads must divide {num_heads} heads; got {num_key_heads}")
        head_dim = qkv_dim // num_heads
        if rotary_wavelength is not None:
            check_real("rotary_wavelength", rotary_wavelength, above=0)
        self.rotary_wavelength = rotary_wavelength
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads, head_dim
        if output_mod is not None:
            _check_output_mod(output_mod, jax.ShapeDtypeStruct((num_heads, head_dim), jnp.float32))
        self.output_mod = output_mod

        dtypes: Any = {"dtype": dtype, "param_dtype": param_dtype}
        layer: Any = {**dtypes, "kernel_init": kernel_init, "bias_init": bias_init}

        def projection(dim: int, num_heads: int) -> nnx.LinearGeneral:
            features = (num_heads, head_dim)
            return nnx.LinearGeneral(dim, features, use_bias=use_bias, rngs=rngs, **layer)

        self.query = projection(query_dim, num_heads)
        self.key = projection(key_dim, num_key_heads)
        self.value = projection(value_dim, num_key_heads)
        self.output = nnx.LinearGeneral(
            (num_heads, head_dim), output_dim, axis=(-2, -1), use_bias=use_bias, rngs=rngs, **layer
        )
        norm = functools.partial(layer_norm, head_dim, use_bias=False, rngs=rngs, **dtypes)
        self.query_norm = norm() if normalize_qk else None
        self.key_norm = norm() if normalize_qk else None
        rng_of_head = jax.random.split(rngs.params(), num_heads)
        of_head = functools.partial(initial_score_params, self.score, dims=(head_dim, head_dim))
        params = jax.vmap(of_head)(rng_of_head)
        self.params_of_score = score_params(params, param_dtype)
        self.normalizer_params = normalizer_params(
            self.normalizer, rngs, param_dtype, num_heads=num_heads
        )
        self.gate = projection(query_dim, num_heads) if output_gate else None
        self.dtype, self.param_dtype = dtype, param_dtype
        self.implementation = checked_implementation(implementation)
        self._set_dropout(dropout_rate, deterministic, keep_rngs, rngs)

    # --- projections: [*B, length, dim] to heads [*B, K, G, length, head_dim], and back ---

    def _queries(self, x: Array, position_ids: Array | None) -> Array:
        heads = self._normalise_and_rotate(self.query(x), self.query_norm, position_ids)
        return group_heads(heads, 2, self.num_key_heads)

    def _keys_and_values(
        self, key: Array, value: Array, position_ids: Array | None
    ) -> tuple[Array, Array]:
        key = checked_tokens("key", key, *self.key.in_features)
        value = checked_tokens("value", value, *self.value.in_features)
        keys = self._normalise_and_rotate(self.key(key), self.key_norm, position_ids)
        values = jnp.swapaxes(self.value(value), -2, -3)
        return keys[..., None, :, :], values[..., None, :, :]

    def _normalise_and_rotate(
        self, heads: Array, norm: nnx.LayerNorm | None, position_ids: Array | None
    ) -> Array:
        """[*B, length, heads, head_dim] -> [*B, heads, length, head_dim], normalised, rotated."""
        if norm is not None:
            heads = norm(heads).astype(heads.dtype)
        heads = jnp.swapaxes(heads, -2, -3)
        if self.rotary_wavelength is None:
            return heads
        return rotary(heads, position_ids, max_wavelength=self.rotary_wavelength)

    def _merged(self, heads: Array, query: Array, values: Array) -> Array:
        """The output of the query's tokens.

        Args:
            heads: the output of attention [*B, K, G, T, head_dim].
            query: the tokens.
            values: those of the tokens, for `output_mod`: [*B, K, 1, T, head_dim].
        """

        def of_tokens(heads: Array) -> Array:  # [*B, T, N, head_dim]
            return jnp.swapaxes(ungroup_heads(heads, query.ndim - 2), -2, -3)

        shape, heads = heads.shape, of_tokens(heads)
        if self.output_mod is not None:
            values = of_tokens(jnp.broadcast_to(values, shape))
            heads = modified_rows(self.output_mod, heads, values).astype(heads.dtype)
        if self.gate is not None:
            heads = gated_rows(self.gate(query), heads, feature_ndim=2)
        return project_rows(self.output, heads, feature_ndim=2)

    # --- parameters, masks and biases, in groups of heads ---

    def _arguments(
        self, mask: Any, bias: Any, batch: tuple[int, ...], target: int, source: int
    ) -> dict[str, Any]:
        """All that `attention` takes besides the heads and dropout."""
        full = (*batch, self.num_heads, target, source)
        mask, bias = _grouped_pairs(mask, bias, full, self.num_key_heads)
        return {
            "score": self.score,
            "params": self._grouped(self.params_of_score),
            "normalizer": self.normalizer,
            "normalizer_params": self._grouped(self.normalizer_params),
            "mask": mask,
            "bias": bias,
        }

    def _grouped(self, params: Any) -> Any:
        def grouped(leaf: Array) -> Array:
            return group_heads(leaf, leaf.ndim - 1, self.num_key_heads)

        return jax.tree.map(grouped, values_of(params, self.dtype))


def _grouped_pairs(
    mask: Mask | Array | None, bias: Bias | Array | None, shape: tuple[int, ...], num_key_heads: int
) -> tuple[Mask | None, Bias | None]:
    """A mask and a bias with the head axis N split into the groups [K, G].

    Args:
        mask: one mask for all heads: [*B, T, S], or a `Mask` whose arrays have the batch axes *B.
            Or masks of each head: [*B, N, T, S], or the batch axes [*B, N].
        bias: a `Bias` whose arrays' leading axes broadcast to [*B, N]; or an array [T, S] or
            [*B, N, T, S] (sizes may be 1).
        shape: (*B, N, T, S).
        num_key_heads: K.

    Raises:
        ValueError: the mask or the bias does not broadcast.
    """
    batch_ndim = len(shape) - 3

    def with_head_axis(leaf: Array, core_ndim: int) -> Array:
        axis = jnp.ndim(leaf) - core_ndim
        return jnp.expand_dims(leaf, axis) if axis == batch_ndim > 0 else leaf

    if mask is not None:
        mask = as_mask(mask)
        mask = jax.tree.map(with_head_axis, mask, mask.core_ndims())
    if bias is not None:
        bias = jax.tree.map(jnp.asarray, as_bias(bias))
        # [N, T, S] as NumPy has it, and [*B, T, S] as masks have it, would look alike.
        for part in jax.tree.leaves(bias, is_leaf=lambda part: isinstance(part, DenseBias)):
            if isinstance(part, DenseBias):
                check_batch_axes("bias", part.table.shape, 2, shape[:-2])
    return (
        group_positions(mask, shape, num_key_heads),
        group_positions(bias, shape, num_key_heads),
    )


def _check_output_mod(output_mod: Any, token: jax.ShapeDtypeStruct) -> None:
    """Raises ValueError unless it is a function from two arrays like `token` to another."""
    name = getattr(output_mod, "__qualname__", output_mod)
    part = UserCode("output_mod", name, "close over no traced array")
    try:
        inspect.signature(output_mod).bind(token, token)
    except TypeError as error:
        part.require(False, f"it must be a function of (output, value): {error}")
    result = jax.eval_shape(
        lambda *tokens: part.call("the function", output_mod, *tokens, of=tokens), token, token
    )
    part.require(
        getattr(result, "shape", None) == token.shape
        and jnp.issubdtype(result.dtype, jnp.floating),
        f"the function must return a float array {list(token.shape)}, as output and value are",
        result,
    )
