"""`Normalizer`, the base class of what turns a row of logits into weights.

Every normaliser here applies one function of one number to the logits of a row, each shifted by the
same threshold:

    w_j = weight(x_j - tau).

Softmax has exp, sigmoid attention the logistic function, entmax a power of a rectified line. The
threshold makes the weights sum to 1 (softmax: tau = logsumexp), or it is 0 (sigmoid). So all have
gradients of one form. With s_j = weight'(x_j - tau) and a cotangent dw,

    dx_j = s_j (dw_j - c),    c = sum_j s_j dw_j / sum_j s_j,  or 0 without a threshold.

For output O = sum_j w_j v_j, dw_j = dO . v_j, so c = dO . (sum_j s_j v_j / sum_j s_j). That vector,
here called the *mean*, is the output itself for softmax (s = w).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.normalizers.rows import BoundFamily, softmax_of_rows, summary_of_rows
from attention_jax.normalizers.threshold import find_shift
from attention_jax.scores.contract import init_shapes

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The base class of normalisers: a subclass is a frozen dataclass that defines `weight`.

        w_j = weight(x_j - tau),    x_j = transform(logits_j)

    A normaliser is two things: a `transform` of the logits, and a *family* of weights, which are
    `weight` and `inverse`. All three are elementwise. Masked logits are -inf, before and after
    `transform`.

    A subclass may define class variables, or properties where they depend on its fields.

    Class variables:
        sums_to_one: whether the threshold tau makes the weights of a row sum to 1. A search finds
            it, for which the subclass defines `inverse`. If False, tau is 0.
        convex: whether inverse(sum_j weight(x_j - tau)) is convex in tau. If True, Newton's method
            converges from below, and the search visits the keys less often.
        steep: whether the slope of `weight` is infinite where it rises from 0. If True, a second
            search counts tau from the smallest logit with a weight, which is then precise.
        uses_num_keys: whether `transform` reads the number of keys that each row may attend to.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Softplus(Normalizer):
    ...     def weight(self, params, shifted):
    ...         return jax.nn.softplus(shifted)
    ...     def inverse(self, params, weight):
    ...         return jnp.log(jnp.expm1(weight))
    >>> Softplus()({}, jnp.array([[0.0, 0.0, 5.0]])).round(1)
    Array([[0., 0., 1.]], dtype=float32)
    """

    sums_to_one: ClassVar[bool] = True
    convex: ClassVar[bool] = False
    steep: ClassVar[bool] = False
    uses_num_keys: ClassVar[bool] = False
    # Whether the family is softmax, whose rows have a logsumexp and an entropy and may have a sink.
    is_softmax: ClassVar[bool] = False

    # --- what a subclass defines ---

    def init(self, rng: Array) -> Params:
        """Initial parameters, {} if there are none to learn."""
        del rng
        return {}

    def weight(self, params: Params, shifted: Array) -> Array:
        """The weights of shifted logits, elementwise: >= 0, increasing, 0 with slope 0 at -inf."""
        raise ValueError(f"normalizer {type(self).__name__} must define weight(params, shifted)")

    def inverse(self, params: Params, weight: Array) -> Array:
        """The shifted logit with this weight, 0 < weight <= 1, if the weights sum to one."""
        raise ValueError(
            f"normalizer {type(self).__name__} must define inverse(params, weight), or"
            " sums_to_one = False"
        )

    def transform(self, params: Params, logits: Array, num_keys: Array | None) -> Array:
        """The logits x that are normalised, an elementwise function of the given logits.

        Args:
            params: those of the normaliser.
            logits: [t, s], finite.
            num_keys: float [t, 1], the keys that each row may attend to, at least 1; None unless
                `uses_num_keys`.
        """
        del params, num_keys
        return logits

    # --- what follows ---

    @property
    def family(self) -> Normalizer:
        """The normaliser whose `weight` and `inverse` are used: itself, except in `LogScaled`."""
        return self

    def family_params(self, params: Params) -> Params:
        """The parameters of the family among those of the normaliser."""
        return params

    def __call__(self, params: Params, logits: Array, mask: Array | None = None) -> Array:
        """The weights [T, S] of logits [T, S], materialised and differentiable by JAX.

        Args:
            params: those of the normaliser.
            logits: float [T, S]; masked entries may hold anything.
            mask: bool [T, S], True = may attend; None for all.
        """
        logits = transformed_rows(self, params, logits, mask)
        weights = weights_of_rows(self, params, logits)
        sink = sink_logit(self, params)
        if sink is not None:
            share, _ = summary_of_rows(logits).with_sink(sink)
            weights = weights * share[:, None]
        return weights

    def param_shapes(self) -> Params:
        """The shapes of the parameters, as a pytree of `jax.ShapeDtypeStruct`."""
        return {} if type(self).init is Normalizer.init else init_shapes(self)


def family_of(normalizer: Normalizer, params: Params) -> BoundFamily:
    """The family of a normaliser with its parameters."""
    return BoundFamily(normalizer.family, normalizer.family_params(params))


def sink_logit(normalizer: Normalizer, params: Params) -> Array | None:
    """The logit [] of a softmax's sink, see `rows.py`; None for no sink."""
    family: Any = normalizer.family
    has_sink = family.is_softmax and family.sink
    return normalizer.family_params(params)["sink"] if has_sink else None


def transformed(
    normalizer: Normalizer, params: Params, logits: Array, num_keys: Array | None
) -> Array:
    """`transform` of logits [t, s], with -inf kept, and num_keys [t].

    Without a mask, too, a bias or the score of a user may be -inf.
    """
    if normalizer.__class__.transform is Normalizer.transform:
        return logits
    if num_keys is not None:
        num_keys = jnp.maximum(num_keys, 1)[:, None]
    masked = logits == -jnp.inf
    result = normalizer.transform(params, jnp.where(masked, 0, logits), num_keys)
    return jnp.where(masked, -jnp.inf, result.astype(logits.dtype))


# --- rows that are materialised ---


def transformed_rows(
    normalizer: Normalizer, params: Params, logits: Array, mask: Array | None
) -> Array:
    """The transformed logits [T, S], -inf where masked."""
    num_keys = None
    if normalizer.uses_num_keys:
        allowed = jnp.ones((), bool) if mask is None else mask
        num_keys = jnp.sum(jnp.broadcast_to(allowed, logits.shape), axis=1).astype(logits.dtype)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    return transformed(normalizer, params, logits, num_keys)


def weights_of_rows(normalizer: Normalizer, params: Params, logits: Array) -> Array:
    """The weights [T, S] of transformed logits, as if there was no sink."""
    if normalizer.family.is_softmax:
        return softmax_of_rows(logits, -1)
    weights = undivided_weights_of_rows(normalizer, params, logits)
    if not normalizer.family.sums_to_one:
        return weights
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=1, keepdims=True))
    return weights / jnp.where(total == 0, 1, total)


def undivided_weights_of_rows(normalizer: Normalizer, params: Params, logits: Array) -> Array:
    """The weights of a family other than softmax, before the division by their sum."""
    family, shifted = family_of(normalizer, params), logits
    if family.normalizer.sums_to_one:
        zeros = varying_as(jnp.zeros(logits.shape[0], logits.dtype), logits, params)
        shift = find_shift(
            family, lambda update, carry: update(carry, logits), zeros, logits.shape[1]
        )
        shifted = shift.shifted(logits)
    # A masked entry reads no cotangent: 0 times NaN would be NaN.
    allowed = logits > -jnp.inf
    weights = family.weight(jnp.where(allowed, shifted, 0))
    return jnp.where(allowed | jnp.isnan(logits), weights, 0)
