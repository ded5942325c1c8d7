"""Translators of `translation_comparison`: texts, trainings, translations and their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from attention_jax.core.checks import optional_package
from attention_jax.tasks.translation import translate as translation
from attention_jax.tasks.translation.task import MODEL, TRAIN, Translation
from attention_jax.tasks.translation.text import ParallelText, read_parallel_text
from attention_jax.tasks.translation.translate import Search, Translator
from attention_jax.training.run import train_run
from attention_jax.training.run_results import seconds_of
from experiments import lab
from experiments.lab import Row

# The test sets of Multi30K from German to English. No setting was chosen on any of them.
TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
SEARCHES = {"greedy": Search(), "4 beams": Search(beams=4)}


@dataclasses.dataclass(frozen=True)
class Texts:
    """Parallel text, for each split two files, SPLIT.LANGUAGE, plain or .gz; sizes of the models.

    Attributes:
        data: folder with the files.
        source_language: suffix of the files to translate.
        target_language: suffix of the files with their translations.
        validation: the split for validation.
        tests: the splits for tests; figures are from the first.
        vocabulary_size: joint subwords.
        dim: size of the models' tokens; feed-forward layers are four times as wide.
        layers: of the encoder, and of the decoder.
        most_buckets: the most shapes of batches; each is compiled.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    data: Path = Path("data/multi30k")
    source_language: str = "de"
    target_language: str = "en"
    validation: str = "val"
    tests: tuple[str, ...] = TESTS
    vocabulary_size: int = Translation.vocabulary_size
    dim: int = MODEL.dim
    layers: int = MODEL.encoder_layers
    most_buckets: int = 12
    workdir: Path = Path("runs/translation")

    def files(self, split: str) -> list[Path]:
        """The two files of a split; ValueError if there are none."""
        found = []
        for language in (self.source_language, self.target_language):
            names = f"{split}.{language}", f"{split}.{language}.gz"
            paths = [self.data / name for name in names if (self.data / name).is_file()]
            if not paths:
                has = "has neither" if self.data.is_dir() else "is no folder"
                raise ValueError(
                    f"--data must be a folder with {names[0]} or {names[1]}; {self.data} {has}"
                    " (Multi30K is at github.com/multi30k/dataset, in data/task1/raw)"
                )
            found += paths[:1]
        return found

    def text(self, split: str) -> ParallelText:
        """A split, in both languages."""
        return read_parallel_text(*self.files(split))

    def training(self, score: str, steps: int, seed: int = 0) -> Translation:
        """The settings of a training."""
        model = dataclasses.replace(
            MODEL,
            score=score,
            dim=self.dim,
            hidden_dim=4 * self.dim,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            dropout_rate=0.2,
            attention_dropout_rate=0.0,
        )
        train = dataclasses.replace(
            TRAIN,
            steps=steps,
            first_seed=seed,
            schedule="cosine",
            warmup_steps=min(1000, steps),  # fewer for a first look
            checkpoint_every=1400,
            keep=2,
        )
        sides = ("source", "target", "validation_source", "validation_target")
        files = [*self.files("train"), *self.files(self.validation)]
        return Translation(
            model=model,
            train=train,
            vocabulary_size=self.vocabulary_size,
            buckets=min(Translation.buckets, self.most_buckets),
            **dict[str, Any](zip(sides, files, strict=True)),
        )


# The small text of the tests, for a first look.
SMALL: dict[str, Any] = {
    "data": Path(__file__).parents[2] / "tests/parallel_text",
    "validation": "validation",
    "tests": ("validation",),
    "vocabulary_size": 330,
    "dim": 16,
    "layers": 1,
    "most_buckets": 1,
}


def missing(config: Texts) -> str:
    """Which package or file is missing, and where to get it; "" if all are there."""
    try:
        optional_package("sentencepiece", "translation", extra="translate")
        translation.require_sacrebleu()
        for split in ("train", config.validation, *config.tests):
            config.text(split)
    except ValueError as error:
        return str(error)
    return ""


def trained(folder: Path, task: Translation) -> tuple[Translator, Row]:
    """Trains, unless the run is there and finished; its minutes are those of all its sessions."""
    # Linux gives a process no more than 65,530 memory maps: the last training's programs can go.
    jax.clear_caches()
    run = train_run(task, folder, resume=True)
    lab.exit_if_interrupted(run.interrupted)
    minutes = seconds_of(folder) / 60
    return translation.translator_of(run), {"steps": task.train.steps, "minutes": round(minutes, 2)}


def tested(
    translator: Translator, texts: Mapping[str, ParallelText]
) -> Iterator[tuple[Row, list[str]]]:
    """For each test set and search a row with BLEU and chrF, and the translations."""
    for test, text in texts.items():
        for name, search in SEARCHES.items():
            answers = translation.translate(translator, text.source, search)
            scores = translation.score_translations(answers, text.target)
            row = {"test": test, "search": name, "sentences": len(answers)}
            row |= {"bleu": round(scores.bleu, 4), "chrf": round(scores.chrf, 4)}
            yield {**row, "signature": scores.bleu_signature}, answers


def bootstrapped(systems: Mapping[str, Sequence[str]], references: Sequence[str]) -> dict[str, Row]:
    """Compares two or more lists of translations by sacrebleu's paired bootstrap.

    1,000 draws of the sentences, with replacement. "half_width" is half of the 95 % interval of
    BLEU, "p" the chance of a difference from the first list as large, None for the first.

    Source: Koehn 2004.
    """
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    metrics: Any = {"BLEU": BLEU(references=[list(references)])}
    lists: Any = [(name, list(answers)) for name, answers in systems.items()]
    test = PairedTest(lists, metrics, references=None, test_type="bs", n_samples=1000)
    results: list[Any] = test()[1]["BLEU"]
    return {
        name: {
            "half_width": round(float(each.ci), 4),
            "p": None if each.p_value is None else round(float(each.p_value), 4),
        }
        for name, each in zip(systems, results, strict=True)
    }
