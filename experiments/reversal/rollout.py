"""Which letters has the encoder mixed into each position, and which heads did it?

Source:   Abnar and Zuidema 2020, section 3 (attention rollout); topic 7: heads that align and heads
          that spread.
Command:  .venv/bin/python -m experiments.reversal.rollout
Time:     3 minutes on 2 CPU cores.
Expected: rows of every rollout sum to 1 (to 1e-5). The cross attention looks at position S - 1 - i
          when it writes letter i. Its rollout through the encoder puts less weight on that letter,
          because the encoder has mixed other letters into the position.

The model reverses strings with three encoder layers of four heads. A head's sharpness is its mean
largest weight. Its spread is the mean entropy of its rows divided by that of uniform rows, log S.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax.analysis import attention_rollout, cross_rollout
from attention_jax.nn.block_config import BlockConfig
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import random_batch
from attention_jax.tasks.reversal.evaluation import batch_of_words
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig, bind
from attention_jax.training.loop import LoopConfig
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.reversal.arms import trained_arm

Array = jax.Array

# Least sharpness of a head that aligns, and least spread of a head that spreads.
ALIGNS, SPREADS = 0.5, 0.9


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; `ReversalConfig` holds those of the training.

    Attributes:
        seeds: number of trainings.
        steps: optimiser steps per training.
        encoder_layers: number of encoder blocks.
        num_heads: heads of every attention.
        strings: random strings for the means.
        word: the word whose attention is drawn, for the first seed; all strings have its length.
        workdir: where the run is kept; what is finished there is not trained again.
    """

    seeds: int = 3
    steps: int = 2500
    encoder_layers: int = 3
    num_heads: int = 4
    strings: int = 512
    word: str = "reversal"
    workdir: Path = Path("runs/rollout")

    def __post_init__(self) -> None:
        if self.strings < 1:
            raise ValueError(f"strings must be at least 1; got {self.strings}")
        if len(VOCABULARY.encode(self.word)) < 2:
            raise ValueError(f"word must have at least two letters; got {self.word!r}")
        check_folder("workdir", self.workdir)
        self.training()

    def training(self) -> ReversalConfig:
        """Returns the settings of the run."""
        return ReversalConfig(
            model=Seq2SeqConfig(
                block=BlockConfig(num_heads=self.num_heads), encoder_layers=self.encoder_layers
            ),
            loop=LoopConfig(seeds=self.seeds, steps=self.steps),
        )


QUICK = Config(seeds=1, steps=100, encoder_layers=2, strings=32)


def run(config: Config) -> JSON:
    """Trains the model, and measures its attention."""
    trained, _ = trained_arm(config.training(), config.workdir)
    look = functools.partial(_look, config.training().model)
    length = len(config.word)
    batch = random_batch(
        jax.random.key(0),
        vocabulary=VOCABULARY,
        batch_size=config.strings,
        min_length=length,
        max_length=length,
    )
    measured = jax.jit(jax.vmap(look, in_axes=(0, None)))(trained.params, batch)
    first_seed = jax.tree.map(lambda leaf: leaf[0], trained.params)
    drawn = jax.jit(look)(first_seed, batch_of_words([config.word]))
    return {
        **_numbers(measured, length),
        "word": {name: np.asarray(array).round(4).tolist() for name, array in drawn.items()},
    }


def _look(model_config: Seq2SeqConfig, params: Any, batch: Batch) -> dict[str, Array]:
    """Weights and rollouts of one seed with the right answers given."""
    model = bind(model_config, params)
    memory, weights = model.encode(batch.source, batch.source_lengths, return_weights=True)
    _, cross = model.decode(memory, batch.source_lengths, batch.target_inputs, return_weights=True)
    rollouts = attention_rollout(weights, return_layers=True)
    letters = batch.source.shape[1]  # the last target, EOS, is aligned with no letter
    cross = cross[-1, :, :letters]
    return {
        "encoder": jnp.moveaxis(weights, 1, 0),  # [B, L, N, S, S]
        "rollouts": jnp.moveaxis(rollouts, 1, 0),  # [B, L, S, S]
        "cross": cross,  # [B, S, S]
        "cross_rollout": cross_rollout(cross[:, None], rollouts[-1]),
    }


