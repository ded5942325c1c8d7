"""The translation task: settings, text and subwords, batches, loss and optimiser."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from attention_jax import nn
from attention_jax.core.checks import check_choice, check_integer, checked_fraction
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.translation.batches import Batches, encode_pairs
from attention_jax.tasks.translation.parallel_text import ParallelText, read_parallel_text
from attention_jax.tasks.translation.subwords import Subwords
from attention_jax.training.loop import FedTask, LoopConfig
from attention_jax.training.losses import CrossEntropySums, output_cross_entropy, real_tokens

Array = jax.Array
Params = Any
JSON = dict[str, Any]

Sharing = Literal["joint", "separate"]
Schedule = Literal["inverse-sqrt", "cosine"]
Precision = Literal["float32", "bfloat16"]
ValidationMetric = Literal["bleu", "loss"]

# The default model.
MODEL = ModelConfig(
    dim=128,
    hidden_dim=512,
    num_heads=4,
    dropout_rate=0.2,
    encoder_layers=3,
    decoder_layers=3,
    tied_embeddings="all",
)
# The default settings of the training loop.
LOOP = LoopConfig(seeds=1, steps=9000, log_every=25, checkpoint_every=500, keep=5, keep_best=1)


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """Settings of one training run; all defaults stand here and in the two parts.

    Attributes:
        source: sentences to translate, one per line, UTF-8, plain or .gz.
        target: their translations, line by line.
        validation_source: held-out sentences for validation at each checkpoint; None for no
            validation.
        validation_target: their translations.
        vocabulary: "joint" for one vocabulary of both languages, "separate" for one per language.
        vocabulary_size: size of each vocabulary; the 256 bytes and 4 special tokens count.
        max_tokens: pairs with more subwords than this on one side are left out.
        model: the model.
        loop: steps, seeds, checkpoints.
        batch_tokens: most subwords of a batch, both sides and padding included.
        buckets: most batch shapes; each is compiled once, and more shapes mean less padding.
        learning_rate: Adam's highest rate.
        warmup_steps: updates over which the rate rises from 0.
        schedule: how the rate falls: as 1 / sqrt(updates) ("inverse-sqrt"), or along a cosine to 0
            at the last step.
        clip_norm: the gradient's norm is clipped to this.
        weight_decay: of AdamW, times the rate; 0 for Adam.
        accumulate: batches whose mean gradient makes one update.
        label_smoothing: see `output_cross_entropy`.
        precision: dtype of products; parameters and sums are float32.
        validation_metric: the metric that chooses the best checkpoint.
        patience: training stops after so many checkpoints without a better metric; None for never.

    Raises:
        ValueError: a setting is out of range, or two settings contradict each other.
    """

    source: Path
    target: Path
    validation_source: Path | None = None
    validation_target: Path | None = None
    vocabulary: Sharing = "joint"
    vocabulary_size: int = 4000
    max_tokens: int = 60
    model: ModelConfig = MODEL
    loop: LoopConfig = LOOP
    batch_tokens: int = 2560
    buckets: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 1000
    schedule: Schedule = "inverse-sqrt"
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    accumulate: int = 1
    label_smoothing: float = 0.1
    precision: Precision = "float32"
    validation_metric: ValidationMetric = "bleu"
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("score", "self_attention_score"):
            if not isinstance(getattr(self.model, name), str | None):
                raise ValueError(
                    f"model.{name} must be a name, for config.json to hold it;"
                    f" got {getattr(self.model, name)!r}"
                )
        if (self.validation_source is None) != (self.validation_target is None):
            raise ValueError(
                "validation_source and validation_target must be given together; got"
                f" {self.validation_source} and {self.validation_target}"
            )
        for name, choices in (
            ("vocabulary", Sharing),
            ("schedule", Schedule),
            ("precision", Precision),
            ("validation_metric", ValidationMetric),
        ):
            check_choice(name, getattr(self, name), choices)
        if self.vocabulary == "separate" and self.model.tied_embeddings == "all":
            raise ValueError(
                "tied_embeddings must be output or none with separate vocabularies; got all"
            )
        for name in ("vocabulary_size", "max_tokens", "batch_tokens", "buckets", "accumulate"):
            check_integer(name, getattr(self, name))
        check_integer("warmup_steps", self.warmup_steps, 0)
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0; got {getattr(self, name)}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0; got {self.weight_decay}")
        checked_fraction("label_smoothing", self.label_smoothing)
        if self.patience is not None:
            check_integer("patience", self.patience)
            if self.validation_source is None:
                raise ValueError(
                    "patience needs validation_source and validation_target; got neither"
                )
        self.model.check_length(self.max_tokens + 1)

    @property
    def vocabulary_sizes(self) -> tuple[int, int]:
        """Of the source and of the target."""
        return self.vocabulary_size, self.vocabulary_size

    @property
    def label(self) -> str:
        """What progress and tables call the run."""
        return self.model.label

    def to_json(self) -> JSON:
        """All settings and the fields of scores and normalisers, for config.json."""
        content: JSON = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return {"task": "translation", **content, **self.model.describe_parts()}

    @classmethod
    def from_json(cls, content: JSON) -> TranslationConfig:
        """The inverse of `to_json`; ValueError if a score or normaliser has changed."""
        try:
            if content.get("task") != "translation":
                raise ValueError("config.json is not that of a translation run")
            fields = {name: value for name, value in content.items() if name not in _NO_SETTINGS}
            fields |= {name: Path(fields[name]) for name in ("source", "target")}
            for name in ("validation_source", "validation_target"):
                value = fields.get(name)
                fields[name] = None if value is None else Path(value)
            model = ModelConfig(**fields["model"])
            model.check_parts_are(content)
            return cls(**{**fields, "model": model, "loop": LoopConfig(**fields["loop"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"config.json is not that of a translation run: {error}") from error


# What else the config.json of a run says; see `definition.prepare` for the digests.
_NO_SETTINGS = ("task", "scores", "normalizers", "text_sha256", "subwords_sha256")


class Vocabularies(NamedTuple):
    """Subwords of the source and of the target; the same object if they are joint."""

    source: Subwords
    target: Subwords

    @classmethod
    def learned(cls, config: TranslationConfig, text: ParallelText) -> Vocabularies:
        """Learns the subwords from the training text.

        Raises:
            ValueError: the text has fewer subwords than that, or more letters.
        """
        if config.vocabulary == "joint":
            joint = Subwords.learned([*text.source, *text.target], config.vocabulary_size)
            return cls(joint, joint)
        return cls(*(Subwords.learned(side, config.vocabulary_size) for side in text))

    @staticmethod
    def names(config: TranslationConfig) -> list[str]:
        """Names of the files in the run folder."""
        if config.vocabulary == "joint":
            return ["subwords.model"]
        return ["source_subwords.model", "target_subwords.model"]

    @property
    def files(self) -> dict[str, bytes]:
        """The content of each file, by name."""
        if self.source is self.target:
            return {"subwords.model": self.source.model}
        return {
            "source_subwords.model": self.source.model,
            "target_subwords.model": self.target.model,
        }

    @classmethod
    def kept(cls, config: TranslationConfig, folder: Path) -> Vocabularies:
        """Reads the files of a run folder.

        Raises:
            ValueError: a file is missing or damaged.
        """
        subwords = [
            _kept_subwords(folder / name, config.vocabulary_size) for name in cls.names(config)
        ]
        return cls(subwords[0], subwords[-1])

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file, by name."""
        return {name: hashlib.sha256(model).hexdigest() for name, model in self.files.items()}


