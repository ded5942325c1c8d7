"""Softmax, with or without a sink: the normaliser of all classical attention."""

import dataclasses

import jax
import jax.numpy as jnp

from attention_jax.normalizers.contract import Normalizer, Params

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Softmax(Normalizer):
    """w_j = exp(x_j) / (sum_k exp(x_k) + exp(sink)); without a sink, the last term is absent

    A sink is one more key, with the value 0, to which every query may attend. It takes the weight
    for which a query has no use. In statistics it counts as a key. A row without keys has none.

    Params: {"sink": []}, a logit, if there is a sink; {} otherwise.

    Attributes:
        sink: whether there is a sink; its logit is 0 at first.

    >>> Softmax()({}, jnp.array([[0.0, 0.0]])).tolist()
    [[0.5, 0.5]]
    >>> Softmax(sink=True)({"sink": jnp.array(0.0)}, jnp.zeros((1, 3))).round(4).tolist()
    [[0.25, 0.25, 0.25]]

    Source: Vaswani et al. 2017, section 3.2.1; Agarwal et al. 2025 (gpt-oss), section 2.2, for a
    learned sink per head.
    """

    sink: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sink, bool) or (self.sink and not self.is_softmax):
            raise ValueError(
                f"sink must be True or False, and False with another weight; got {self.sink!r}"
            )

    @property
    def is_softmax(self) -> bool:  # type: ignore[override]
        return type(self).weight is Softmax.weight

    def init(self, rng: Array) -> Params:
        return {"sink": jnp.zeros(())} if self.sink else {}

    def weight(self, params: Params, shifted: Array) -> Array:
        return jnp.exp(shifted)

    def sink_logit(self, params: Params) -> Array | None:
        return params["sink"] if self.sink and self.is_softmax else None
