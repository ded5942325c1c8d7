"""Does a published ranking of four scores come from the scores, or from a missing padding mask?

Source:   chapter 38 ("Attention Variants"), §38.6: letters right by string length, for a GRU
          encoder-decoder with four scores, one training each. It finds scaled dot the worst by far
          and blames the scaling.
Command:  .venv/bin/python -m experiments.reversal.gru_padding
Time:     11 minutes on 2 CPU cores shared with other work.
Expected: without the mask, the published numbers; with it, at least 99 % of the letters of lengths
          3-8 with every score. At length 10, beyond training, scaled dot stays behind dot.

The chapter trains on padded batches, masks no padding, and tests single strings, which have no
padding. The model of the chapter (`gru_model.py`) is trained here that way, and again from the same
initial parameters and on the same strings with padding masked in its attention. Both are tested
without padding, as in the chapter, and the first also padded to 8 letters, as in training.

Strings, batches and optimiser are those of short strings (`SHORT_STRINGS` in
`training_settings.py`).

One training says little about additive without the mask. The model in PyTorch, by hand, agrees: it
comes close to the published numbers with the chapter's seed 1, and not with seed 2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.loop import TrainState, initial_state, train_steps
from experiments.experiment import JSON, ScoreNames, run_experiment, significant
from experiments.reversal import published
from experiments.reversal.arms import EXTRAPOLATION_LENGTH, TRAINED_LENGTHS
from experiments.reversal.curves import accuracy_by_length
from experiments.reversal.gru_model import GRUConfig, GRUTask, Params, letters_right
from experiments.reversal.gru_padding_report import expectations, report
from experiments.reversal.strings import random_batch, reversal_batch
from experiments.reversal.training_settings import SHORT_STRINGS
from experiments.score_colors import score_indices
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

LENGTHS = range(TRAINED_LENGTHS[0], EXTRAPOLATION_LENGTH + 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; those of the training that are not here are the defaults of `Reversal`.

    Attributes:
        scores: scores to train.
        seeds: trainings per score, with the mask and without.
        steps: optimiser steps per training, a multiple of 25.
        batch_size: strings per step.
        learning_rate: Adam's rate at the start; it falls to 0 along a cosine.
        embedding_dim: size of a token's embedding.
        hidden_dim: size of both GRUs' states.
        strings: test strings per length.
    """

    scores: ScoreNames = tuple(published.LETTERS_RIGHT)
    seeds: int = 3
    steps: int = 2500
    batch_size: int = 64
    learning_rate: float = 3e-3
    embedding_dim: int = GRUConfig.embedding_dim
    hidden_dim: int = GRUConfig.hidden_dim
    strings: int = 1000

    def __post_init__(self) -> None:
        check_some(self, "scores")
        check_least(self, strings=1)
        for score in self.scores:
            self.model(score)
        training = self.training()
        if self.steps % training.train.log_every:
            raise ValueError(
                f"steps must be a multiple of {training.train.log_every}; got {self.steps}"
            )

    def model(self, score: str) -> GRUConfig:
        """Returns the settings of the model."""
        return GRUConfig(score, self.embedding_dim, self.hidden_dim)

    def training(self) -> Reversal:
        """Returns the settings of the training."""
        return dataclasses.replace(
            SHORT_STRINGS,
            train=dataclasses.replace(
                SHORT_STRINGS.train,
                seeds=self.seeds,
                steps=self.steps,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
            ),
        )


QUICK = Config(scores=("dot", "scaled"), seeds=2, steps=100, strings=50)


def run(config: Config) -> JSON:
    """Trains the model with every score, with the mask and without, and counts right letters."""
    numbers: JSON = {"published": published.LETTERS_RIGHT, "scores": {}}
    for score in config.scores:
        numbers["scores"][score] = _both_arms(config, score)
        print(f"{score}: trained and tested", flush=True)
    return numbers


