"""How do translators with additive and with scaled dot cross attention differ?

Source:   day 11, exercise E11.3; Bahdanau et al. 2014; Vaswani et al. 2017; Multi30K (Elliott et
          al. 2016). Heads that align and heads that spread: topic 7; rollout: Abnar and Zuidema
          2020, section 3. A prototype of this project in plain JAX: 38.4 greedy, 40.0 with 4 beams.
Command:  .venv/bin/python -m experiments.translation.translation_comparison --data FOLDER
Time:     54 minutes of training for scaled dot and 68 for additive, each on one core beside other
          work, and 5 for the rest; about an hour in all on 2 cores that have nothing else to do.
Expected: detokenised BLEU on Multi30K's test set of 2016, German to English, of at least 37 greedy
          and 38 with 4 beams for scaled dot. Additive is at most 2 below.

FOLDER holds Multi30K's raw files, train.de.gz, train.en.gz, val.*, test_2016_flickr.*, from
data/task1/raw of github.com/multi30k/dataset; they are not part of this project. Encoder, decoder,
self attention (scaled dot), subwords, batches and seeds are the same: only the score between
decoder and encoder differs. `scripts/benchmark.py --benchmarks translation` measures the times.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.evaluation import score_translations
from attention_jax.tasks.translation.parallel_text import ParallelText, read_parallel_text
from attention_jax.tasks.translation.task import MODEL, TranslationConfig
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    align,
    translate,
    translator_of,
)
from attention_jax.training.loop import LoopConfig
from attention_jax.training.run import train_run
from experiments.experiment import JSON, ScoreNames, exit_if_interrupted, run_experiment
from experiments.translation.translation_attention import (
    Seen,
    agreement,
    attentions,
    heads,
    rollouts,
)
from experiments.translation.translation_figures import CAPTIONS, plot
from experiments.translation.translation_report import expectations, report

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

SEARCHES = {"greedy": Search(), "4 beams": Search(beams=4)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; all others are the defaults of `TranslationConfig`.

    Attributes:
        data: folder with the files of each split, SPLIT.LANGUAGE, plain or .gz.
        source_language: suffix of the files to translate.
        target_language: suffix of the files with their translations.
        validation: the split for validation.
        tests: the splits for tests; the drawn sentences are from the first.
        scores: scores of the cross attention, two or more; the others are compared with the first.
        seeds: trainings per score.
        steps: batches per training.
        checkpoint_every: batches between validations.
        vocabulary_size: number of joint subwords.
        dim: size of the model's tokens; feed-forward layers are four times as wide.
        num_heads: heads of all attentions.
        layers: layers of the encoder, and of the decoder.
        dropout_rate: see `Seq2SeqConfig`.
        learning_rate: Adam's highest rate.
        batch_tokens: most subwords of a batch, both sides and padding included.
        drawn: indices of the test sentences to draw.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    data: Path = Path("data/multi30k")
    source_language: str = "de"
    target_language: str = "en"
    validation: str = "val"
    tests: tuple[str, ...] = ("test_2016_flickr",)
    scores: ScoreNames = ("scaled", "additive")
    seeds: int = 1
    steps: int = 7000
    checkpoint_every: int = 1000
    vocabulary_size: int = 4000
    dim: int = 128
    num_heads: int = MODEL.block.num_heads
    layers: int = 3
    dropout_rate: float = 0.2
    learning_rate: float = TranslationConfig.learning_rate
    batch_tokens: int = TranslationConfig.batch_tokens
    drawn: tuple[int, ...] = (0, 4)
    workdir: Path = Path("runs/translation_comparison")

    def __post_init__(self) -> None:
        if len(self.scores) < 2 or len(set(self.scores)) != len(self.scores):
            raise ValueError(f"scores must be two or more, each once; got {self.scores}")
        if not self.tests:
            raise ValueError("tests must be at least one split; got none")
        for score in self.scores:  # wrong settings fail before the data are read
            self._training(score, {"source": Path("source"), "target": Path("target")})
        check_folder("workdir", self.workdir)

    def path(self, split: str, language: str) -> Path:
        """Returns the file of a split.

        Raises:
            ValueError: if there is none.
        """
        for name in (f"{split}.{language}", f"{split}.{language}.gz"):
            if (self.data / name).is_file():
                return self.data / name
        raise ValueError(
            f"data must be a folder with {split}.{language} or {split}.{language}.gz; {self.data}"
            " has neither (Multi30K is at github.com/multi30k/dataset, in data/task1/raw)"
        )

    def text(self, split: str) -> ParallelText:
        """Returns a split, in both languages."""
        languages = (self.source_language, self.target_language)
        return read_parallel_text(*(self.path(split, language) for language in languages))

    def training(self, score: str) -> TranslationConfig:
        """Returns the settings of one run."""
        sides = ("source", "target")
        languages = dict(zip(sides, (self.source_language, self.target_language), strict=True))
        files: Any = {side: self.path("train", language) for side, language in languages.items()}
        for side, language in languages.items():
            files[f"validation_{side}"] = self.path(self.validation, language)
        return self._training(score, files)

    def _training(self, score: str, files: dict[str, Any]) -> TranslationConfig:
        model = MODEL.with_settings(
            score=score,
            dim=self.dim,
            hidden_dim=4 * self.dim,
            num_heads=self.num_heads,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            dropout_rate=self.dropout_rate,
        )
        loop = LoopConfig(
            seeds=self.seeds, steps=self.steps, log_every=25,
            checkpoint_every=self.checkpoint_every, keep=2, keep_best=1,
        )  # fmt: skip
        return TranslationConfig(
            **files,
            model=model,
            loop=loop,
            vocabulary_size=self.vocabulary_size,
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            schedule="cosine",
            warmup_steps=min(1000, self.steps // 8),
        )


QUICK = Config(
    data=Path(__file__).parents[2] / "tests/parallel_text",
    validation="validation",
    tests=("validation",),
    steps=50,
    checkpoint_every=25,
    vocabulary_size=330,
    dim=16,
    layers=1,
    drawn=(0,),
)


def missing(config: Config) -> str:
    """Returns which file is missing, and where to get it; "" if all are there."""
    try:
        for split in ("train", config.validation, *config.tests):
            config.text(split)
    except ValueError as error:
        return str(error)
    return ""


def run(config: Config) -> JSON:
    """Trains every arm, tests it, and measures its attention."""
    tests = {split: config.text(split) for split in config.tests}
    text = tests[config.tests[0]]
    sentences = [text.source[index] for index in config.drawn]
    arms: JSON = {}
    pairs: dict[str, list[Seen]] = {}
    for score in config.scores:
        workdir = config.workdir / score_folder(score)
        trained = train_run(TRANSLATION, config.training(score), workdir, resume=True)
        exit_if_interrupted(trained.interrupted)
        translators = [translator_of(trained, seed) for seed in range(config.seeds)]
        pairs[score] = attentions(translators[0], text)
        arms[score] = {
            "training": _training(workdir),
            "tests": {split: _scores(translators, one) for split, one in tests.items()},
            "heads": heads(pairs[score]),
            "rollout": rollouts(pairs[score]),
            "drawn": [_drawn(translators[0], sentence) for sentence in sentences],
        }
    first, *others = config.scores
    return {
        "arms": arms,
        "agreement": {
            f"{first} and {score}": agreement(pairs[first], pairs[score]) for score in others
        },
    }


def _training(workdir: Path) -> JSON:
    validations = read_lines(workdir / "validation.jsonl")
    sessions = read_lines(workdir / "timing.jsonl")
    names = ("negative_log_likelihood", "bleu")
    return {
        "validated": [line["step"] for line in validations],
        **{f"validation_{n}": [_rounded(line[n]) for line in validations] for n in names},
        "minutes": round(sum(session["seconds"] for session in sessions) / 60, 1),
    }


def _scores(translators: list[Translator], text: ParallelText) -> JSON:
    """BLEU and chrF by search, one number per seed."""
    by_search: JSON = {}
    for name, search in SEARCHES.items():
        scores = [
            score_translations(translate(translator, text.source, search), text.target)
            for translator in translators
        ]
        by_search[name] = {
            "bleu": _rounded([one.bleu for one in scores]),
            "chrf": _rounded([one.chrf for one in scores]),
            "signatures": [scores[0].bleu_signature, scores[0].chrf_signature],
        }
    return by_search


def _drawn(translator: Translator, sentence: str) -> JSON:
    alignment = align(translator, sentence, SEARCHES["4 beams"])
    return {
        "source": sentence,
        "translation": alignment.translation,
        "rows": alignment.target_labels,
        "columns": alignment.source_labels,
        "weights": alignment.weights.mean(0).round(3).tolist(),  # [T, S], mean over layers
    }


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, 4) for number in numbers]


if __name__ == "__main__":
    run_experiment(__name__)
