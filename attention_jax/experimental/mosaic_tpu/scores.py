"""The scores whose `pair` and `pair_vjp` run in kernels on a TPU, equal in all values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from attention_jax.core.products import einsum
from attention_jax.experimental.mosaic_tpu.tanh_tiles import tanh_tile, tanh_tile_vjp
from attention_jax.experimental.score_forms import form_of
from attention_jax.scores import Additive, Dot, Params, Score, WrappedScore

Array = jax.Array


@functools.singledispatch
def on_tpu(score: Score) -> Score:
    """The score in kernels: by default itself, as every score of a user. See `form_of`."""
    return score


@dataclasses.dataclass(frozen=True)
class DotOnTpu(Dot):
    """The tiles of a dot product, without barriers in its gradient: Mosaic cannot lower them."""

    score: Dot = Dot()

    def factor(self, q_features: Array) -> float:
        return self.score.factor(q_features)

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        dlogits = self._scaled(dlogits, q_features)
        dk_features = transposed_product(q_features, dlogits)  # first: fewer instructions
        dq_features = einsum("ts,sd->td", dlogits, k_features)
        return jax.tree.map(jnp.zeros_like, params), dq_features, dk_features


@dataclasses.dataclass(frozen=True)
class AdditiveOnTpu(Score):
    """The tiles of `Additive`; without the key's part, this is the last feature of a key."""

    key_part: bool = True

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        logits = tanh_tile(params["v"], q_features, k_features[:, : q_features.shape[1]])
        return logits if self.key_part else logits - k_features[:, -1:].T

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        features = q_features, k_features[:, : q_features.shape[1]]
        dv, dq_features, dk_features = tanh_tile_vjp(params["v"], *features, dlogits)
        if not self.key_part:
            dkey_part = -dlogits.sum(0, keepdims=True).T
            dk_features = jnp.concatenate([dk_features, dkey_part], axis=-1)
        return {**params, "v": dv}, dq_features, dk_features


@on_tpu.register
def _(score: Dot) -> Score:
    return DotOnTpu(score)


@on_tpu.register
def _(score: Additive) -> Score:
    return AdditiveOnTpu(score.key_part)


@on_tpu.register
def _(score: WrappedScore) -> Score:
    return dataclasses.replace(score, score=form_of(on_tpu, score.score))


def transposed_product(left: Array, right: Array) -> Array:
    """right^T left, ([t, d], [t, s]) -> [s, d], as (left^T right)^T: `tall_product` in a kernel."""
    return einsum("dt,ts->ds", left.T, right).T
