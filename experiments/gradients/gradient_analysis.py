"""Where does the gradient of attention go? Four questions, answered with the analysis tools.

Source:   Vaswani et al. 2017, section 3.2.1, and chapter 38 ("Attention Variants"), §38.3-38.6:
          unscaled dot products push the softmax to where it has no gradient, and "the model would
          not train at all"; Ghorbani, Krishnan and Xiao 2019 for curvature. The rest is ours.
Command:  .venv/bin/python -m experiments.gradients.gradient_analysis
Time:     5 minutes on 2 CPU cores.
Expected: the variance of unscaled logits is d. As d grows, the entropy of scaled dot tends to that
          of standard normal logits, and unscaled dot's mean Jacobian norm to f(0) / sqrt(d), where
          f(0) is the density at 0 of the gap between the two largest of S standard normal numbers
          (only these two have weight: p and 1 - p with p = sigmoid(sqrt(d) gap), and |J| is
          2 p (1 - p)). It is their expected maximum, too.
          Tests hold that additive logits never exceed sum |v|, and that a masked model sends
          exactly nothing to padding.

1. Why does unscaled dot stop learning at large d? Random queries and keys, then the cross attention
   of the reversal model at initialisation and while it learns.
2. How does additive's tanh saturate? Its kernels grow from 0.1 to 30 times their initial size; so
   do those of a scaled dot product between projected tokens, for comparison.
3. What does a missing padding mask do to gradients? The score is general, whose kernel is the first
   that the gradient of the logits reaches; the same strings are padded to 8 and to 16 letters.
4. Which score has the best conditioned loss? The largest and smallest eigenvalue of its Hessian in
   all parameters, its trace, and the root mean square of all eigenvalues, on one batch.

The sources' account of question 1 holds for the typical query and not for the mean: the mean
gradient of the logits falls only as 1 / sqrt(d). The mean gradient into the query stays above
scaled dot's, which has a factor 1 / sqrt(d) of its own. Only the share of queries that receive a
gradient shrinks.

Question 1 is about dot and scaled dot, question 2 about additive and scaled dot, and question 3
about general; `--scores` are those of question 4. `--num-heads` and `--learning-rate` are settings
of all trained models, `--dim` and `--batch-size` those of questions 3 and 4. The models have the
settings for short strings (`SHORT_STRINGS` in `experiments/reversal/training_settings.py`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from experiments.entropy_limits import expected_maximum
from experiments.experiment import JSON, ScoreNames, run_experiment, significant
from experiments.gradients import gradient_questions as questions
from experiments.gradients.gradient_answers import expectations
from experiments.gradients.gradient_figures import CAPTIONS, plot
from experiments.gradients.gradient_questions import standard_error
from experiments.gradients.gradient_report import report
from experiments.reversal.training_settings import SHORT_STRINGS
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; all others of the models are the defaults of `Reversal`.

    Attributes:
        dims: sizes d of random queries and keys.
        source_length: S, keys of each random query.
        samples: number of random queries.
        model_dims: sizes of the untrained models.
        trained_dim: size of the models trained with dot and with scaled dot.
        trained_steps: their optimiser steps, a multiple of `look_every`.
        look_every: steps between two measurements of them.
        trained_batch: their strings per step.
        kernel_scales: factors on the initial kernels.
        kernel_dim: size of the tokens, and of additive's hidden layer.
        kernel_samples: number of random sets of kernels and tokens.
        widths: lengths to which strings of at most 8 letters are padded.
        padding_steps: optimiser steps of the models with and without the padding mask.
        batches: batches for the signal-to-noise ratio of gradients, at least 2.
        scores: scores whose loss surface is measured.
        curvature_steps: optimiser steps before the second measurement.
        iterations: Lanczos iterations.
        trace_samples: random vectors for the estimate of the trace.
        seeds: trainings per model.
        strings: strings in the batch that models are measured on.
        dim: size of the models of questions 3 and 4.
        num_heads: heads of all attentions.
        learning_rate: Adam's rate at the start.
        batch_size: strings per step of questions 3 and 4.
    """

    dims: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    source_length: int = 16
    samples: int = 2048
    model_dims: tuple[int, ...] = (16, 64, 256)
    trained_dim: int = 256
    trained_steps: int = 300
    look_every: int = 25
    trained_batch: int = 32
    kernel_scales: tuple[float, ...] = (0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 17, 30)
    kernel_dim: int = 32
    kernel_samples: int = 64
    widths: tuple[int, ...] = (8, 16)
    padding_steps: int = 300
    batches: int = 16
    scores: ScoreNames = ("additive", "dot", "general", "scaled")
    curvature_steps: int = 500
    iterations: int = 20
    trace_samples: int = 16
    seeds: int = 3
    strings: int = 64
    dim: int = ModelConfig.dim
    num_heads: int = ModelConfig.num_heads
    learning_rate: float = Reversal.train.learning_rate
    batch_size: int | None = Reversal.train.batch_size

    def __post_init__(self) -> None:
        check_some(self, "model_dims", "kernel_scales", "scores")
        check_least(self, **_LEAST)
        if min(self.kernel_scales) <= 0:
            raise ValueError(f"kernel_scales must be greater than 0; got {min(self.kernel_scales)}")
        if self.trained_steps % self.look_every:
            raise ValueError(
                f"trained_steps must be a multiple of look_every {self.look_every};"
                f" got {self.trained_steps}"
            )
        for score in self.scores:
            self.training(score, self.curvature_steps)
        for dim in (*self.model_dims, self.trained_dim):
            self.training("dot", self.trained_steps, dim=dim)

    def training(
        self, score: str, steps: int, *, batch_size: int | None = None, **settings: Any
    ) -> Reversal:
        """Returns the settings of one run; `settings` are those of the model."""
        model = {"score": score, "dim": self.dim, "num_heads": self.num_heads, **settings}
        return dataclasses.replace(
            SHORT_STRINGS,
            model=dataclasses.replace(SHORT_STRINGS.model, **model),
            train=dataclasses.replace(
                SHORT_STRINGS.train,
                seeds=self.seeds,
                steps=steps,
                batch_size=self.batch_size if batch_size is None else batch_size,
                learning_rate=self.learning_rate,
            ),
        )