def _numbers(measured: dict[str, Array], length: int) -> JSON:
    """Means over strings, [seeds, ...]."""
    weights = np.asarray(measured["encoder"], np.float64)
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)
    own = np.diagonal(np.asarray(measured["rollouts"]), axis1=-2, axis2=-1)
    reversed_rows = np.arange(length)[::-1]

    def on_the_letter(array: Array) -> list[float]:
        aligned = np.asarray(array)[:, :, np.arange(length), reversed_rows]
        return aligned.mean((1, 2)).round(4).tolist()

    rows = (np.asarray(measured[name]).sum(-1) for name in ("rollouts", "cross_rollout"))
    return {
        "sharpness": weights.max(-1).mean((1, 4)).round(4).tolist(),  # [seeds, L, N]
        "spread": (entropy.mean((1, 4)) / np.log(length)).round(4).tolist(),
        # The share that a position keeps of its own letter.
        "own_letter": own.mean((1, 3)).round(4).tolist(),  # [seeds, L]
        "cross_on_the_letter": on_the_letter(measured["cross"]),
        "cross_rollout_on_the_letter": on_the_letter(measured["cross_rollout"]),
        "largest_row_sum_error": float(max(np.abs(row - 1).max() for row in rows)),
    }


CAPTIONS = {
    "rollout_heads": "Weights of every encoder head on one word: some heads align, others spread"
    " over all letters.",
    "rollout": "Attention rollout after each encoder layer, the cross attention, and its rollout"
    " through the encoder.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    letters = list(numbers["config"]["word"])
    encoder = np.array(numbers["word"]["encoder"])[0]
    heads = {
        f"layer {layer + 1}, head {head + 1}": (encoder[layer, head], letters, letters)
        for layer in range(encoder.shape[0])
        for head in range(encoder.shape[1])
    }
    rollouts = np.array(numbers["word"]["rollouts"])[0]
    mixed = {
        f"rollout after layer {layer + 1}": (rollout, letters, letters)
        for layer, rollout in enumerate(rollouts)
    }
    for name, title in (("cross", "cross attention"), ("cross_rollout", "its rollout")):
        mixed[title] = (np.array(numbers["word"][name])[0], letters[::-1], letters)
    xlabel = "source letter (key)"
    return {
        "rollout_heads": plotting.weight_heatmaps(
            heads, columns=encoder.shape[1], ylabel="position (query)", xlabel=xlabel
        ),
        "rollout": plotting.weight_heatmaps(
            mixed, ylabel="position or letter written (query)", xlabel=xlabel
        ),
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """Rows of every rollout sum to 1, and rollout puts less weight on the letter to write."""
    rounding = "sums of some dozen float32"
    error = numbers["largest_row_sum_error"]
    checks = [Expectation("largest error of a row's sum", "0", error, 0, 1e-5, rounding)]
    pairs = zip(numbers["cross_on_the_letter"], numbers["cross_rollout_on_the_letter"], strict=True)
    for seed, (cross, rollout) in enumerate(pairs):
        claim = f"seed {seed}: cross attention on the letter minus its rollout's share"
        checks.append(Expectation(claim, "", cross - rollout, 0.1, 1, "a clear margin"))
    return checks


def report(numbers: JSON) -> str:
    """Returns one line per seed."""
    sharpness, spread = np.array(numbers["sharpness"]), np.array(numbers["spread"])
    count = sharpness.shape[1] * sharpness.shape[2]
    lines = []
    for seed in range(len(sharpness)):
        aligning = int((sharpness[seed] >= ALIGNS).sum())
        spreading = int((spread[seed] >= SPREADS).sum())
        kept = " / ".join(f"{100 * share:.0f}" for share in numbers["own_letter"][seed])
        lines.append(
            f"seed {seed}: of {count} encoder heads {aligning} align and {spreading} spread; own"
            f" letter after each layer {kept} %; cross attention on the letter to write"
            f" {100 * numbers['cross_on_the_letter'][seed]:.0f} %, its rollout"
            f" {100 * numbers['cross_rollout_on_the_letter'][seed]:.0f} %"
        )
    return "\n".join(
        [*lines, f"largest error of a row sum: {numbers['largest_row_sum_error']:.1e}"]
    )


if __name__ == "__main__":
    run_experiment(__name__)
