"""Settings of encoder and decoder blocks."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attention_jax.core.checks import check_choice, check_integer, checked_fraction, checked_rate
from attention_jax.nn.feed_forward import Activation
from attention_jax.normalizers import DEFAULT_NORMALIZER, get_normalizer

Norm = Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings that encoder and decoder blocks share.

    Attributes:
        dim: size of the tokens and of every layer, a multiple of `num_heads`.
        hidden_dim: hidden size of the feed-forward layers.
        num_heads: heads of the self attentions, and of "global" cross attention: more than 1 makes
            it multi-head attention, between projections. Other cross attention has one head.
        num_key_heads: heads of keys and values in the self attentions (grouped-query), a divisor of
            `num_heads`; None for `num_heads`.
        activation: of the feed-forward layers, see `FeedForward`.
        norm: where layer normalisation stands: "pre", x + f(norm x); or "post", norm(x + f(x)).
        normalize_qk: layer normalisation of queries and keys in the self attentions.
        self_attention_normalizer: the normaliser of the self attentions, as in `get_normalizer`:
            "softmax", "entmax(alpha=1.5)", "softmax(sink=True)", "module:Name".
        output_gate: whether a gate multiplies the heads of multi-head attention, see
            `MultiHeadAttention`: of the self attentions, and of "global" cross attention with
            several heads.
        dropout_rate: of embeddings and the outputs of layers, in training.
        attention_dropout_rate: of attention weights; None for `dropout_rate`.

    Raises:
        ValueError: a size is below 1, sizes do not divide, or a name is unknown.

    >>> BlockConfig(dim=16, num_heads=4, norm="post", activation="swiglu").hidden_dim
    64
    >>> BlockConfig(dim=16, num_heads=3)
    Traceback (most recent call last):
    ValueError: dim must be a multiple of 3 heads; got 16
    """

    dim: int = 64
    hidden_dim: int = 64
    num_heads: int = 1
    num_key_heads: int | None = None
    activation: Activation = "relu"
    norm: Norm = "pre"
    normalize_qk: bool = False
    self_attention_normalizer: str = DEFAULT_NORMALIZER
    output_gate: bool = False
    dropout_rate: float = 0.0
    attention_dropout_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "num_heads"):
            check_integer(name, getattr(self, name))
        if self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of {self.num_heads} heads; got {self.dim}")
        if self.num_key_heads is not None:
            check_integer("num_key_heads", self.num_key_heads)
            if self.num_heads % self.num_key_heads:
                raise ValueError(
                    f"num_key_heads must divide {self.num_heads} heads; got {self.num_key_heads}"
                )
        get_normalizer(self.self_attention_normalizer)
        check_choice("activation", self.activation, Activation)
        check_choice("norm", self.norm, Norm)
        checked_rate(self.dropout_rate)
        if self.attention_dropout_rate is not None:
            checked_fraction("attention_dropout_rate", self.attention_dropout_rate)

    @property
    def rate_of_weights(self) -> float:
        """The dropout rate of attention weights."""
        rate = self.attention_dropout_rate
        return self.dropout_rate if rate is None else rate

    @property
    def largest_dropout_rate(self) -> float:
        """0 if nothing is dropped."""
        return max(self.dropout_rate, self.rate_of_weights)
