"""The texts and the settings with which the experiments of this folder train translators."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from attention_jax.nn.config import Tie
from attention_jax.tasks.translation.task import MODEL, TRAIN, Translation
from attention_jax.tasks.translation.text import ParallelText, read_parallel_text
from attention_jax.training.task import Schedule


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Parallel text: for each split two files, SPLIT.LANGUAGE, plain or .gz.

    Attributes:
        data: folder with the files.
        source_language: suffix of the files to translate.
        target_language: suffix of the files with their translations.
        validation: the split for validation.
        tests: the splits for tests; figures and sentences are from the first.
    """

    data: Path = Path("data/multi30k")
    source_language: str = "de"
    target_language: str = "en"
    validation: str = "val"
    tests: tuple[str, ...] = ("test_2016_flickr",)

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError("tests must be at least one split; got none")

    def path(self, split: str, language: str) -> Path:
        """Returns the file of a split.

        Raises:
            ValueError: if there is none.
        """
        for name in (f"{split}.{language}", f"{split}.{language}.gz"):
            if (self.data / name).is_file():
                return self.data / name
        raise ValueError(
            f"--data must be a folder with {split}.{language} or {split}.{language}.gz; {self.data}"
            f" {'has neither' if self.data.is_dir() else 'is no folder'} (Multi30K is at"
            " github.com/multi30k/dataset, in data/task1/raw)"
        )

    def text(self, split: str) -> ParallelText:
        """Returns a split, in both languages."""
        languages = (self.source_language, self.target_language)
        return read_parallel_text(*(self.path(split, language) for language in languages))

    def missing(self, *, tests: bool = True) -> str:
        """Returns which file is missing, and where to get it; "" if all are there.

        Args:
            tests: whether the test sets are needed.
        """
        try:
            for split in ("train", self.validation, *(self.tests if tests else ())):
                self.text(split)
        except ValueError as error:
            return str(error)
        return ""


# The test sets of Multi30K from German to English. No setting was chosen on any of them.
ALL_TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")

# The small text of the tests, for a first look.
SMALL_CORPUS = Corpus(
    data=Path(__file__).parents[2] / "tests/parallel_text",
    validation="validation",
    tests=("validation",),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a training; all others are the defaults of `Translation`.

    Attributes:
        steps: batches.
        checkpoint_every: batches between validations.
        warmup_steps: batches over which the rate rises.
        dropout_rate: see `ModelConfig`.
        attention_dropout_rate: see `ModelConfig`.
        learning_rate: Adam's highest rate.
        schedule: how the rate falls, see `Translation`.
        label_smoothing: see `output_cross_entropy`.
        tied_embeddings: see `ModelConfig`.
        batch_tokens: most subwords of a batch, both sides and padding included.
        buckets: most shapes of batches.
        vocabulary_size: number of joint subwords.
        dim: size of the model's tokens; feed-forward layers are four times as wide.
        num_heads: heads of all attentions.
        layers: layers of the encoder, and of the decoder.
    """

    steps: int
    checkpoint_every: int
    warmup_steps: int = 1000
    dropout_rate: float = MODEL.dropout_rate
    attention_dropout_rate: float | None = MODEL.attention_dropout_rate
    learning_rate: float = TRAIN.learning_rate
    schedule: Schedule = "cosine"
    label_smoothing: float = Translation.label_smoothing
    tied_embeddings: Tie = MODEL.tied_embeddings
    batch_tokens: int = Translation.batch_tokens
    buckets: int = Translation.buckets
    vocabulary_size: int = Translation.vocabulary_size
    dim: int = MODEL.dim
    num_heads: int = MODEL.num_heads
    layers: int = MODEL.encoder_layers

    def training(self, corpus: Corpus | None, score: str, seed: int = 0) -> Translation:
        """Returns the settings of a training with a score; without files if there is no corpus."""
        files: Any = {"source": Path("source"), "target": Path("target")}
        if corpus is not None:
            files = {}
            for side in ("source", "target"):
                language = getattr(corpus, f"{side}_language")
                files[side] = corpus.path("train", language)
                files[f"validation_{side}"] = corpus.path(corpus.validation, language)
        model = dataclasses.replace(
            MODEL,
            score=score,
            dim=self.dim,
            hidden_dim=4 * self.dim,
            num_heads=self.num_heads,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            dropout_rate=self.dropout_rate,
            attention_dropout_rate=self.attention_dropout_rate,
            tied_embeddings=self.tied_embeddings,
        )
        train = dataclasses.replace(
            TRAIN, first_seed=seed, steps=self.steps, checkpoint_every=self.checkpoint_every,
            keep=2, schedule=self.schedule, warmup_steps=self.warmup_steps,
            learning_rate=self.learning_rate,
        )  # fmt: skip
        return Translation(
            **files,
            model=model,
            train=train,
            label_smoothing=self.label_smoothing,
            batch_tokens=self.batch_tokens,
            buckets=self.buckets,
            vocabulary_size=self.vocabulary_size,
        )


SMALL = Recipe(steps=50, checkpoint_every=25, warmup_steps=6, vocabulary_size=330, dim=16, layers=1)
# For at most 10, 20 and 60 minutes on 2 fast CPU cores, with compilation and validation: the middle
# one with every score, the others with scaled dot.
SHORT = Recipe(
    steps=4000, checkpoint_every=2000, warmup_steps=500, dropout_rate=0.1,
    attention_dropout_rate=0.0, buckets=6,
)  # fmt: skip
MIDDLE = Recipe(steps=7000, checkpoint_every=1400, dropout_rate=0.2, attention_dropout_rate=0.0)
LONG = Recipe(steps=27000, checkpoint_every=3000, dropout_rate=0.2, attention_dropout_rate=0.0)
# A batch with additive takes longer, so there are fewer.
LONG_ADDITIVE = dataclasses.replace(LONG, steps=20000, checkpoint_every=2500)
