"""The settings of a model: one flat dataclass, whose fields are the options of a command line."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_origin, get_type_hints

from attention_jax.core.checks import check_choice, check_integer, check_real, checked_fraction
from attention_jax.core.names import is_of_library
from attention_jax.nn.feed_forward import Activation
from attention_jax.nn.local import Alignment
from attention_jax.nn.positions import ANY_LENGTH, Anchor
from attention_jax.normalizers import DEFAULT_NORMALIZER, Softmax, get_normalizer
from attention_jax.parts import check_description, describe, known_normalizer, known_score
from attention_jax.parts.descriptions import known_settings
from attention_jax.scores import get_score

Architecture = Literal["encoder-decoder", "decoder"]
Norm = Literal["pre", "post"]
AttentionKind = Literal["global", "local-m", "local-p", "coverage", "monotonic"]
PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]
Draw = Literal["none", "subset", "window"]
Tie = Literal["none", "output", "all"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The settings of a model. Those of one kind of attention or positions do not affect others.

    Attributes:
        architecture: "encoder-decoder"; or "decoder", one sequence in which each token attends to
            itself and to earlier tokens.
        score: the score under study: a name in `SCORES`, or "module:Name" for a score of your own;
            either may have arguments, as in "additive(hidden_dim=32)", see `get_score`. With it the
            decoder attends to the encoder. In a "decoder" it is the score of every attention.
        self_attention_score: the score of the self attentions of an "encoder-decoder"; None for
            the score under study.
        encoder_layers: number of encoder blocks. With 0 the memory is the embedded source, in which
            no token depends on the others.
        decoder_layers: number of decoder blocks.
        decoder_self_attention: False for a decoder in which each output depends on the previous
            token alone, not on earlier ones.
        dim: size of the tokens and of every layer, a multiple of `num_heads`.
        hidden_dim: hidden size of the feed-forward layers; 0 for blocks of attention alone.
        num_heads: heads of the self attentions, and of "global" cross attention: more than 1 makes
            it multi-head attention, between projections. Other cross attention has one head.
        num_key_heads: heads of keys and values in the self attentions (grouped-query), a divisor of
            `num_heads`; None for `num_heads`.
        activation: of the feed-forward layers, see `FeedForward`.
        norm: the place of layer normalisation: "pre", x + f(norm x); or "post", norm(x + f(x)).
        normalize_qk: layer normalisation of queries and keys in the self attentions.
        self_attention_normalizer: the normaliser of the self attentions of an "encoder-decoder", as
            in `get_normalizer`: "softmax", "entmax(alpha=1.5)", "module:Name".
        output_gate: whether a gate multiplies the heads of multi-head attention, see
            `MultiHeadAttention`: of the self attentions, and of "global" cross attention with
            several heads.
        tied_embeddings: which tables are shared: "none"; "output", target embedding and output
            layer; "all", both embeddings and the output layer, which needs a shared vocabulary.
        dropout_rate: of embeddings and the outputs of layers, in training.
        attention_dropout_rate: of attention weights; None for `dropout_rate`. The weights of
            "coverage" and "monotonic" have no dropout.
        dtype: of tokens and of the factors of products: "float32" or "bfloat16". Parameters, sums,
            softmax, layer normalisation, position encodings and logits of the output layer are
            float32 with both.
        remat: whether the gradient computes each block's activations again, instead of storing
            them: less memory for more arithmetic, the same numbers.
        fast_variance: layer normalisation by E[x^2] - E[x]^2, which loses the digits of features
            whose mean is large. For runs that began when there was no other.
        attention: the kind of cross attention. "global" attends to the whole memory; "local-m" and
            "local-p" through a window, around a known or a predicted alignment; "coverage"
            remembers its weights; "monotonic" never goes back.
        radius: of the local kinds: keys on either side of the window's center. It may be 0 for
            "local-m".
        alignment: of "local-m": "reversed", p_i = S - 1 - i, the last token first; or "monotonic",
            p_i = i.
        normalizer: of "global" attention, or of every attention in a "decoder". None leaves the
            choice to the task that trains the model; without a task it is softmax. The other kinds
            of attention take softmax only.
        mask_padding: False lets every attention see padding, a flaw that a published comparison
            had.
        positions: how positions are encoded: "sinusoidal" or "learned" encodings, added to
            embeddings; "rotary", a rotation of queries and keys in every attention; "none".
        position_anchor: the end from which the source's tokens are counted: its "start", its "end",
            or "both", each encoded in half of the features. The target is counted from its start,
            because its end is not known while it is generated.
        position_draw: the position ids of training: 0, 1, 2, ... ("none"); an ordered random
            "subset" of all `position_limit` ids; or a subset of a random "window" (see
            `random_window_position_ids`). Source and target of a batch share them. Evaluation uses
            consecutive ids. A model trained on subsets of a large range does better if evaluation
            gives it a subset too, as `position_ids`.
        position_limit: number of position ids to draw from and, for "learned", rows of the table.
        max_wavelength: of the slowest sines, cosines and rotations.
        min_wavelength: of the fastest sines and cosines. Below 1, neighbours differ more.
        position_scale: factor of the encodings. Embeddings have variance 1, sines and cosines 1/2.

    Raises:
        ValueError: a name is unknown, a number is out of range, sizes do not divide, or two
            settings do not go together.

    >>> config = ModelConfig(score="additive", num_heads=4)
    >>> dataclasses.replace(config, num_heads=2, attention="coverage").label
    'additive, coverage, 2 heads in self attention'
    >>> ModelConfig(attention="coverage", normalizer="entmax")
    Traceback (most recent call last):
    ValueError: normalizer must be softmax with attention 'coverage'; got 'entmax'
    """

    of_earlier_runs: ClassVar = {"fast_variance": True}  # a config.json without this setting

    # The layers.
    architecture: Architecture = "encoder-decoder"
    score: str = "scaled"
    self_attention_score: str | None = "scaled"
    encoder_layers: int = 1
    decoder_layers: int = 1
    decoder_self_attention: bool = True
    # Every block.
    dim: int = 64
    hidden_dim: int = 64
    num_heads: int = 1
    num_key_heads: int | None = None
    activation: Activation = "relu"
    norm: Norm = "pre"
    normalize_qk: bool = False
    self_attention_normalizer: str = DEFAULT_NORMALIZER
    output_gate: bool = False
    tied_embeddings: Tie = "none"
    dropout_rate: float = 0.0
    attention_dropout_rate: float | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    fast_variance: bool = False
    # The attention of the decoder to its memory.
    attention: AttentionKind = "global"
    radius: int = 2
    alignment: Alignment = "reversed"
    normalizer: str | None = DEFAULT_NORMALIZER
    mask_padding: bool = True
    # Positions.
    positions: PositionKind = "sinusoidal"
    position_anchor: Anchor = "start"
    position_draw: Draw = "none"
    position_limit: int = 512
    max_wavelength: float = 10_000.0
    min_wavelength: float = 1.0
    position_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if hint is bool or get_origin(hint) is Literal:
                choices = Literal[True, False] if hint is bool else hint
                check_choice(name, getattr(self, name), choices)
        for name in ("dim", "num_heads", "decoder_layers", "position_limit"):
            check_integer(name, getattr(self, name))
        for name in ("hidden_dim", "encoder_layers"):
            check_integer(name, getattr(self, name), least=0)
        # The standard deviation of local-p's Gaussian is half the radius.
        check_integer("radius", self.radius, least=int(self.attention == "local-p"))
        for name in ("max_wavelength", "min_wavelength", "position_scale"):
            check_real(name, getattr(self, name), above=0)
        checked_fraction("dropout_rate", self.dropout_rate)
        if self.attention_dropout_rate is not None:
            checked_fraction("attention_dropout_rate", self.attention_dropout_rate)
        for kind, get in (("score", get_score), ("normalizer", get_normalizer)):
            for name in (kind, f"self_attention_{kind}"):
                value = getattr(self, name)
                if value is None and name in ("self_attention_score", "normalizer"):
                    continue
                try:
                    get(value)
                except ValueError as error:
                    raise ValueError(f"{name} is not valid: {error}") from error
        self._check_sizes()
        self._check_attention()

    def _check_sizes(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of {self.num_heads} heads; got {self.dim}")
        if self.num_key_heads is not None:
            check_integer("num_key_heads", self.num_key_heads)
            if self.num_heads % self.num_key_heads:
                raise ValueError(
                    f"num_key_heads must divide {self.num_heads} heads; got {self.num_key_heads}"
                )
        if self.min_wavelength > self.max_wavelength:
            raise ValueError(
                f"max_wavelength must be at least min_wavelength {self.min_wavelength};"
                f" got {self.max_wavelength}"
            )
        # Pairs of features for each position id; with rotary positions, of each head.
        multiple = 2 * (self.num_heads if self.positions == "rotary" else self.num_position_ids)
        if self.positions != "none" and self.dim % multiple:
            raise ValueError(
                f"dim must be a multiple of {multiple}, for {self.num_heads} heads with"
                f" {self.positions} positions anchored at {self.position_anchor}; got {self.dim}"
            )

    def _check_attention(self) -> None:
        is_softmax = get_normalizer(self.cross_normalizer) == Softmax()
        if self.attention != "global" and not is_softmax:
            raise ValueError(
                f"normalizer must be softmax with attention {self.attention!r};"
                f" got {self.normalizer!r}"
            )
        if self.attention != "global" and self.rotary_wavelength is not None:
            raise ValueError(
                f"attention must be global with rotary positions; got {self.attention!r}"
            )
        if self.rotary_wavelength is not None and self.position_anchor == "both":
            raise ValueError("position_anchor must be start or end with rotary positions; got both")
        if self.architecture == "decoder":
            for name, values in _OF_DECODER.items():
                if getattr(self, name) not in values:
                    raise ValueError(
                        f"{name} must be {' or '.join(map(str, values))} with architecture"
                        f" 'decoder'; got {getattr(self, name)!r}"
                    )

    # --- what follows from the settings ---

    @property
    def self_score(self) -> str:
        """The score of the self attentions."""
        if self.architecture == "decoder" or self.self_attention_score is None:
            return self.score
        return self.self_attention_score

    @property
    def self_normalizer(self) -> str:
        """The normaliser of the self attentions."""
        is_decoder = self.architecture == "decoder"
        return self.cross_normalizer if is_decoder else self.self_attention_normalizer

    @property
    def cross_normalizer(self) -> str:
        """`normalizer`, or softmax for None."""
        return DEFAULT_NORMALIZER if self.normalizer is None else self.normalizer

    @property
    def cross_heads(self) -> int:
        """The heads of the cross attention: `num_heads` if it is "global", else 1."""
        return self.num_heads if self.attention == "global" else 1

    @property
    def rate_of_weights(self) -> float:
        """The dropout rate of attention weights."""
        rate = self.attention_dropout_rate
        return self.dropout_rate if rate is None else rate

    @property
    def cast_dtype(self) -> str | None:
        """The dtype to which modules cast tokens and parameters; None for no cast."""
        return None if self.dtype == "float32" else self.dtype

    @property
    def num_position_ids(self) -> int:
        """Position ids of a token: 2, each for half of the features, with both ends; else 1."""
        return 2 if self.position_anchor == "both" else 1

    @property
    def rotary_wavelength(self) -> float | None:
        """`max_wavelength` if attention rotates queries and keys, else None."""
        return self.max_wavelength if self.positions == "rotary" else None

    @property
    def first_position_id(self) -> int:
        """The id of position 0 in evaluation.

        Where training draws ids it is `position_limit` / 8: windows seldom reach the ends of the
        range, so the first ids are trained little.
        """
        return 0 if self.position_draw == "none" else self.position_limit // 8

    # --- a check for those who know the lengths ---

    def check_length(self, length: int) -> None:
        """Raises ValueError unless there are position ids for `length` tokens in training.

        In evaluation sines, cosines and rotations continue beyond `position_limit`, to ids that
        were not trained.
        """
        is_learned = self.positions == "learned"
        available = self.position_limit - (self.first_position_id if is_learned else 0)
        if length > available and (self.position_draw != "none" or is_learned):
            raise ValueError(
                f"position_limit must hold {length} tokens, EOS included; {self.position_limit}"
                f" holds {available}"
            )

    # --- the parts that settings name ---

    def parts(self) -> dict[str, dict[str, Any]]:
        """The scores and normalisers that the settings name; those of users are traced.

        `__init__` does not trace them, because a configuration may be made before JAX can be used.

        Returns:
            {"scores": {setting: score}, "normalizers": {setting: normaliser}}.

        Raises:
            ValueError: a score fails for the sizes of this model.
        """
        scores = {
            "score": (self.score, self.cross_heads),
            "self_attention_score": (self.self_attention_score or self.score, self.num_heads),
        }
        normalizers = {
            "normalizer": self.cross_normalizer,
            "self_attention_normalizer": self.self_attention_normalizer,
        }
        return {
            "scores": {
                name: known_score(get_score(text), None, self.dim // heads, self.dim // heads)
                for name, (text, heads) in scores.items()
            },
            "normalizers": {
                name: known_normalizer(get_normalizer(text)) for name, text in normalizers.items()
            },
        }

    def describe_parts(self) -> dict[str, Any]:
        """Describes the parts, {kind: {setting: description}}, for config.json."""
        return {
            kind: {name: describe(part) for name, part in parts.items()}
            for kind, parts in self.parts().items()
        }

    def check_parts_are(self, content: Mapping[str, Any]) -> None:
        """Raises ValueError if a part differs from its description in `content`, a config.json."""
        for kind, parts in self.parts().items():
            for name, part in parts.items():
                check_description(f"{name} {getattr(self, name)!r}", part, content[kind][name])

    def defaults_of_users_parts(self) -> dict[str, Any]:
        """The default of each setting that names a score or normaliser of a user."""
        names = ("score", "self_attention_score", "normalizer", "self_attention_normalizer")
        return {
            field.name: field.default
            for field in dataclasses.fields(self)
            if field.name in names and ":" in str(getattr(self, field.name))
        }

    def known(self, settings: Any = None) -> Any:
        """These settings, or settings that contain them, as a static argument of `jax.jit`.

        "module:Name" may name another score or normaliser after a user has edited the module. With
        such a part, two results are equal only if the programs of the user's parts are equal, and
        the fields of the parts that this library defines.
        """
        settings = self if settings is None else settings
        parts = [part for parts in self.parts().values() for part in parts.values()]
        if not self.defaults_of_users_parts() and all(map(is_of_library, parts)):
            return settings
        return known_settings(settings, parts)

    @property
    def label(self) -> str:
        """The score, and the settings around it that are not the default: "additive, coverage"."""
        return self.label_beside(ModelConfig())

    def label_beside(self, usual: Self) -> str:
        """The score, and the settings around it that differ from those of a usual model."""
        is_global = self.attention == "global"
        words = [self.score]
        if not is_global:
            words.append(self.attention)
        elif self.cross_normalizer != usual.cross_normalizer:
            words.append(self.cross_normalizer)
        if self.num_heads > 1:
            words.append(f"{self.num_heads} heads{'' if is_global else ' in self attention'}")
        own, of_usual, default = (
            {name: getattr(config, name) for name in ANY_LENGTH}
            for config in (self, usual, ModelConfig())
        )
        if own != of_usual:
            kind = own.pop("positions")
            changed = [f" {name}={own[name]}" for name in own if own[name] != default[name]]
            words.append(f"positions {kind}{''.join(changed)}")
        return ", ".join(words)


# The values that a "decoder" allows; its score and normaliser are `score` and `normalizer`.
_OF_DECODER: dict[str, tuple[Any, ...]] = {
    "attention": ("global",),
    "decoder_self_attention": (True,),
    "position_anchor": ("start",),
    "encoder_layers": (0, 1),
    "self_attention_score": ("scaled", None),
    "self_attention_normalizer": (DEFAULT_NORMALIZER,),
    "tied_embeddings": ("none", "output"),
}