def _kept_subwords(path: Path, size: int) -> Subwords:
    try:
        subwords = Subwords(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if subwords.size != size:
        raise ValueError(f"{path} must have {size} subwords; it has {subwords.size}")
    return subwords


def read_text(config: TranslationConfig) -> tuple[ParallelText, ParallelText | None]:
    """The training text and the validation text.

    Raises:
        ValueError: see `read_parallel_text`.
    """
    text = read_parallel_text(config.source, config.target)
    if config.validation_source is None or config.validation_target is None:
        return text, None
    return text, read_parallel_text(config.validation_source, config.validation_target)


def training_batches(
    config: TranslationConfig, text: ParallelText, vocabularies: Vocabularies, multiple_of: int = 1
) -> tuple[Batches, str]:
    """Batches of the text, and a description of them for the user."""
    pairs = encode_pairs(text, *vocabularies, config.max_tokens)
    batches = Batches(
        pairs, tokens=config.batch_tokens, buckets=config.buckets, multiple_of=multiple_of
    )
    padding = 1 - batches.real_tokens / batches.padded_tokens
    skipped = "".join(
        f"; {count} skipped, {why}"
        for count, why in (
            (pairs.skipped_empty, "one side empty"),
            (pairs.skipped_long, f"longer than max_tokens {config.max_tokens}"),
        )
        if count
    )
    return batches, (
        f"{len(pairs.source)} pairs of sentences{skipped}; {batches.steps_per_epoch} batches per"
        f" epoch, of {len(batches.buckets)} shapes; {batches.real_tokens} subwords,"
        f" {padding:.0%} of the batches is padding"
    )


def translation_task(config: TranslationConfig, batches: Batches | None = None) -> FedTask:
    """Initialisation, batches and loss. Without batches it can be loaded, but not trained.

    Raises:
        ValueError: a score fails for the model's sizes.
    """
    config.model.check_scores_run()

    def init(rng: Array) -> Params:
        source_size, target_size = config.vocabulary_sizes
        return nn.initial_params(config.model, target_size, rng, source_size)

    def loss(params: Params, batch: Batch, rng: Array) -> tuple[Array, dict[str, Array]]:
        sums, tokens = loss_sums(config, params, batch, rng)
        return sums.loss / tokens, {
            "negative_log_likelihood": sums.negative_log_likelihood / tokens,
            "accuracy": sums.correct / tokens,
        }

    return FedTask(init, None if batches is None else batches.batch, loss)


def loss_sums(
    config: TranslationConfig, params: Params, batch: Batch, rng: Array | None
) -> tuple[CrossEntropySums, Array]:
    """Sums over the target's subwords, EOS included, and the number of these subwords."""
    model = bind(config, params)
    features = model.features(batch.source, batch.source_lengths, batch.target_inputs, rng=rng)
    real = real_tokens(batch.target_lengths, batch.targets.shape[1])
    sums = output_cross_entropy(
        features,
        *model.output_layer(),
        batch.targets,
        real,
        label_smoothing=config.label_smoothing,
    )
    return sums, jnp.maximum(jnp.sum(real.astype(jnp.float32)), 1)


def bind(config: TranslationConfig, params: Params) -> nn.Model:
    """The model with given parameters, cast to the dtype of its products."""
    dtype = jnp.dtype(config.precision)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), params)
    source_size, target_size = config.vocabulary_sizes
    return nn.bind(config.model, params, target_size, source_size)


