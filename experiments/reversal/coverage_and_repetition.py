"""Does coverage keep attention from looking twice, and a model from writing twice?

Source:   chapter 38 ("Attention Variants"), §38.8; See, Liu and Manning 2017, equations 10-13.
Command:  .venv/bin/python -m experiments.reversal.coverage_and_repetition
Time:     2 minutes on 2 CPU cores beside other work.
Expected: with the coverage loss, sum_j min(a_tj, cov_tj) falls, and so does repetition. The loss
          falls to its floor. Repetition falls only where there is any: on strings longer than those
          of training, whose answers are wrong with and without coverage.

The chapter gives formulas and no numbers. The experiment has two parts:

1. A stuck decoder: its query never changes, and so neither does plain attention. With coverage in
   the score, v . tanh(q + k_j + w cov_tj), a negative w moves attention on. There are four keys of
   one feature each. This part is about additive attention, for which the formula is.
2. Reversal with additive attention, or with each of `--scores`: without coverage, with coverage in
   the score, and with the coverage loss added to the cross entropy. Models are examined throughout
   training, on strings as long as those of training and on longer ones, where they break down and
   repeat themselves. The models have the settings for short strings (`SHORT_STRINGS` in
   `training_settings.py`).

The loss cannot fall to 0 in part 2. A string of n letters takes n + 1 queries, one of them for EOS,
and each query distributes a weight of 1 over n letters. The weight that escapes the loss,
max(0, a_tj - cov_tj), is at most the amount by which a_tj raises the largest weight that letter j
has had, which adds up to at most 1 per letter:

    sum_t loss_t >= (n + 1) - sum_j max_t a_tj >= 1

The excess, sum_j max(0, cov_j - 1) after the last query, has the same floor. Attention that goes to
each letter once, and for EOS anywhere, reaches both floors. Looking twice is not the same as
writing twice: repetition counts the letters of an answer that occur more than once, and more often
than in the right answer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.coverage import coverage_attention, coverage_loss
from attention_jax.tasks.evaluation import decoded
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.losses import cross_entropy, real_tokens
from attention_jax.training.metrics import exact_match
from experiments.experiment import JSON, Expectation, ScoreNames, near, rounded, run_experiment
from experiments.reversal.arms import above_zero, follow
from experiments.reversal.coverage_and_repetition_figures import CAPTIONS, plot
from experiments.reversal.coverage_and_repetition_report import report
from experiments.reversal.strings import VOCABULARY, random_batch
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

# The stuck decoder: the feature of its query and of four keys, v, and the number of queries.
QUERY, KEYS, V, STEPS = 0.0, (0.8, 0.4, 0.0, -0.4), 10.0, 4

PLAIN, IN_SCORE, IN_LOSS = "no coverage", "in the score", "in the score and the loss"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"attention": "global", "coverage_weight": 0.0},
    IN_SCORE: {"attention": "coverage", "coverage_weight": 0.0},
    IN_LOSS: {"attention": "coverage", "coverage_weight": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores of the cross attention.
        kernels: values of w in the stuck decoder's score, the first 0.
        steps: optimiser steps, a multiple of `look_every`.
        look_every: steps between two measurements of a model.
        seeds: trainings per arm, at least 2.
        strings: strings in each of the two batches that models are measured on.
        far_length: length of the strings in the second batch, longer than those of training.
    """

    scores: ScoreNames = ("additive",)
    kernels: tuple[float, ...] = (0.0, -0.1, -0.2, -0.35, -0.5, -0.7, -1.0, -1.4, -2.0, -3.0)
    steps: int = 800
    look_every: int = 50
    strings: int = 256
    far_length: int = 10

    def __post_init__(self) -> None:
        check_some(self, "scores")
        if len(self.kernels) < 2 or self.kernels[0] != 0 or max(self.kernels) > 0:
            raise ValueError(f"kernels must be 0 and then one or more below it; got {self.kernels}")
        far_length = SHORT_STRINGS.max_length + 1
        check_least(self, look_every=1, seeds=2, strings=1, far_length=far_length)
        if self.steps < 1 or self.steps % self.look_every:
            raise ValueError(
                f"steps must be a multiple of look_every {self.look_every}; got {self.steps}"
            )
        for score in self.scores:
            self.training(score, PLAIN)

    def training(self, score: str, arm: str) -> Reversal:
        """Returns the settings of one arm."""
        settings = ARMS[arm]
        plain = self.training_of(SHORT_STRINGS, score=score, attention=settings["attention"])
        return dataclasses.replace(plain, coverage_weight=settings["coverage_weight"])


QUICK = Config(kernels=(0.0, -2.0), steps=4, look_every=2, seeds=2, strings=8)


def run(config: Config) -> JSON:
    """Measures the stuck decoder, and every model at each look: [looks, seeds] per number."""
    near_batch, far_batch = look_at(config)
    return {
        "stuck": [stuck_decoder(kernel) for kernel in config.kernels],
        "looks": list(range(0, config.steps + 1, config.look_every)),
        "arms": {
            score: {
                arm: _learning(config, config.training(score, arm), near_batch, far_batch)
                for arm in ARMS
            }
            for score in config.scores
        },
    }


# --- 1. the stuck decoder ---


def stuck_decoder(kernel: float) -> JSON:
    """Returns the weights, the coverage and the loss of every query."""
    result = coverage_attention(
        jnp.full((STEPS, 1), QUERY), jnp.array(KEYS)[:, None], jnp.eye(len(KEYS)),
        score="additive",
        params={
            "query_kernel": jnp.ones((1, 1)), "key_kernel": jnp.ones((1, 1)), "v": jnp.array([V]),
        },
        coverage_kernel=jnp.array([kernel]),
    )  # fmt: skip
    return {
        "kernel": kernel,
        "weights": rounded(result.weights),
        "coverage": rounded(result.coverage),
        "loss": rounded(result.loss),
    }