def _both_arms(config: Config, score: str) -> JSON:
    model = config.model(score)
    states, loss = _trained(model, config.training())
    masked = jnp.arange(2 * config.seeds) >= config.seeds
    right = jax.jit(
        jax.vmap(lambda params, batch, mask: letters_right(model, params, batch, mask),
                 in_axes=(0, None, 0))
    )  # fmt: skip

    def by_length(params: Params, masks: Array, lengths: range) -> dict[int, np.ndarray]:
        return {
            length: np.asarray(right(params, _strings(config, length, lengths[-1]), masks))
            for length in lengths
        }

    # The encoder reads from left to right: if the decoder does not see the padding behind a string,
    # no letter depends on it. So all lengths can have one shape.
    bare = by_length(states.params, jnp.ones_like(masked), LENGTHS)
    padded = by_length(states.params, masked, TRAINED_LENGTHS)
    arms = {"unmasked": slice(None, config.seeds), "masked": slice(config.seeds, None)}
    numbers = {
        arm: {"loss": significant(loss[seeds]), "letters_right": _listed(bare, seeds)}
        for arm, seeds in arms.items()
    }
    numbers["unmasked"]["letters_right_padded"] = _listed(padded, arms["unmasked"])
    return numbers


def _trained(model: GRUConfig, training: Reversal) -> tuple[TrainState, np.ndarray]:
    """All seeds without the mask, then with it, and their loss over the last steps: [2 seeds]."""
    every = training.train.log_every

    def advance(state: TrainState, mask_padding: Array) -> tuple[TrainState, Array]:
        task = GRUTask(model, training, mask_padding)
        state, metrics = train_steps(task, every, state)
        return state, metrics["loss"]

    seeds = initial_state(GRUTask(model, training, True))
    states = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), seeds)
    masked = jnp.arange(2 * training.train.seeds) >= training.train.seeds
    advance_all = jax.jit(jax.vmap(advance), donate_argnums=0)
    for _ in range(training.train.steps // every):
        states, loss = advance_all(states, masked)
    return states, np.asarray(loss)


def _strings(config: Config, length: int, width: int) -> Batch:
    """Fresh strings of one length, padded to `width`."""
    batch = random_batch(
        jax.random.fold_in(jax.random.key(0), length),
        batch_size=config.strings,
        min_length=length,
        max_length=length,
        source_start=False,
    )
    letters = jnp.pad(batch.source, ((0, 0), (0, width - length)))
    return reversal_batch(letters, batch.source_lengths, source_start=False)


def _listed(by_length: dict[int, np.ndarray], seeds: slice) -> JSON:
    return {
        str(length): [round(float(share), 6) for share in shares[seeds]]
        for length, shares in by_length.items()
    }


CAPTIONS = {
    "gru_padding": "Share of letters right by string length, on strings without padding: as"
    " published, from one training; with the same model trained again without a padding mask; and"
    " trained with it. Points are means over seeds; bars are one standard deviation on either side,"
    " cut off at 0 and 1.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the published numbers and both arms."""
    seeds = numbers["config"]["seeds"]
    arms = {"no padding mask": "unmasked", "padding masked": "masked"}
    panels = {
        f"{title} ({seeds} seeds)": {
            score: {int(n): by_seed for n, by_seed in both[arm]["letters_right"].items()}
            for score, both in numbers["scores"].items()
        }
        for title, arm in arms.items()
    }
    of_chapter = {
        score: {int(n): [share] for n, share in numbers["published"][score].items()}
        for score in numbers["scores"]
        if score in numbers["published"]
    }
    if of_chapter:
        panels = {"as published (one training)": of_chapter, **panels}
    figure = accuracy_by_length(
        panels,
        ylabel="letters right (teacher forcing)",
        indices=score_indices(numbers["scores"]),
    )
    return {"gru_padding": figure}


if __name__ == "__main__":
    run_experiment(__name__)
