"""Does coverage keep attention from looking twice, and a model from writing twice?

Source:   chapter 38 ("Attention Variants"), §38.8; See, Liu and Manning 2017, equations 10-13.
Command:  .venv/bin/python experiments/coverage_and_repetition.py
Time:     6 minutes on 2 CPU cores, measured beside other work.
Expected: with the coverage loss, sum_j min(a_tj, cov_tj) falls, and so does repetition. The first
          does, to its floor; the second only where there is any: on strings longer than trained on,
          whose answers are wrong with coverage and without.

The chapter gives formulas and no numbers. Two parts:

1. A decoder that is stuck: its query never changes, and so neither does plain attention. With
   coverage in the score, v . tanh(q + k_j + w cov_tj), a negative w moves it on. Four keys, the
   features of one number each, computed by hand in Python's own floats beside the library.
2. Reversal with additive attention: without coverage, with coverage in the score, and with the
   coverage loss beside the cross entropy. Looked at through training, on strings as long as those
   that are trained on and on longer ones, where models break down and repeat themselves.

The loss cannot fall to 0 there. A string of n letters takes n + 1 queries, one of them for EOS, and
each has a weight of 1 to give to n letters. What escapes the loss, max(0, a_tj - cov_tj), is at
most what a_tj adds to the largest weight that letter j has had, so never more than 1 a letter:

    sum_t loss_t >= (n + 1) - sum_j max_t a_tj >= 1

The excess, sum_j max(0, cov_j - 1) after the last query, has the same floor. Attention that goes to
each letter once, and for EOS anywhere, meets both. Looking twice and writing twice are not the
same: counted of the answers are letters that stand there more than once, and more often than in
the right answer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from coverage_figures import CAPTIONS, plot
from experiment import JSON, Expectation, conduct, near, run_command
from gradient_questions import follow

from attention_jax.functional.coverage import coverage_attention, coverage_loss
from attention_jax.nn.cross_attention import CrossAttentionConfig
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import random_batch
from attention_jax.tasks.reversal.evaluation import decode
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig, bind, reversal_task
from attention_jax.training.loop import LoopConfig
from attention_jax.training.losses import cross_entropy, real_tokens
from attention_jax.training.metrics import exact_match

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "run"]

Array = jax.Array

# The stuck decoder: features of its one query and of four keys, and v. A query a row.
QUERY, KEYS, V, STEPS = 0.0, (0.8, 0.4, 0.0, -0.4), 10.0, 4

PLAIN, IN_SCORE, IN_LOSS = "no coverage", "in the score", "in the score and the loss"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"attention": "global", "coverage_weight": 0.0},
    IN_SCORE: {"attention": "coverage", "coverage_weight": 0.0},
    IN_LOSS: {"attention": "coverage", "coverage_weight": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; what is not here is as in `ReversalConfig`.

    Attributes:
        kernels: w of the stuck decoder's score, the first 0.
        steps: optimiser steps, a multiple of `look_every`.
        look_every: steps between two looks at a model.
        seeds: models of each arm, at least 2.
        strings: in each of the two batches that models are looked at with.
        far_length: of the strings in the second, longer than any that is trained on.
        results: where numbers and figures go.
    """

    kernels: tuple[float, ...] = (0.0, -0.1, -0.2, -0.35, -0.5, -0.7, -1.0, -1.4, -2.0, -3.0)
    steps: int = 800
    look_every: int = 50
    seeds: int = 3
    strings: int = 256
    far_length: int = 10
    results: Path = Path("experiments/results")

    def __post_init__(self) -> None:
        if len(self.kernels) < 2 or self.kernels[0] != 0 or max(self.kernels) > 0:
            raise ValueError(f"kernels must be 0 and then one or more below it; got {self.kernels}")
        least = {"look_every": 1, "seeds": 2, "strings": 1}
        least["far_length"] = ReversalConfig.max_length + 1
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} must be at least {number}; got {getattr(self, name)}")
        if self.steps < 1 or self.steps % self.look_every:
            raise ValueError(
                f"steps must be a multiple of look_every {self.look_every}; got {self.steps}"
            )
        self.training(PLAIN)
        check_folder("results", self.results)

    def training(self, arm: str) -> ReversalConfig:
        """One arm's settings."""
        settings = ARMS[arm]
        return ReversalConfig(
            model=Seq2SeqConfig(
                score="additive", cross_attention=CrossAttentionConfig(settings["attention"])
            ),
            loop=LoopConfig(seeds=self.seeds, steps=self.steps),
            coverage_weight=settings["coverage_weight"],
        )


