"""Local attention as Flax NNX modules, which hold parameters and settings."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import float_array
from attention_jax.core.checks import check_choice, check_integer
from attention_jax.functional.centers import (
    checked_lengths,
    monotonic_centers,
    predicted_centers,
    reversed_centers,
)
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.functional.memory import Memory
from attention_jax.nn.attention import Attention
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Score

Array = jax.Array
Alignment = Literal["monotonic", "reversed"]


class _LocalAttention(Attention):
    """Attention through windows around centers, for both kinds of local attention."""

    takes_normalizers = False

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        radius: int,
        sigma: float | None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(score, query_dim, key_dim, rngs=rngs, **options)
        self.radius, self.sigma = check_integer("radius", radius, 0), sigma

    def _through_windows(
        self, query: Array, key: Array | Memory, value: Array | None, centers: Array, **call: Any
    ) -> Any:
        window: Any = {"centers": centers, "radius": self.radius, "sigma": self.sigma}
        functions: Any = {"attend": local_attention, "weigh": local_attention_weights}
        return self._attend(query, key, value, **functions, **window, **call)


class LocalMAttention(_LocalAttention):
    """Local-m: attention through a window around a known alignment.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        radius: D; a query sees the keys at most D from its center.
        alignment: "monotonic", p_i = i; or "reversed", p_i = S - 1 - i.
        rngs: the streams of the initial parameters and of "dropout".
        options: `dropout_rate`, `deterministic`, `keep_rngs`, `implementation`, `dtype` and
            `param_dtype` as in `Attention`.

    Raises:
        ValueError: there is no such score or alignment, or the radius is not an integer of at
            least 0.

    >>> attend = LocalMAttention("dot", 4, 4, radius=1, rngs=nnx.Rngs(0))
    >>> _, weights = attend(jnp.ones((1, 4)), jnp.ones((5, 4)), return_weights=True)
    >>> weights.tolist()
    [[0.5, 0.5, 0.0, 0.0, 0.0]]

    Source: Luong, Pham and Manning 2015, section 3.2, "monotonic alignment (local-m)".
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        radius: int,
        alignment: Alignment = "monotonic",
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(score, query_dim, key_dim, radius=radius, sigma=None, rngs=rngs, **options)
        check_choice("alignment", alignment, Alignment)
        self.alignment = alignment

    def __call__(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        source_lengths: Array | None = None,
        first: Array | int = 0,
        centers: Array | None = None,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attends.

        Args:
            query, key, value, mask, bias, deterministic, dropout_rng, return_weights: as in
                `Attention`.
            source_lengths: int [*B], how many keys are real, for "reversed"; None for all. `mask`
                must exclude padding.
            first: position of the first query, for a part of a longer sequence.
            centers: [*B, T], an alignment that replaces the module's.
        """
        if centers is None:
            centers = monotonic_centers(query.shape[-2]) + first
            if self.alignment == "reversed":
                lengths = checked_lengths(_lengths(key, source_lengths), query.shape[:-2])
                centers = reversed_centers(query.shape[-2], lengths) - first
        return self._through_windows(
            query,
            key,
            value,
            centers,
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )


class LocalPAttention(_LocalAttention):
    """Local-p: attention through a window around an alignment that each query predicts.

    Besides the score's it has the parameters W [Dq, A] (`position_kernel`) and v [A]
    (`position_v`), whose gradients come through a Gaussian around the predicted position.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        radius: D; a query sees the keys at most D from its center.
        hidden_dim: A; None for `query_dim`.
        sigma: standard deviation of the Gaussian; None for the paper's D / 2.
        rngs: the streams of the initial parameters and of "dropout".
        options: `dropout_rate`, `deterministic`, `keep_rngs`, `implementation`, `dtype` and
            `param_dtype` as in `Attention`.

    Raises:
        ValueError: there is no such score, a size is below 1, or `sigma` is not above 0 (as its
            default is with radius 0).

    >>> attend = LocalPAttention("general", 4, 6, radius=2, rngs=nnx.Rngs(0))
    >>> attend(jnp.ones((3, 5, 4)), jnp.ones((3, 7, 6))).shape
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
        sigma: float | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Any,
    ):
        if sigma is None:
            if check_integer("radius", radius, 0) == 0:
                raise ValueError("radius must be at least 1, or sigma given; got radius 0")
            sigma = radius / 2
        if not sigma > 0:
            raise ValueError(f"sigma must be greater than 0; got {sigma}")
        super().__init__(
            score, query_dim, key_dim, radius=radius, sigma=sigma, rngs=rngs, **options
        )
        hidden_dim = query_dim if hidden_dim is None else hidden_dim
        check_integer("hidden_dim", hidden_dim)
        kernel = jax.random.normal(rngs.params(), (query_dim, hidden_dim)) * query_dim**-0.5
        # Small, so that every window starts in the middle, where the sigmoid is steepest.
        v = jax.random.normal(rngs.params(), (hidden_dim,)) * 0.1 * hidden_dim**-0.5
        self.position_kernel, self.position_v = (
            nnx.Param(param.astype(self.param_dtype)) for param in (kernel, v)
        )
        self._set_dropout(dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        source_lengths: Array | None = None,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attends.

        Args:
            query, key, value, mask, bias, deterministic, dropout_rng, return_weights: as in
                `Attention`.
            source_lengths: int [*B], how many keys are real, the S of the formula; None for all.
        """
        params = {"kernel": self.position_kernel[...], "v": self.position_v[...]}
        params = {name: self._cast(param) for name, param in params.items()}
        query = self._cast(float_array("query", query))
        centers = predicted_centers(query, params, _lengths(key, source_lengths))
        return self._through_windows(
            query,
            key,
            value,
            centers,
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )


def _lengths(key: Array | Memory, source_lengths: Array | None) -> Array:
    if source_lengths is not None:
        return source_lengths
    return jnp.asarray((key.keys if isinstance(key, Memory) else key).shape[-2])
