"""Translation: settings, data, loss, validation and results of a run."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_choice, check_integer, checked_fraction
from attention_jax.nn import ModelConfig
from attention_jax.tasks.evaluation import EXAMPLES, SHOWN, ModelTask
from attention_jax.tasks.files import check_data, data_digest
from attention_jax.tasks.translation import translate
from attention_jax.tasks.translation.batches import Batches, Pairs, encode_pairs
from attention_jax.tasks.translation.text import ParallelText, Subwords, read_parallel_text
from attention_jax.tasks.vocabulary import EOS, Batch, labels_of, padded_batch
from attention_jax.training.losses import CrossEntropySums, output_cross_entropy, real_tokens
from attention_jax.training.task import (
    Answers,
    Feed,
    Labels,
    Metrics,
    Params,
    Result,
    TrainConfig,
    Validation,
    check_instances,
)

Array = jax.Array
ValidationMetric = Literal["bleu", "loss"]
Kind = Literal["training", "validation"]

SUBWORDS = "subwords.model"  # the file in the run folder

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
# The default training. Source: Vaswani et al. 2017, section 5.3, for Adam's constants.
TRAIN = TrainConfig(
    seeds=1,
    steps=9000,
    batch_size=None,
    learning_rate=2e-3,
    schedule="inverse-sqrt",
    warmup_steps=1000,
    beta2=0.98,
    epsilon=1e-9,
    keep_best=1,
)


@dataclasses.dataclass(frozen=True)
class Translation(ModelTask):
    """Translate sentences, learned from parallel text.

    Attributes:
        source: sentences to translate, one per line, UTF-8, plain or .gz.
        target: their translations, line by line.
        validation_source: held-out sentences for validation at each checkpoint; None for no
            validation.
        validation_target: their translations.
        model: the model.
        train: steps, seeds, optimiser, checkpoints. `batch_size` is the most pairs of a batch; None
            for as many as `batch_tokens` allows.
        vocabulary_size: number of subwords, the 256 bytes and 4 special tokens included.
        max_tokens: pairs with more subwords than this on one side are left out.
        batch_tokens: most subwords of a batch, both sides and padding included.
        buckets: most batch shapes; each is compiled once, and more shapes mean less padding.
        label_smoothing: see `output_cross_entropy`.
        validation_metric: the metric that chooses the best checkpoint.

    Raises:
        ValueError: a setting is out of range, or two settings contradict each other.
    """

    name: ClassVar[str] = "translation"

    source: Path
    target: Path
    validation_source: Path | None = None
    validation_target: Path | None = None
    model: ModelConfig = MODEL
    train: TrainConfig = TRAIN
    vocabulary_size: int = 4000
    max_tokens: int = 60
    batch_tokens: int = 2560
    buckets: int = 8
    label_smoothing: float = 0.1
    validation_metric: ValidationMetric = "bleu"

    def __post_init__(self) -> None:
        check_instances(self, source=Path, target=Path, model=ModelConfig, train=TrainConfig)
        if (self.validation_source is None) != (self.validation_target is None):
            raise ValueError(
                "validation_source and validation_target must be given together; got"
                f" {self.validation_source} and {self.validation_target}"
            )
        check_choice("validation_metric", self.validation_metric, ValidationMetric)
        for name in ("vocabulary_size", "max_tokens", "batch_tokens", "buckets"):
            check_integer(name, getattr(self, name))
        checked_fraction("label_smoothing", self.label_smoothing)
        self.model.check_length(self.max_tokens + 1)

    # --- data ---

    def text(self, kind: Kind) -> ParallelText | None:
        """One of the texts; None without validation. Raises the errors of `read_parallel_text`."""
        paths: Any = (self.source, self.target)
        if kind == "validation":
            paths = (self.validation_source, self.validation_target)
        return None if None in paths else read_parallel_text(*paths)

    def subwords(self, folder: Path) -> Subwords:
        """The subwords that the run in a folder learned with.

        Raises:
            ValueError: the file is missing, or has changed.
        """
        path = folder / SUBWORDS
        try:
            model = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
        check_data(folder, "subwords_sha256", data_digest(model))
        return Subwords(model)

    def feed(self, folder: Path, *, multiple_of: int = 1) -> Feed:
        """Reads the text; learns the subwords, or reads those of this run, or of `init_from`."""
        text, validation = self.text("training"), self.text("validation")
        assert text is not None
        if validation is not None:
            translate.require_sacrebleu()
        where, source = folder, self.train.init_from
        if source is not None and not (folder / SUBWORDS).is_file():
            where = source.parent if source.is_file() else source  # embeddings are of its subwords
        if (where / SUBWORDS).is_file():
            subwords = self.subwords(where)
        else:
            subwords = Subwords.learned([*text.source, *text.target], self.vocabulary_size)
        if validation is not None and self.model.positions == "learned":
            # Validation translates all its sentences; other positions have no limit there.
            width = translate.padded_width(
                [[*ids, EOS] for ids in subwords.encode(validation.source)]
            )
            self.model.check_length(translate.longest_answer(width))
        batches = Batches(
            encode_pairs(text, subwords, self.max_tokens),
            tokens=self.batch_tokens,
            most_pairs=self.train.batch_size,
            buckets=self.buckets,
            multiple_of=multiple_of,
        )
        texts = {"training": text, "validation": validation}
        return Feed(
            batches.batch,
            digests={
                "text_sha256": {k: each.digest for k, each in texts.items() if each is not None},
                "subwords_sha256": data_digest(subwords.model),
            },
            files={SUBWORDS: subwords.model},
            note=batches.description,
        )

    def _pairs_of_run(self, folder: Path, kind: Kind) -> tuple[ParallelText, Subwords, Pairs]:
        """A text, which must be the one that the run in the folder learned from, as ids too."""
        text, subwords = self.text(kind), self.subwords(folder)
        assert text is not None
        check_data(folder, f"text_sha256.{kind}", text.digest)
        return text, subwords, encode_pairs(text, subwords, self.max_tokens)

    # --- loss ---

    def loss(self, params: Params, batch: Batch, rng: Array | None) -> tuple[Array, Metrics]:
        sums, tokens = self._loss_sums(params, batch, rng)
        return sums.loss / tokens, {
            "negative_log_likelihood": sums.negative_log_likelihood / tokens,
            "accuracy": sums.correct / tokens,
        }

    def _loss_sums(
        self, params: Params, batch: Batch, rng: Array | None
    ) -> tuple[CrossEntropySums, Array]:
        """Sums over the target's subwords, EOS included, and the number of these subwords."""
        model = self.bind(params)
        features = model.features(*batch.inputs, rng=rng)
        real = real_tokens(batch.target_lengths, batch.targets.shape[1])
        sums = output_cross_entropy(
            features,
            *model.output_layer(),
            batch.targets,
            real,
            label_smoothing=self.label_smoothing,
        )
        return sums, jnp.maximum(jnp.sum(real.astype(jnp.float32)), 1)

    # --- validation and results ---

    @property
    def validation(self) -> Validation | None:
        rule = super().validation  # `Task` refuses validate_on
        if self.validation_source is not None:
            rule = Validation(self.validation_metric, self.validation_metric == "bleu")
        return rule

    def validate(self, params: Params, folder: Path) -> dict[str, list[float]]:
        """Mean loss without dropout and greedy BLEU of each seed, on the validation text.

        The loss leaves out pairs longer than `max_tokens`; BLEU has all sentences.
        """
        text, subwords, pairs = self._pairs_of_run(folder, "validation")
        batches = Batches(pairs, tokens=self.batch_tokens, buckets=3)
        line: dict[str, list[float]] = {"loss": [], "negative_log_likelihood": [], "bleu": []}
        for seed in range(self.train.seeds):
            of_seed = jax.tree.map(lambda leaf: leaf[seed], params)  # noqa: B023 -- used at once
            for name, number in self.mean_loss(of_seed, batches).items():
                line[name].append(number)
            translator = translate.Translator(self, of_seed, subwords)
            translations = translate.translate(translator, text.source)
            line["bleu"].append(translate.score_translations(translations, text.target).bleu)
        return line

    def mean_loss(self, params: Params, batches: Batches) -> dict[str, float]:
        """Means over all subwords of the targets, without dropout, in nats.

        Returns:
            {"loss": with label smoothing, "negative_log_likelihood": without it}.
        """
        sums = np.zeros(3)
        known = self.model.known(self)
        for step in range(batches.steps_per_epoch):
            batch_sums, tokens = _loss_sums(known, params, batches.batch(0, step))
            sums += np.array([batch_sums.loss, batch_sums.negative_log_likelihood, tokens], float)
        return {"loss": sums[0] / sums[2], "negative_log_likelihood": sums[1] / sums[2]}

    def evaluate(
        self, params: Params, lengths: Sequence[int] = (), *, folder: Path | None = None
    ) -> dict[str, Result]:
        """The loss and the greedy BLEU of these parameters on the validation text.

        A run without validation text has neither. `translate` scores other texts.
        """
        if self.validation is None or folder is None:
            return {}
        line = self.validate(params, folder)
        loss = Result(line["loss"], larger_is_better=False)
        bleu = Result(line["bleu"], larger_is_better=True, high=100.0)
        return {"validation loss": loss, "validation BLEU": bleu}

    def examples(self, folder: Path | None = None) -> tuple[Batch, Labels]:
        """The first pairs of the validation text, or of the training text without it."""
        assert folder is not None
        kind: Kind = "training" if self.validation_source is None else "validation"
        _, subwords, pairs = self._pairs_of_run(folder, kind)
        batch = padded_batch(pairs.source[:EXAMPLES], pairs.target[:EXAMPLES])
        return batch, self._labels(subwords, batch, min(SHOWN, len(pairs.source)))

    def answers(
        self,
        params: Params,
        inputs: Sequence[str] = (),
        *,
        beams: int = 1,
        folder: Path | None = None,
    ) -> Answers:
        """Translations.

        Raises:
            ValueError: a sentence has no text.
        """
        assert folder is not None
        subwords, right = self.subwords(folder), [None] * len(inputs)
        if not inputs:
            batch, labels = self.examples(folder)
            rows = [*np.asarray(batch.source)[: len(labels)].tolist()]
            targets = [*np.asarray(batch.targets)[: len(labels)].tolist()]
            inputs, right = subwords.decode(rows), subwords.decode(targets)  # type: ignore[assignment]
        translator = translate.Translator(self, params, subwords)
        search = translate.Search(beams=beams)
        pairs = [translate.translated_ids(translator, text, search) for text in inputs]
        source, target = ([*side] for side in zip(*pairs, strict=True))
        batch = padded_batch(source, target, source_width=translate.padded_width(source))
        texts: Any = [*zip(inputs, subwords.decode(target), right, strict=True)]
        return Answers(texts, batch, self._labels(subwords, batch, len(inputs)))

    def _labels(self, subwords: Subwords, batch: Batch, count: int) -> Labels:
        def text(ids: list[int]) -> str:
            return subwords.decode([ids])[0]

        return labels_of(batch, count, text, subwords.label, mask_padding=self.model.mask_padding)


@functools.partial(jax.jit, static_argnums=0)
def _loss_sums(task: Translation, params: Params, batch: Batch) -> Any:
    return task._loss_sums(params, batch, None)