QUICK = Config(kernels=(0.0, -2.0), steps=4, look_every=2, seeds=2, strings=8)


def run(config: Config) -> JSON:
    """The stuck decoder, and what is seen of every model at each look: [looks, seeds] each."""
    near_batch, far_batch = look_at(config)
    return {
        "stuck": [stuck_decoder(kernel) for kernel in config.kernels],
        "floor": {
            "per string": 1.0,
            "per token": _rounded(1 / float(jnp.mean(near_batch.target_lengths))),
        },
        "looks": list(range(0, config.steps + 1, config.look_every)),
        "arms": {arm: _learning(config, arm, near_batch, far_batch) for arm in ARMS},
    }


# --- 1. a decoder that is stuck ---


def stuck_decoder(kernel: float) -> JSON:
    """The library's numbers, and how far those by hand are from them."""
    result = coverage_attention(
        jnp.full((STEPS, 1), QUERY), jnp.array(KEYS)[:, None], jnp.eye(len(KEYS)),
        score="additive",
        params={
            "query_kernel": jnp.ones((1, 1)), "key_kernel": jnp.ones((1, 1)), "v": jnp.array([V]),
        },
        coverage_kernel=jnp.array([kernel]),
    )  # fmt: skip
    by_hand = stuck_decoder_by_hand(kernel)
    ours = {"weights": result.weights, "coverage": result.coverage, "loss": result.loss}
    return {
        "kernel": kernel,
        **{name: _rounded(array) for name, array in ours.items()},
        "largest_difference": max(
            float(np.max(np.abs(np.asarray(ours[name], np.float64) - by_hand[name])))
            for name in ours
        ),
    }


def stuck_decoder_by_hand(kernel: float) -> dict[str, np.ndarray]:
    """§38.8's formulas as they stand, one key after another."""
    coverage = [0.0] * len(KEYS)
    weights, losses = [], []
    for _ in range(STEPS):
        logits = [
            V * math.tanh(QUERY + key + kernel * covered)
            for key, covered in zip(KEYS, coverage, strict=True)
        ]
        normalizer = sum(math.exp(logit) for logit in logits)
        row = [math.exp(logit) / normalizer for logit in logits]
        losses.append(sum(min(w, c) for w, c in zip(row, coverage, strict=True)))
        coverage = [c + w for w, c in zip(row, coverage, strict=True)]
        weights.append(row)
    named = {"weights": weights, "coverage": coverage, "loss": losses}
    return {name: np.array(values) for name, values in named.items()}


# --- 2. reversal ---


def look_at(config: Config) -> tuple[Batch, Batch]:
    """Strings that nothing is learned from: as long as in training, and longer."""
    near_rng, far_rng = jax.random.split(jax.random.key(1))
    size: Any = {"vocabulary": VOCABULARY, "batch_size": config.strings}
    shortest, longest = ReversalConfig.min_length, ReversalConfig.max_length
    return (
        random_batch(near_rng, min_length=shortest, max_length=longest, **size),
        random_batch(far_rng, min_length=config.far_length, max_length=config.far_length, **size),
    )


def _learning(config: Config, arm: str, near_batch: Batch, far_batch: Batch) -> JSON:
    training = config.training(arm)

    def look(params: Any) -> dict[str, Any]:
        model = bind(training.model, params)
        return {
            "trained lengths": _seen_of(model, near_batch),
            "longer": _seen_of(model, far_batch),
        }

    seen = follow(training, reversal_task(training), look, every=config.look_every)
    return jax.tree.map(_rounded, seen)


def _seen_of(model: Any, batch: Batch) -> dict[str, Array]:
    """Of attention with the right letters given, and of the answers that the model gives itself."""
    logits, weights = model(
        batch.source, batch.source_lengths, batch.target_inputs, return_weights=True
    )
    tokens = decode(model, batch).tokens
    return {
        "cross_entropy": cross_entropy(logits, batch.targets, batch.target_lengths),
        **looked_twice(weights[0], batch.target_lengths),
        "repeated": repeated_letters(tokens, batch),
        "exact_match": exact_match(tokens, batch.targets, batch.target_lengths),
    }


