"""Local attention as Flax NNX modules, which hold parameters and settings."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.checks import check_choice, check_integer, checked_fraction
from attention_jax.functional.centers import monotonic_centers, predicted_centers, reversed_centers
from attention_jax.functional.checks import checked_implementation
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.nn.attention import Attended, ScoreModule
from attention_jax.scores import Score

Array = jax.Array
Alignment = Literal["monotonic", "reversed"]


class _LocalAttention(ScoreModule):
    """Attention through windows around centers, for both kinds of local attention."""

    sigma: float | None = None
    _centers: Callable[..., Array]  # of (query, lengths, first): [*B, T] or [T]

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        radius: int,
        dropout_rate: float = 0.0,
        implementation: str | None = None,
        **options: Any,
    ):
        super().__init__(score, query_dim, key_dim, **options)
        self.radius = check_integer("radius", radius, 0)
        self.dropout_rate = checked_fraction("dropout_rate", dropout_rate)
        self.is_random = self.dropout_rate > 0
        self.implementation = checked_implementation(implementation)

    def _attend(
        self,
        arguments: dict[str, Any],
        *,
        lengths: Array | None,
        first: Array | int,
        rng: Array | None,
        return_weights: bool,
        **others: Any,
    ) -> Attended:
        lengths = jnp.asarray(arguments["key"].shape[-2]) if lengths is None else lengths
        arguments["centers"] = self._centers(arguments["query"], lengths, first)
        arguments |= {"radius": self.radius, "sigma": self.sigma}
        functions = (local_attention, local_attention_weights)
        return self._dropped(functions, arguments, rng, return_weights)


class LocalMAttention(_LocalAttention):
    """Local-m: attention through a window around a known alignment.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq, the size of queries [*B, T, Dq].
        key_dim: Dk.
        alignment: "monotonic", p_i = i; or "reversed", p_i = S - 1 - i.
        options: `radius`, D, the keys that a query sees on either side of its center; `rngs`,
            `dropout_rate` (of weights, in calls with an `rng`), `implementation`, `dtype` and
            `param_dtype`, as in `Attention`.

    Raises:
        ValueError: there is no such score or alignment, or the radius is not an integer of at
            least 0.

    >>> layer = LocalMAttention("dot", 4, 4, radius=1, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 4)), jnp.ones((5, 4)), return_weights=True)[1].tolist()
    [[0.5, 0.5, 0.0, 0.0, 0.0]]

    For centers of your own, call `attention_jax.local_attention`.

    Source: Luong, Pham and Manning 2015, section 3.2, "monotonic alignment (local-m)".
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        alignment: Alignment = "monotonic",
        **options: Any,
    ):
        super().__init__(score, query_dim, key_dim, **options)
        check_choice("alignment", alignment, Alignment)
        self.alignment = alignment

    def _centers(self, query: Array, lengths: Array, first: Array | int) -> Array:
        if self.alignment == "monotonic":
            return monotonic_centers(query.shape[-2]) + first
        return reversed_centers(query.shape[-2], lengths) - first


class LocalPAttention(_LocalAttention):
    """Local-p: attention through a window around an alignment that each query predicts.

    Besides the score's parameters it has W [Dq, A] (`position_kernel`) and v [A] (`position_v`).
    Their gradients come through a Gaussian around the predicted position, whose standard deviation
    is D / 2, as in the paper.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        radius: D, at least 1; a query sees the keys at most D from its center.
        hidden_dim: A; None for `query_dim`.
        rngs: the stream of the initial parameters.
        options: `dropout_rate`, `implementation`, `dtype` and `param_dtype` as in
            `LocalMAttention`.

    Raises:
        ValueError: there is no such score, or a size is below 1.

    >>> layer = LocalPAttention("general", 4, 6, radius=2, rngs=nnx.Rngs(0))
    >>> jax.jit(layer)(jnp.ones((3, 5, 4)), jnp.ones((3, 7, 6))).shape
    (3, 5, 6)

    Source: Luong, Pham and Manning 2015, section 3.2, "predictive alignment (local-p)".
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        radius: int,
        hidden_dim: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.sigma = check_integer("radius", radius) / 2
        super().__init__(score, query_dim, key_dim, radius=radius, rngs=rngs, **options)
        hidden_dim = query_dim if hidden_dim is None else check_integer("hidden_dim", hidden_dim)
        kernel = jax.random.normal(rngs.params(), (query_dim, hidden_dim)) * query_dim**-0.5
        # Small, so that every window starts in the middle, where the sigmoid is steepest.
        v = jax.random.normal(rngs.params(), (hidden_dim,)) * 0.1 * hidden_dim**-0.5
        self.position_kernel, self.position_v = (
            nnx.Param(param.astype(self.param_dtype)) for param in (kernel, v)
        )

    def _centers(self, query: Array, lengths: Array, first: Array | int) -> Array:
        # A query predicts its center from its features alone.
        params = {"kernel": self.position_kernel[...], "v": self.position_v[...]}
        params = {name: self._cast(param) for name, param in params.items()}
        return predicted_centers(query, params, lengths)