_LEAST = {  # setting -> least value of its numbers
    "dims": 1, "source_length": 3, "samples": 10, "trained_steps": 1, "look_every": 1,
    "trained_batch": 1, "kernel_dim": 1, "kernel_samples": 2, "widths": 8, "padding_steps": 1,
    "batches": 2, "curvature_steps": 1, "iterations": 1, "trace_samples": 2, "seeds": 2,
    "strings": 1,
}  # fmt: skip

QUICK = Config(
    dims=(4, 64), samples=256, model_dims=(16,), trained_dim=16, trained_steps=4, look_every=2,
    trained_batch=4, kernel_scales=(0.5, 1, 30), kernel_dim=16, kernel_samples=16, widths=(8,),
    padding_steps=2, batches=2, scores=("scaled",), curvature_steps=2, iterations=20,
    trace_samples=2, seeds=2, strings=8,
)  # fmt: skip

DRAWN_FROM = 0  # seed of everything random, except the models


def run(config: Config) -> JSON:
    """Computes the numbers of all four questions."""
    trained = {
        score: _learning(config, score, config.trained_dim, config.look_every)
        for score in questions.PRODUCTS
    }

    def untrained(score: str, dim: int) -> questions.Arrays:
        if dim == config.trained_dim:
            return trained[score]
        return _learning(config, score, dim, every=None)

    return {
        "random": _random(config),
        "models": {
            str(dim): {score: _first(untrained(score, dim)) for score in questions.PRODUCTS}
            for dim in config.model_dims
        },
        "training": {
            "steps": list(range(0, config.trained_steps + 1, config.look_every)),
            **{score: significant(looks) for score, looks in trained.items()},
        },
        "kernels": _kernels(config),
        "padding": _padding(config),
        "curvature": {
            score: significant(
                questions.curvature(
                    config.training(score, config.curvature_steps),
                    iterations=config.iterations,
                    samples=config.trace_samples,
                    strings=config.strings,
                    seed=DRAWN_FROM,
                )
            )
            for score in config.scores
        },
    }


def _random(config: Config) -> JSON:
    size = {"source_length": config.source_length, "samples": config.samples}
    scores: JSON = {score: {} for score in questions.PRODUCTS}
    for dim in config.dims:
        for score, rows in questions.random_products(dim, **size, seed=DRAWN_FROM).items():
            squares = rows["jacobian_norm"].astype(np.float64) ** 2
            excess = rows["dlogits_norm"].astype(np.float64) ** 2 - squares
            # mean |dlogits|^2 / mean |J|^2 - 1, which should be 0.
            rows["excess"] = excess / squares.mean()
            for name, values in rows.items():
                summary = scores[score].setdefault(name, {"mean": [], "error": [], "median": []})
                summary["mean"].append(significant(values.mean()))
                summary["error"].append(significant(standard_error(values)))
                summary["median"].append(significant(np.median(values)))
            largest = np.sort(rows["dlogits_norm"])[::-1]
            share = largest[: math.ceil(config.samples / 10)].sum() / largest.sum()
            scores[score].setdefault("share_of_top_tenth", []).append(significant(share))
    return {
        "gap_density": significant(expected_maximum(config.source_length)),
        "limit_of_entropy": significant(
            questions.limit_of_entropy(config.source_length, samples=100_000, seed=DRAWN_FROM)
        ),
        "scores": scores,
    }


def _learning(config: Config, score: str, dim: int, every: int | None) -> questions.Arrays:
    training = config.training(
        score, config.trained_steps, dim=dim, batch_size=config.trained_batch
    )
    return questions.learning(training, strings=config.strings, seed=DRAWN_FROM, every=every)


def _kernels(config: Config) -> JSON:
    samples_by_score = questions.growing_kernels(
        config.kernel_scales,
        dim=config.kernel_dim,
        length=config.source_length,
        samples=config.kernel_samples,
        seed=DRAWN_FROM,
    )
    return {
        score: {
            name: {
                "mean": significant(values.mean(axis=-1)),
                "error": significant(standard_error(values)),
                "median": significant(np.median(values, axis=-1)),
                "largest": significant(values.max(axis=-1)),
            }
            for name, values in of_score.items()
        }
        for score, of_score in samples_by_score.items()
    }


def _padding(config: Config) -> JSON:
    arms = {f"masked, {config.widths[0]}": (True, config.widths[0])}
    arms |= {f"unmasked, {width}": (False, width) for width in config.widths}
    return {
        name: significant(
            questions.padding(
                config.training("general", config.padding_steps, mask_padding=masked),
                width=width,
                strings=config.strings,
                batches=config.batches,
                seed=DRAWN_FROM,
            )
        )
        for name, (masked, width) in arms.items()
    }


def _first(looks: questions.Arrays) -> JSON:
    return {name: significant(values[0]) for name, values in looks.items()}


if __name__ == "__main__":
    run_experiment(__name__)