def looked_twice(weights: Array, target_lengths: Array) -> dict[str, Array]:
    """Coverage loss and excess of a string, means over strings; weights [B, T, S].

    loss = sum_tj min(a_tj, cov_tj), and excess = sum_j max(0, sum_t a_tj - 1).
    """
    real = real_tokens(target_lengths, weights.shape[1])
    losses = jnp.where(real, coverage_loss(weights), 0)
    coverage = jnp.sum(jnp.where(real[..., None], weights, 0), axis=1)
    return {
        "coverage_loss": jnp.mean(jnp.sum(losses, axis=-1)),
        "excess": jnp.mean(jnp.sum(jnp.maximum(coverage - 1, 0), axis=-1)),
    }


def repeated_letters(tokens: Array, batch: Batch) -> Array:
    """Share of the letters of answers that are there once too often.

    A letter counts from its second time on, and only beyond as often as the right answer has it.
    """
    written, right = _letter_counts(tokens), _letter_counts(batch.targets)
    repeated = jnp.maximum(written - jnp.maximum(right, 1), 0)
    return jnp.sum(repeated) / jnp.maximum(jnp.sum(written), 1)


def _letter_counts(tokens: Array) -> Array:
    """[B, letters] of the alphabet; special tokens do not count."""
    letters = len(VOCABULARY.alphabet)
    first = VOCABULARY.size - letters  # one_hot of what is out of range is 0 everywhere
    return jnp.sum(jax.nn.one_hot(tokens - first, letters, dtype=jnp.int32), axis=1)


def _rounded(numbers: Any) -> Any:
    return np.asarray(numbers, np.float64).round(5).tolist()


# --- what was expected ---


def expectations(numbers: JSON) -> list[Expectation]:
    """By hand and floors, which are exact; that loss and repetition fall, over seeds."""
    stuck = numbers["stuck"]
    totals = [sum(of["loss"]) for of in stuck]
    found = [
        near(
            "the stuck decoder by hand: largest difference of any number",
            "", max(of["largest_difference"] for of in stuck), 0, 1e-5,
            "float32",
        ),
        near(
            "the stuck decoder without coverage: loss of all queries",
            "", totals[0], len(stuck[0]["loss"]) - 1, 1e-4, "each after the first looks again",
        ),
        Expectation(
            "the stuck decoder: least loss with a kernel / without coverage",
            "the coverage loss penalises double-attending (§38.8)",
            min(totals) / totals[0], 0, 0.2, "a clear margin",
        ),
    ]  # fmt: skip
    arms = numbers["arms"]
    for name, least in (("coverage_loss", 1), ("excess", 1)):
        lowest = min(np.min(arm[of][name]) for arm in arms.values() for of in arm)
        claim = f"{name.replace('_', ' ')} of a string is at least 1: least of all looks"
        found.append(Expectation(claim, "", float(lowest), least - 1e-3, math.inf, "float32"))
    last = {arm: {n: np.array(v[-1]) for n, v in of["trained lengths"].items()}
            for arm, of in arms.items()}  # fmt: skip
    claim = "the last coverage loss of a string, with its loss"
    found.append(
        near(claim, "falls", last[IN_LOSS]["coverage_loss"].mean(), 1, 0.1, "a clear margin")
    )
    for arm in (IN_SCORE, PLAIN):
        claim = f"the coverage loss of a string falls by its loss, compared with {arm}"
        found.append(_falls(claim, last[arm]["coverage_loss"] - last[IN_LOSS]["coverage_loss"]))
    far = {arm: np.array(of["longer"]["repeated"][-1]) for arm, of in arms.items()}
    claim = "letters repeated in longer strings: their share falls by its loss and coverage"
    found.append(_falls(claim, far[PLAIN] - far[IN_LOSS]))
    worst = min(float(of["exact_match"].min()) for of in last.values())
    claim = "exact match at trained lengths, with its loss or without: worst seed of any arm"
    found.append(Expectation(claim, "", worst, 0.98, 1, "a clear margin, no more"))
    return found


def _falls(claim: str, by_seed: np.ndarray) -> Expectation:
    error = float(by_seed.std(ddof=1) / math.sqrt(by_seed.size))
    return Expectation(
        claim, "falls", float(by_seed.mean()), 2 * error, math.inf, "2 standard errors over seeds"
    )


if __name__ == "__main__":
    run_command(
        Config,
        functools.partial(
            conduct, "coverage_and_repetition", run=run, plot=plot, expectations=expectations
        ),
    )
