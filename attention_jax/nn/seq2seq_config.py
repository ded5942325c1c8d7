"""The settings of a sequence-to-sequence model, and what its parts are told of them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attention_jax.core.checks import check_choice, check_integer
from attention_jax.nn.cross_attention import Alignment, AttentionKind, CrossAttentionConfig
from attention_jax.nn.feed_forward import Activation
from attention_jax.nn.placement import PositionConfig
from attention_jax.nn.transformer import BlockConfig, Norm
from attention_jax.scores import get_score

Tie = Literal["none", "output", "all"]


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig:
    """The model's settings.

    Attributes:
        score: the score under study, with which the decoder attends to the encoder: a name in
            `SCORES`, or "module:Name" for one of your own.
        self_attention_score: the score of the self attentions; None for the score under study.
        attention: how the decoder looks at the encoder: "global", the whole of it; "local-m" or
            "local-p", through a window; "coverage", remembering what it has attended to;
            "monotonic", never going back.
        radius: of the local kinds, positions on either side of the window's center.
        alignment: of "local-m": "reversed", the last letter first, or "monotonic".
        heads: of the self attentions; more than 1 also makes "global" attention multi-head, between
            projections. The other kinds have one head.
        key_heads: heads of keys and values in the self attentions (grouped-query), a divisor of
            `heads`; None for `heads`.
        dim: size of embeddings and of every layer, a multiple of `heads`, and of 2 or 4 as
            `positions` want it.
        hidden_dim: hidden size of the feed-forward layers.
        activation: of the feed-forward layers.
        norm: layer normalisation before each layer ("pre") or after its residual ("post").
        normalize_qk: layer normalisation of queries and keys in the self attentions.
        encoder_layers: number of encoder blocks; 0 for a memory of embedded letters, none of which
            knows of another.
        decoder_layers: number of decoder blocks.
        dropout_rate: of embeddings, attention weights and layers, in training.
        checkpoint_blocks: compute each block again for its gradient rather than save what is in it.
            (On a CPU XLA merges the two computations, and nothing is gained.)
        mask_padding: False lets every attention see padding, the flaw of a published comparison.
        positions: how tokens are told where they stand.
        decoder_self_attention: False for a decoder in which no output depends on others but by the
            token before.
        tied_embeddings: which of the embeddings and the output layer share their table: "none";
            "output", target embedding and output layer; "all" three, which takes one vocabulary.
        sharpen_from: a source length from which on the cross attention's logits are multiplied by
            more than 1, see `CrossAttentionConfig`; None for no factor.

    Raises:
        ValueError: there is no such score or kind, a size is below 1, sizes do not divide, or
            settings do not go together.
    """

    score: str = "scaled"
    self_attention_score: str | None = "scaled"
    attention: AttentionKind = "global"
    radius: int = 2
    alignment: Alignment = "reversed"
    heads: int = 1
    key_heads: int | None = None
    dim: int = 64
    hidden_dim: int = 64
    activation: Activation = "relu"
    norm: Norm = "pre"
    normalize_qk: bool = False
    encoder_layers: int = 1
    decoder_layers: int = 1
    dropout_rate: float = 0.0
    checkpoint_blocks: bool = False
    mask_padding: bool = True
    positions: PositionConfig = PositionConfig()
    decoder_self_attention: bool = True
    sharpen_from: int | None = None
    tied_embeddings: Tie = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.positions, PositionConfig):
            raise ValueError(f"positions must be a PositionConfig; got {self.positions!r}")
        check_choice("tied_embeddings", self.tied_embeddings, Tie)
        get_score(self.score)
        if self.self_attention_score is not None:
            get_score(self.self_attention_score)
        for name, least in (("encoder_layers", 0), ("decoder_layers", 1)):
            check_integer(name, getattr(self, name), least)
        self.block, self.cross  # noqa: B018 -- they check the rest
        rotates = self.positions.kind == "rotary"
        what, size = ("dim / heads", self.dim // self.heads) if rotates else ("dim", self.dim)
        self.positions.check_dim(what, size)

    def check_vocabularies(self, source_size: int, target_size: int) -> None:
        """Raises ValueError unless embeddings can be tied as they are to be."""
        if self.tied_embeddings == "all" and source_size != target_size:
            raise ValueError(
                f"source_vocabulary_size must be {target_size}, that of the target, where all"
                f" embeddings are tied; got {source_size}"
            )

    @property
    def label(self) -> str:
        """The score, and what is not the default around it: "additive, coverage"."""
        kind = [] if self.attention == "global" else [self.attention]
        where = "" if self.attention == "global" else " in self attention"
        heads = [] if self.heads == 1 else [f"{self.heads} heads{where}"]
        plain = self.positions == PositionConfig()
        positions = [] if plain else [f"positions {' '.join(self.positions.to_words())}"]
        return ", ".join([self.score, *kind, *heads, *positions])

    @property
    def block(self) -> BlockConfig:
        """What encoder and decoder blocks are told."""
        return BlockConfig(
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            heads=self.heads,
            key_heads=self.key_heads,
            activation=self.activation,
            norm=self.norm,
            dropout_rate=self.dropout_rate,
            normalize_qk=self.normalize_qk,
            rotary_wavelength=self.positions.rotary_wavelength,
            position_ends=self.positions.ends,
            decoder_self_attention=self.decoder_self_attention,
        )

    @property
    def cross(self) -> CrossAttentionConfig:
        """How decoder blocks look at the memory."""
        return CrossAttentionConfig(
            attention=self.attention,
            heads=self.heads if self.attention == "global" else 1,
            radius=self.radius,
            alignment=self.alignment,
            rotary_wavelength=self.positions.rotary_wavelength,
            position_ends=self.positions.ends,
            sharpen_from=self.sharpen_from,
        )
