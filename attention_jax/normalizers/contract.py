"""`Normalizer`, the base class of what turns a row of logits into weights.

Every normaliser here applies one function of one number to the logits of a row, each shifted by the
same threshold:

    w_j = weight(x_j - tau).

Softmax has exp, sigmoid attention the logistic function, entmax a power of a rectified line. The
threshold makes the weights sum to 1 (softmax: tau = logsumexp), or it is 0 (sigmoid). So all have
gradients of one form. With s_j = weight'(x_j - tau) and a cotangent dw,

    dx_j = s_j (dw_j - c),    c = sum_j s_j dw_j / sum_j s_j,  or 0 without a threshold.

For output O = sum_j w_j v_j, dw_j = dO . v_j, so c = dO . (sum_j s_j v_j / sum_j s_j). That vector,
the *mean by slopes*, is the output itself for softmax (s = w).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.names import is_of_library
from attention_jax.normalizers.softmax_rows import softmax_of_rows, summary_of_rows
from attention_jax.normalizers.threshold import shifted_rows
from attention_jax.scores.contract import init_shapes

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The base class of normalisers: a subclass is a frozen dataclass that defines `weight`.

        w_j = weight(x_j - tau),    x_j = transform(logits_j)

    `transform`, `weight` and its `inverse` are elementwise. Masked logits are -inf, before and
    after `transform`.

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
    # Whether the weights are a softmax, whose rows have a logsumexp and an entropy, or a sink.
    is_softmax: ClassVar[bool] = False

    # --- what a subclass defines ---

    def init(self, rng: Array) -> Params:
        """Initial parameters, {} if there are none to learn."""
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

    def transform(self, params: Params, logits: Array, num_keys: Any) -> Array:
        """The logits x that are normalised, an elementwise function of the given logits.

        Args:
            params: those of the normaliser.
            logits: [t, s], finite.
            num_keys: float [t, 1], the keys that each row may attend to, at least 1; None unless
                `uses_num_keys`.
        """
        return logits

    # --- what follows ---

    def __call__(self, params: Params, logits: Array, mask: Array | None = None) -> Array:
        """The weights [T, S] of logits [T, S], materialised and differentiable by JAX.

        Args:
            params: those of the normaliser.
            logits: float [T, S]; masked entries may hold anything.
            mask: bool [T, S], True = may attend; None for all.
        """
        bound = BoundNormalizer(self, params)
        logits = bound.transform_rows(logits, mask)
        weights = bound.weights_of_rows(logits)
        sink = self.sink_logit(params)
        if sink is not None:
            share, _ = summary_of_rows(logits).with_sink(sink)
            weights = weights * share[:, None]
        return weights

    def param_shapes(self) -> Params:
        """The shapes of the parameters, as a pytree of `jax.ShapeDtypeStruct`."""
        return {} if type(self).init is Normalizer.init else init_shapes(self)

    @property
    def searches(self) -> bool:
        """Whether a search finds tau, which visits all keys several times.

        The tau of softmax, the logsumexp, needs no search.
        """
        return self.sums_to_one and not self.is_softmax

    def sink_logit(self, params: Params) -> Array | None:
        """The logit [] of a softmax's sink, see `softmax_rows.py`; None for no sink."""
        return None


class BoundNormalizer(NamedTuple):
    """A normaliser with its parameters, in the dtype that it computes in."""

    normalizer: Normalizer
    params: Params

    def transform(self, logits: Array, num_keys: Array | None) -> Array:
        """The transformed logits [t, s], with -inf kept, of rows with num_keys [t] keys.

        Without a mask, too, a bias or the score of a user may be -inf.
        """
        if self.normalizer.__class__.transform is Normalizer.transform:
            return logits
        if num_keys is not None:
            num_keys = jnp.maximum(num_keys, 1)[:, None]
        masked = logits == -jnp.inf
        result = self.normalizer.transform(self.params, jnp.where(masked, 0, logits), num_keys)
        return jnp.where(masked, -jnp.inf, result.astype(logits.dtype))

    def weight(self, shifted: Array) -> Array:
        """The weights of shifted logits; the `weight` of a user does not see -inf.

        Its derivative with respect to a parameter could be 0 * -inf, NaN, there.
        """
        if is_of_library(self.normalizer):
            return self.normalizer.weight(self.params, shifted)
        masked = shifted == -jnp.inf
        weights = self.normalizer.weight(self.params, jnp.where(masked, 0, shifted))
        return jnp.where(masked, 0, weights.astype(shifted.dtype))

    def inverse(self, weight: Array) -> Array:
        """The shifted logits with these weights."""
        return self.normalizer.inverse(self.params, weight).astype(weight.dtype)

    def weights_and_slopes(self, shifted: Array) -> tuple[Array, Array]:
        """The weights of shifted logits, and their derivatives."""
        return jax.jvp(self.weight, (shifted,), (jnp.ones_like(shifted),))

    # --- rows that are materialised ---

    def transform_rows(self, logits: Array, mask: Array | None) -> Array:
        """The transformed logits [T, S], -inf where masked."""
        num_keys = None
        if self.normalizer.uses_num_keys:
            allowed = jnp.ones((), bool) if mask is None else mask
            num_keys = jnp.sum(jnp.broadcast_to(allowed, logits.shape), axis=1).astype(logits.dtype)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return self.transform(logits, num_keys)

    def weights_of_rows(self, logits: Array) -> Array:
        """The weights [T, S] of transformed logits, as if there was no sink."""
        if self.normalizer.is_softmax:
            return softmax_of_rows(logits, -1)
        shifted = shifted_rows(self, logits) if self.normalizer.searches else logits
        # A masked entry reads no cotangent: 0 times NaN would be NaN.
        allowed = logits > -jnp.inf
        weights = self.weight(jnp.where(allowed, shifted, 0))
        weights = jnp.where(allowed | jnp.isnan(logits), weights, 0)
        if not self.normalizer.searches:
            return weights
        total = jax.lax.stop_gradient(jnp.sum(weights, axis=1, keepdims=True))
        return weights / jnp.where(total == 0, 1, total)
