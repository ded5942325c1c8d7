"""Entmax, whose weights are exactly 0 for all but the largest logits; sparsemax is a case of it."""

import dataclasses

import jax
import jax.numpy as jnp

from attention_jax.core.checks import checked_number
from attention_jax.normalizers.contract import Normalizer, Params

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Entmax(Normalizer):
    """w_j = [1 + (alpha - 1)(x_j - tau)]_+^(1 / (alpha - 1)), with sum_j w_j = 1

    Softmax is the limit alpha -> 1, sparsemax the case alpha = 2. The larger alpha is, the fewer
    weights are above 0. The threshold of the source is (alpha - 1) tau - 1.

    A weight w is a power of a difference w^(alpha - 1) / (alpha - 1) of logits. Where that is below
    the smallest float, the weight is rounded: in float32 weights below 6e-5 for alpha = 10, and
    below 0.05 for alpha = 30. The others take up the difference, so that the row sums to 1. For
    alpha > 2 the slope w^(2 - alpha) is infinite where a weight rises from 0. Gradients limit it to
    2e5 in float32 (6e11 in float64): they are less precise where a single weight of a row is that
    steep, and too small where several are. In float32 gradients of attention to random tokens have
    errors of 4e-7 for alpha = 3, 3e-4 for alpha = 5 and 0.1 for alpha = 10.

    Params: none.

    Attributes:
        alpha: a number above 1, at most 1e6.

    >>> Entmax(2.0)({}, jnp.array([[0.5, 0.0, -1.0]])).tolist()
    [[0.75, 0.25, 0.0]]
    >>> Entmax(1.5)({}, jnp.array([[0.0, 0.0, -4.0]])).round(4).tolist()
    [[0.5, 0.5, 0.0]]

    Source: Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models", equation 7;
    Martins and Astudillo 2016 for sparsemax; Goncalves et al. 2025 (AdaSplash) for thresholds over
    tiles, there by Halley's method and bisection.
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        alpha = checked_number("alpha", self.alpha)
        if not 1 < alpha <= 1e6:
            raise ValueError(f"alpha must be above 1 (1 is softmax), at most 1e6; got {alpha!r}")
        object.__setattr__(self, "alpha", alpha)

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return self.alpha <= 2

    @property
    def steep(self) -> bool:  # type: ignore[override]
        return self.alpha > 2

    def weight(self, params: Params, shifted: Array) -> Array:
        line = (self.alpha - 1) * shifted
        power = 1 / (self.alpha - 1)
        if self._near_softmax:  # log(1 + ...), since the power of a rounded line would be wrong
            positive = line > -1
            return jnp.where(positive, jnp.exp(jnp.log1p(jnp.where(positive, line, 0)) * power), 0)
        positive = line > 0
        if power.is_integer():
            return jnp.where(positive, line, 0) ** int(power)
        line = jnp.where(positive, line, 1)
        weights = line**power
        if self.steep:
            # The slope of w is w^(2 - alpha), and a gradient s_j (dw_j - c) has the rounding error
            # of dw_j times s_j. With one steep key in a row, c is nearly its dw_j, and the
            # gradients of all keys are the same for every slope far above the others.
            limit = float(jnp.finfo(line.dtype).eps) ** -0.75
            least = limit ** -((self.alpha - 1) / (self.alpha - 2))
            lifted = line + jax.lax.stop_gradient(jnp.maximum(least - line, 0))
            lifted = lifted**power
            weights = lifted + jax.lax.stop_gradient(weights - lifted)
        return jnp.where(positive, weights, 0)

    def inverse(self, params: Params, weight: Array) -> Array:
        if self._near_softmax:
            return jnp.expm1((self.alpha - 1) * jnp.log(weight)) / (self.alpha - 1)
        return weight ** (self.alpha - 1) / (self.alpha - 1)

    @property
    def _near_softmax(self) -> bool:
        """Whether tau is counted from the formula's 1, which softmax needs, or from 0.

        Counted from 0, a small weight of a large alpha is not the difference of rounded numbers.
        """
        return self.alpha < 1.25
