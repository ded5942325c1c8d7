"""Sigmoid attention: each weight depends on its own logit alone."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import checked_number
from attention_jax.normalizers.contract import Normalizer, Params

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sigmoid(Normalizer):
    """w_j = 1 / (1 + exp(-x_j - b)), with b = -log n for a row of n keys

    The weights of a row do not sum to 1. With b = -log n and logits near 0 their sum is near 1.

    Params: {"bias": []} with `learned`, added to b, 0 at first; {} otherwise.

    Attributes:
        bias: b, a number; None for -log n, with n the keys that the row may attend to.
        learned: whether a learned number is added to b.

    >>> Sigmoid()({}, jnp.array([[0.0, 0.0, 0.0]])).tolist()
    [[0.25, 0.25, 0.25]]
    >>> Sigmoid(bias=0.0)({}, jnp.array([[0.0, 0.0, 0.0]])).tolist()
    [[0.5, 0.5, 0.5]]

    Source: Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid
    Self-Attention", section 3 (their b).
    """

    bias: float | None = None
    learned: bool = False
    sums_to_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bias is not None:
            object.__setattr__(self, "bias", checked_number("bias", self.bias))
        if not isinstance(self.learned, bool):
            raise ValueError(f"learned must be True or False; got {self.learned!r}")

    @property
    def uses_num_keys(self) -> bool:  # type: ignore[override]
        return self.bias is None

    def init(self, rng: Array) -> Params:
        return {"bias": jnp.zeros(())} if self.learned else {}

    def transform(self, params: Params, logits: Array, num_keys: Any) -> Array:
        logits = logits - jnp.log(num_keys) if self.bias is None else logits + self.bias
        return logits + params["bias"] if self.learned else logits

    def weight(self, params: Params, shifted: Array) -> Array:
        return jax.nn.sigmoid(shifted)