def optimizer(config: TranslationConfig) -> optax.GradientTransformation:
    """Clipping, then Adam with a warm-up, one update for every `accumulate` batches."""
    updates = -(-config.loop.steps // config.accumulate)
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            rate_schedule(config, updates), b2=0.98, eps=1e-9, weight_decay=config.weight_decay
        ),
    )
    if config.accumulate == 1:
        return chain
    steps = optax.MultiSteps(chain, config.accumulate)
    return optax.GradientTransformation(steps.init, steps.update)


def rate_schedule(config: TranslationConfig, updates: int) -> optax.Schedule:
    """The rate as a function of the updates done.

    Source: Vaswani et al. 2017, section 5.3, for "inverse-sqrt" and Adam's constants.
    """
    warmup = config.warmup_steps
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            0.0 if warmup else config.learning_rate,
            config.learning_rate,
            warmup,
            max(updates, warmup + 1),
        )

    def inverse_sqrt(count: Array) -> Array:
        done = jnp.asarray(count, jnp.float32) + 1.0
        reference = float(max(warmup, 1))
        return config.learning_rate * jnp.minimum(done / reference, jnp.sqrt(reference / done))

    return inverse_sqrt


def why_steps_are_fixed(config: TranslationConfig) -> str:
    """Why a run cannot be extended: its schedule; "" if it can."""
    if config.schedule == "inverse-sqrt":
        return ""
    return (
        f"the learning rate falls along a cosine to 0 at step {config.loop.steps} (runs with"
        " schedule inverse-sqrt can be extended)"
    )
