"""The settings of a sequence-to-sequence model, composed of those of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from attention_jax.core.checks import check_choice, check_integer
from attention_jax.core.names import check_description, describe
from attention_jax.core.programs import Known
from attention_jax.nn.block_config import BlockConfig
from attention_jax.nn.cross_attention import KINDS_WITH_NORMALIZER, CrossAttentionConfig
from attention_jax.nn.position_config import PositionConfig
from attention_jax.nn.position_encoding import Rotation
from attention_jax.nn.transformer import cross_heads
from attention_jax.normalizers import DEFAULT_NORMALIZER, get_normalizer, known_normalizer
from attention_jax.scores import get_score, known_score

Tie = Literal["none", "output", "all"]


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig:
    """The settings of a model.

    Attributes:
        score: the score under study, with which the decoder attends to the encoder: a name in
            `SCORES`, or "module:Name" for a score of your own; either may have arguments, as in
            "additive(hidden_dim=32)", see `get_score`.
        self_attention_score: the score of the self attentions; None for the score under study.
        block: sizes and kinds of the layers.
        cross_attention: the kind of attention with which the decoder attends to the encoder.
        positions: how the model encodes the positions of tokens.
        encoder_layers: number of encoder blocks. With 0 the memory is the embedded source, in which
            no token depends on the others.
        decoder_layers: number of decoder blocks.
        decoder_self_attention: False for a decoder in which each output depends on the previous
            token alone, not on earlier ones.
        mask_padding: False lets every attention see padding, the flaw of a published comparison.
        tied_embeddings: which tables are shared: "none"; "output", target embedding and output
            layer; "all", both embeddings and the output layer, which needs a shared vocabulary.

    Raises:
        ValueError: there is no such score or kind, a size is below 1, sizes do not divide, or
            settings do not go together.

    >>> config = Seq2SeqConfig(score="additive", block=BlockConfig(num_heads=4))
    >>> config.with_settings(num_heads=2, attention="coverage").label
    'additive, coverage, 2 heads in self attention'
    """

    score: str = "scaled"
    self_attention_score: str | None = "scaled"
    block: BlockConfig = BlockConfig()
    cross_attention: CrossAttentionConfig = CrossAttentionConfig()
    positions: PositionConfig = PositionConfig()
    encoder_layers: int = 1
    decoder_layers: int = 1
    decoder_self_attention: bool = True
    mask_padding: bool = True
    tied_embeddings: Tie = "none"

    def __post_init__(self) -> None:
        for name, part in _PARTS.items():
            if not isinstance(getattr(self, name), part):
                raise ValueError(f"{name} must be a {part.__name__}; got {getattr(self, name)!r}")
        check_choice("tied_embeddings", self.tied_embeddings, Tie)
        get_score(self.score)
        if self.self_attention_score is not None:
            get_score(self.self_attention_score)
        check_integer("encoder_layers", self.encoder_layers, least=0)
        check_integer("decoder_layers", self.decoder_layers)
        block, positions = self.block, self.positions
        wavelength = positions.rotary_wavelength
        if wavelength is None:
            rotation = None
            positions.check_dim("dim", block.dim)
        else:  # each head is rotated
            rotation = Rotation(wavelength, positions.num_position_ids)
            positions.check_dim("dim / num_heads", block.dim // block.num_heads)
        self.cross_attention.kind(cross_heads(block, self.cross_attention), rotation)

    def with_settings(self, **settings: Any) -> Self:
        """A copy with some settings changed, each by its own name, whichever part it belongs to.

        The names are those of the command line: `num_heads` belongs to `block`, `attention` to
        `cross_attention`. `positions` is replaced as a whole.

        Raises:
            TypeError: there is no such setting.
            ValueError: a value is out of range, or settings do not go together.
        """
        changes = dict(settings)
        for part in ("block", "cross_attention"):
            names = {field.name for field in dataclasses.fields(_PARTS[part])}
            of_part = {name: changes.pop(name) for name in names & changes.keys()}
            if of_part:
                config = changes.get(part, getattr(self, part))
                changes[part] = dataclasses.replace(config, **of_part)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Reads what `dataclasses.asdict` wrote, of earlier versions too.

        Their settings of blocks and cross attention are flat, and settings that they lack have
        their defaults here.

        Raises:
            TypeError: there is no such setting.
            ValueError: a value is out of range, or settings do not go together.
        """
        settings = {_RENAMED.get(name, name): value for name, value in content.items()}
        settings.pop("checkpoint_blocks", None)  # of earlier versions; changed no result
        if isinstance(settings.get("cross_attention"), Mapping):
            settings["cross_attention"] = _with_log_scaled(settings["cross_attention"])
        settings = _with_log_scaled(settings)
        for name, part in _PARTS.items():
            if name in settings:
                settings[name] = part(**settings[name])
        return cls().with_settings(**settings)

    def check_vocabularies(self, source_size: int, target_size: int) -> None:
        """Raises ValueError unless embeddings can be tied as `tied_embeddings` says."""
        if self.tied_embeddings == "all" and source_size != target_size:
            raise ValueError(
                f"source_vocabulary_size must be {target_size}, that of the target, where all"
                f" embeddings are tied; got {source_size}"
            )

    def check_scores_run(self) -> None:
        """Raises ValueError if a score fails for the sizes of this model; compiles nothing.

        A configuration does not do this by itself, since it may be made before JAX can be used.
        """
        num_heads = self.block.num_heads
        heads_of = {self.score: {cross_heads(self.block, self.cross_attention)}}
        if self.encoder_layers > 0 or self.decoder_self_attention:
            heads_of.setdefault(self.self_attention_score or self.score, set()).add(num_heads)
        for score, counts in heads_of.items():
            for count in sorted(counts):
                size = self.block.dim // count
                known_score(get_score(score), None, size, size)

    def describe_parts(self) -> dict[str, Any]:
        """What each score and normaliser is that the settings name; a user's is traced.

        Returns:
            {"scores": {setting: description}, "normalizers": the same}, for config.json.
        """
        return {
            kind: {name: describe(part) for name, (_, part) in parts.items()}
            for kind, parts in self._named_parts().items()
        }

    def check_parts_are(self, content: Mapping[str, Any]) -> None:
        """Raises ValueError if a part no longer fits what `describe_parts` returned once.

        Args:
            content: of config.json; earlier versions stored no scores or no normalisers.
        """
        for kind, parts in self._named_parts().items():
            stored = content.get(kind, {})
            if not isinstance(stored, Mapping):
                raise TypeError(f"{kind} must be a JSON object; got {stored!r}")
            for name, (text, part) in parts.items():
                if name in stored:
                    check_description(f"{name} {text!r}", part, stored[name])

    def known(self, settings: Any = None) -> Any:
        """These settings, or settings that contain them, as a static argument of `jax.jit`.

        A text that names a score of a user may name another one tomorrow: where a part is not of
        this library, the result is equal to another only if the programs of all parts are.
        """
        settings = self if settings is None else settings
        parts = (part for parts in self._named_parts().values() for _, part in parts.values())
        digest = " ".join(part.digest for part in parts if type(part) is Known)
        return Known(settings, lambda: digest) if digest else settings

    def _named_parts(self) -> dict[str, dict[str, tuple[str, Any]]]:
        """The settings that name a score or a normaliser: {kind: {setting: (text, part)}}."""
        scores = {"score": self.score, "self_attention_score": self.self_attention_score}
        normalizers = {
            "normalizer": self.cross_attention.normalizer,
            "self_attention_normalizer": self.block.self_attention_normalizer,
        }
        heads = cross_heads(self.block, self.cross_attention)
        sizes = {"score": self.block.dim // heads}
        dim = self.block.dim // self.block.num_heads

        def known(name: str, text: str) -> Any:
            size = sizes.get(name, dim)
            return known_score(get_score(text), None, size, size)

        return {
            "scores": {n: (text, known(n, text)) for n, text in scores.items() if text is not None},
            "normalizers": {
                n: (text, known_normalizer(get_normalizer(text))) for n, text in normalizers.items()
            },
        }

    @property
    def label(self) -> str:
        """The score, and the settings around it that are not the default: "additive, coverage"."""
        return self.label_beside(Seq2SeqConfig())

    def label_beside(self, usual: Seq2SeqConfig) -> str:
        """The score, and the settings around it that differ from those of a usual model."""
        attention, num_heads = self.cross_attention.attention, self.block.num_heads
        words = [self.score]
        if attention != "global":
            words.append(attention)
        normalizer = self.cross_attention.normalizer
        if attention in KINDS_WITH_NORMALIZER and normalizer != usual.cross_attention.normalizer:
            words.append(normalizer)
        if num_heads > 1:
            where = "" if attention == "global" else " in self attention"
            words.append(f"{num_heads} heads{where}")
        if self.positions != usual.positions:
            words.append(f"positions {' '.join(self.positions.to_words())}")
        return ", ".join(words)


_PARTS: dict[str, type[Any]] = {
    "block": BlockConfig,
    "cross_attention": CrossAttentionConfig,
    "positions": PositionConfig,
}
_RENAMED = {"heads": "num_heads", "key_heads": "num_key_heads"}  # names of earlier versions


def _with_log_scaled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of earlier versions, whose `sharpen_from` n is now "log_scaled(start=n)"."""
    others = dict(settings)
    start = others.pop("sharpen_from", None)
    if start is not None:
        inner = others.get("normalizer", DEFAULT_NORMALIZER)
        named = "" if inner == DEFAULT_NORMALIZER else f"normalizer={inner}, "
        others["normalizer"] = f"log_scaled({named}start={start})"
    return others
