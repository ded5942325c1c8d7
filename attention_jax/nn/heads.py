"""The heads of multi-head attention: from tokens to heads, in groups, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.functional.heads import group_heads, pairs_for_heads, ungroup_heads
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.empty_rows import gated_rows, project_rows
from attention_jax.nn.parameters import Dtype, checked_tokens, values_of
from attention_jax.nn.position_encoding import PositionIds, Rotation
from attention_jax.normalizers import Normalizer
from attention_jax.scores import Score

Array = jax.Array


class Heads(DropoutModule):
    """The projections and parameters of N heads in K groups; `MultiHeadAttention` makes them."""

    score: Score
    normalizer: Normalizer
    params: Any  # of the score, each leaf [N, ...]
    normalizer_params: Any  # each leaf [N, ...]
    num_heads: int
    num_key_heads: int
    query: nnx.LinearGeneral
    key: nnx.LinearGeneral
    value: nnx.LinearGeneral
    output: nnx.LinearGeneral
    gate: nnx.LinearGeneral | None
    query_norm: nnx.LayerNorm | None
    key_norm: nnx.LayerNorm | None
    rotation: Rotation | None
    dtype: Dtype | None

    # --- projections: [*B, length, dim] to heads [*B, K, G, length, head_dim], and back ---

    def _queries(self, x: Array, position_ids: PositionIds | None) -> Array:
        heads = self._normalise_and_rotate(self.query(x), self.query_norm, position_ids)
        return group_heads(heads, 2, self.num_key_heads)

    def _keys_and_values(
        self, key: Array, value: Array, position_ids: PositionIds | None
    ) -> tuple[Array, Array]:
        key = checked_tokens("key", key, self.key)
        value = checked_tokens("value", value, self.value)
        if value.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"value must be [*B, {key.shape[-2]}, ...] to match key {list(key.shape)};"
                f" got {list(value.shape)}"
            )
        keys = self._normalise_and_rotate(self.key(key), self.key_norm, position_ids)
        values = jnp.swapaxes(self.value(value), -2, -3)
        return keys[..., None, :, :], values[..., None, :, :]

    def _normalise_and_rotate(
        self, heads: Array, norm: nnx.LayerNorm | None, position_ids: PositionIds | None
    ) -> Array:
        """[*B, length, heads, head_dim] -> [*B, heads, length, head_dim], normalised, rotated."""
        if norm is not None:
            heads = norm(heads)
        heads = jnp.swapaxes(heads, -2, -3)
        return heads if self.rotation is None else self.rotation(heads, position_ids)

    def _merged(self, heads: Array, query: Array) -> Array:
        """The output, from heads [*B, K, G, T, head_dim] and the tokens of the query."""
        heads = jnp.swapaxes(ungroup_heads(heads, query.ndim - 2), -2, -3)
        if self.gate is not None:
            heads = gated_rows(self.gate(query), heads, feature_ndim=2)
        return project_rows(self.output, heads, feature_ndim=2)

    # --- parameters, masks and biases, in groups of heads ---

    def _own(self) -> dict[str, Any]:
        """The score, the normaliser and their parameters, as `attention` takes them."""
        return {
            "score": self.score,
            "params": self._grouped(self.params),
            "normalizer": self.normalizer,
            "normalizer_params": self._grouped(self.normalizer_params),
        }

    def _grouped(self, params: Any) -> Any:
        def grouped(leaf: Array) -> Array:
            return group_heads(leaf, leaf.ndim - 1, self.num_key_heads)

        return jax.tree.map(grouped, values_of(params, self.dtype))

    def _pairs(
        self, mask: Any, bias: Any, batch: tuple[int, ...], target: int, source: int
    ) -> dict[str, Any]:
        full = (*batch, self.num_heads, target, source)
        pairs = pairs_for_heads(mask, bias, full, self.num_key_heads)
        return dict(zip(("mask", "bias"), pairs, strict=True))
