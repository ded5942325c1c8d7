"""Logits that grow with the number of keys, for any normaliser."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer, checked_number
from attention_jax.core.names import of_field
from attention_jax.normalizers.contract import Normalizer, Params
from attention_jax.normalizers.softmax import Softmax

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LogScaled(Normalizer):
    """normalizer(s log(n) x) for a row of n keys; or a factor that starts at a length `start`

    A softmax over more keys needs larger logits to be as sharp: with logits that grow with log n,
    the weight of the best of n keys does not fall with n. The bias is a part of the logits.

    Params: those of `normalizer`; {"scale": [], "normalizer": those} if s is learned.

    Attributes:
        normalizer: the `Normalizer` of the scaled logits.
        scale: s, or where it starts if it is learned.
        learned: whether s is learned.
        start: a length n_0; the factor is then s max(1, log(1 + n) / log(1 + n_0)), which is s up
            to n_0 keys. None for s log n.

    >>> two = LogScaled(scale=2.0)({}, jnp.array([[0.0, 1.0]]))
    >>> bool(jnp.allclose(two[0, 1], jax.nn.sigmoid(2 * jnp.log(2.0))))
    True

    Source: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention" (SSMax, their s is learned,
    one per head); Chiang and Cholak 2022, section 5.3, for logits times log n; `start` is ours.
    """

    normalizer: Normalizer = Softmax()
    scale: float = 1.0
    learned: bool = False
    start: int | None = None
    uses_num_keys: ClassVar[bool] = True
    sums_to_one = of_field("normalizer", "sums_to_one")
    convex = of_field("normalizer", "convex")
    steep = of_field("normalizer", "steep")
    is_softmax = of_field("normalizer", "is_softmax")

    def __post_init__(self) -> None:
        if not isinstance(self.normalizer, Normalizer):
            raise ValueError(f"normalizer must be a Normalizer; got {self.normalizer!r}")
        object.__setattr__(self, "scale", checked_number("scale", self.scale))
        if not isinstance(self.learned, bool):
            raise ValueError(f"learned must be True or False; got {self.learned!r}")
        if self.start is not None:
            check_integer("start", self.start)

    def init(self, rng: Array) -> Params:
        params = self.normalizer.init(rng)
        return {"scale": jnp.array(self.scale), "normalizer": params} if self.learned else params

    def transform(self, params: Params, logits: Array, num_keys: Any) -> Array:
        scale: Any = params["scale"] if self.learned else self.scale
        if self.start is None:
            factor = jnp.log(num_keys)
        else:
            factor = jnp.maximum(jnp.log1p(num_keys) / math.log1p(self.start), 1)
        scaled = scale * factor * logits
        return self.normalizer.transform(self._inner(params), scaled, num_keys)

    def weight(self, params: Params, shifted: Array) -> Array:
        return self.normalizer.weight(self._inner(params), shifted)

    def inverse(self, params: Params, weight: Array) -> Array:
        return self.normalizer.inverse(self._inner(params), weight)

    def sink_logit(self, params: Params) -> Array | None:
        return self.normalizer.sink_logit(self._inner(params))

    def _inner(self, params: Params) -> Params:
        """The parameters of the inner normaliser."""
        return params["normalizer"] if self.learned else params
