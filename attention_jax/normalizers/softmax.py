"""Softmax, with or without a sink: the normaliser of all classical attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.normalizers.contract import Normalizer, Params
from attention_jax.normalizers.online_softmax import SoftmaxState

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Softmax(Normalizer):
    """w_j = exp(x_j) / (sum_k exp(x_k) + exp(sink)); without a sink, the last term is absent

    A sink is one more key, with the value 0, to which every query may attend. It takes the weight
    for which a query has no use. In statistics it counts as a key.

    Params: {"sink": []}, a logit, if there is a sink; {} otherwise.

    Attributes:
        sink: whether there is a sink; its logit is 0 at first.

    >>> Softmax()({}, jnp.array([[0.0, 0.0]])).tolist()
    [[0.5, 0.5]]
    >>> Softmax(sink=True)({"sink": jnp.array(0.0)}, jnp.zeros((1, 3))).tolist()
    [[0.25, 0.25, 0.25]]

    Source: Vaswani et al. 2017, section 3.2.1; Agarwal et al. 2025 (gpt-oss), section 2.2, for a
    learned sink per head.
    """

    sink: bool = False
    convex: ClassVar[bool] = True
    has_statistics: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.sink, bool):
            raise ValueError(f"sink must be True or False; got {self.sink!r}")

    def init(self, rng: Array) -> Params:
        del rng
        return {"sink": jnp.zeros(())} if self.sink else {}

    def weight(self, params: Params, shifted: Array) -> Array:
        del params
        return jnp.exp(shifted)

    def safe_weight(self, params: Params, shifted: Array) -> Array:
        return self.weight(params, shifted)  # which reads no parameters

    def inverse(self, params: Params, weight: Array) -> Array:
        del params
        return jnp.log(weight)

    def sink_logit(self, params: Params) -> Array | None:
        return params["sink"] if self.sink else None

    # The threshold is the logsumexp, which needs no search: one visit sums the exponentials of the
    # logits shifted by the largest so far.
    def visits(self, dtype: Any) -> int:
        del dtype
        return 0

    def empty_state(
        self, params: Params, rows: int, value_dim: int, dtype: Any, *, statistics: bool
    ) -> SoftmaxState:
        sink = self.sink_logit(params)
        return SoftmaxState.empty(rows, value_dim, dtype, statistics=statistics, sink=sink)

    def weights_of_rows(self, params: Params, logits: Array, mask: Array | None) -> Array:
        logits, mask = self.with_sink(params, logits, mask)
        weights = softmax_of_rows(logits, mask, -1)
        return weights[:, :-1] if self.sink else weights

    def with_sink(
        self, params: Params, logits: Array, mask: Array | None
    ) -> tuple[Array, Array | None]:
        """Logits and mask [T, S] with one more column if there is a sink.

        A row without keys has no sink either.
        """
        sink = self.sink_logit(params)
        if sink is None:
            return logits, mask
        allowed = jnp.ones(logits.shape, bool) if mask is None else mask
        column = jnp.broadcast_to(sink.astype(logits.dtype), (logits.shape[0], 1))
        any_allowed = (allowed & (logits != -jnp.inf)).any(axis=1, keepdims=True)
        logits = jnp.concatenate([logits, column], axis=1)
        return logits, jnp.concatenate([allowed, any_allowed], axis=1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_of_rows(logits: Array, mask: Array | None, axis: int) -> Array:
    """The softmax over the allowed entries along one axis; 0 where there are none."""
    _, exponentials, normalizer = shifted_exponentials(logits, mask, axis)
    return exponentials / jnp.where(normalizer == 0, 1, normalizer)


# The Jacobian of one row is dw_j / dl_k = w_j (delta_jk - w_k), so a tangent dl becomes
#     dw_j = w_j (dl_j - sum_k w_k dl_k).
# The Jacobian is symmetric, so the same formula is the vector-Jacobian product. It is a function of
# w, so JAX can differentiate it again. It is 0 for a row without allowed keys (all w are 0), and it
# does not read the dl of masked entries.
@softmax_of_rows.defjvp
def _softmax_jvp(axis, primals, tangents):
    logits, mask = primals
    dlogits = tangents[0]
    weights = softmax_of_rows(logits, mask, axis)
    dlogits = jnp.where(weights > 0, dlogits, 0)
    mean = jnp.sum(weights * dlogits, axis=axis, keepdims=True)
    return weights, weights * (dlogits - mean)


def shifted_exponentials(
    logits: Array, mask: Array | None, axis: int
) -> tuple[Array, Array, Array]:
    """The largest allowed logit M (0 without keys), exp(logits - M), and the sum of those."""
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    largest = jnp.max(logits, axis=axis, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    exponentials = jnp.exp(logits - largest)
    return largest, exponentials, jnp.sum(exponentials, axis=axis, keepdims=True)