# --- 2. reversal ---


def look_at(config: Config) -> tuple[Batch, Batch]:
    """Returns two batches that are not trained on: as long as in training, and longer."""
    near_rng, far_rng = jax.random.split(jax.random.key(1))
    size: Any = {"batch_size": config.strings, "source_start": False}
    shortest, longest = SHORT_STRINGS.min_length, SHORT_STRINGS.max_length
    return (
        random_batch(near_rng, min_length=shortest, max_length=longest, **size),
        random_batch(far_rng, min_length=config.far_length, max_length=config.far_length, **size),
    )


def _learning(config: Config, training: Reversal, near_batch: Batch, far_batch: Batch) -> JSON:
    def look(params: Any) -> dict[str, Any]:
        model = training.bind(params)
        return {
            "trained lengths": _measure(model, near_batch),
            "longer": _measure(model, far_batch),
        }

    looks = follow(training, training, look, every=config.look_every)
    return jax.tree.map(rounded, looks)


def _measure(model: Any, batch: Batch) -> dict[str, Array]:
    """Measures attention with the right letters given, and the model's own answers."""
    logits, weights = model(
        batch.source, batch.source_lengths, batch.target_inputs, return_weights=True
    )
    tokens = decoded(model, batch)
    return {
        "cross_entropy": cross_entropy(logits, batch.targets, batch.target_lengths),
        **looked_twice(weights[0], batch.target_lengths),
        "repeated": repeated_letters(tokens, batch),
        "exact_match": exact_match(tokens, batch.targets, batch.target_lengths),
    }


def looked_twice(weights: Array, target_lengths: Array) -> dict[str, Array]:
    """Returns the coverage loss and the excess per string, means over strings.

    loss = sum_tj min(a_tj, cov_tj), and excess = sum_j max(0, sum_t a_tj - 1).

    Args:
        weights: [B, T, S].
        target_lengths: [B], in queries, EOS included.
    """
    real = real_tokens(target_lengths, weights.shape[1])
    losses = jnp.where(real, coverage_loss(weights), 0)
    coverage = jnp.sum(jnp.where(real[..., None], weights, 0), axis=1)
    return {
        "coverage_loss": jnp.mean(jnp.sum(losses, axis=-1)),
        "excess": jnp.mean(jnp.sum(jnp.maximum(coverage - 1, 0), axis=-1)),
    }


def repeated_letters(tokens: Array, batch: Batch) -> Array:
    """Returns the share of the answers' letters that are wrong repetitions.

    A letter counts from its second occurrence on, and only if the right answer has it less often.
    """
    written, right = _letter_counts(tokens), _letter_counts(batch.targets)
    repeated = jnp.maximum(written - jnp.maximum(right, 1), 0)
    return jnp.sum(repeated) / jnp.maximum(jnp.sum(written), 1)


def _letter_counts(tokens: Array) -> Array:
    """How often each letter of the alphabet occurs, [B, letters]; special tokens do not count."""
    letters = len(VOCABULARY.alphabet)
    first = VOCABULARY.size - letters  # one_hot of a special token, out of range, is all 0
    return jnp.sum(jax.nn.one_hot(tokens - first, letters, dtype=jnp.int32), axis=1)


# --- expectations ---


def expectations(numbers: JSON) -> list[Expectation]:
    """Coverage moves the stuck decoder on; in reversal, loss and repetition fall."""
    totals = [sum(decoder["loss"]) for decoder in numbers["stuck"]]
    checks = [
        Expectation(
            "the stuck decoder: least loss with a kernel / without coverage",
            "the coverage loss penalises double-attending (§38.8)",
            min(totals) / totals[0], 0, 0.2, "a clear margin",
        ),
    ]  # fmt: skip
    for score, arms in numbers["arms"].items():
        checks += _of_score(score, arms)
    return checks


def _of_score(score: str, arms: JSON) -> list[Expectation]:
    checks = []
    last, far = (
        {
            arm: {name: np.array(looks[-1]) for name, looks in of_arm[strings].items()}
            for arm, of_arm in arms.items()
        }
        for strings in ("trained lengths", "longer")
    )
    claim = f"{score}: coverage loss per string after training, with the coverage loss"
    checks.append(
        near(claim, "falls", last[IN_LOSS]["coverage_loss"].mean(), 1, 0.1, "a clear margin")
    )
    for arm in (IN_SCORE, PLAIN):
        claim = (
            f"{score}: the coverage loss lowers the coverage loss per string, compared with {arm}"
        )
        fall = last[arm]["coverage_loss"] - last[IN_LOSS]["coverage_loss"]
        checks.append(above_zero(claim, "falls", fall))
    claim = f"{score}: the coverage loss lowers the share of repeated letters in longer strings"
    checks.append(above_zero(claim, "falls", far[PLAIN]["repeated"] - far[IN_LOSS]["repeated"]))
    worst = min(float(of_arm["exact_match"].min()) for of_arm in last.values())
    claim = f"{score}: exact match at trained lengths: worst seed of any arm"
    checks.append(Expectation(claim, "", worst, 0.98, 1, "a clear margin"))
    best = max(float(of_arm["exact_match"].max()) for of_arm in far.values())
    claim = f"{score}: exact match of longer strings: best seed of any arm"
    checks.append(Expectation(claim, "", best, 0, 0.02, "hardly any string"))
    claim = f"{score}: cross entropy of longer strings, with the coverage loss - without coverage"
    checks.append(
        above_zero(claim, "", far[IN_LOSS]["cross_entropy"] - far[PLAIN]["cross_entropy"])
    )
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
