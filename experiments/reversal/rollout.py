"""Which letters has the encoder mixed into each position, and which heads did it?

Source:   Abnar and Zuidema 2020, section 3 (attention rollout); topic 7: heads that align and heads
          that spread.
Command:  .venv/bin/python -m experiments.reversal.rollout
Time:     3 minutes on 2 CPU cores.
Expected: the cross attention looks at position S - 1 - i when it writes letter i. Its rollout
          through the encoder puts less weight on that letter, because the encoder has mixed other
          letters into the position.

The model reverses strings with three encoder layers of four heads. A head's sharpness is its mean
largest weight. Its spread is the mean entropy of its rows divided by that of uniform rows, log S.
With `--scores`, each score is used in the cross attention and in the self attentions. The models
have the settings for short strings (`SHORT_STRINGS` in `training_settings.py`).
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

from attention_jax.analysis import attention_rollout, capture, cross_rollout
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from experiments.experiment import JSON, Expectation, ScoreNames, rounded, run_experiment
from experiments.reversal.arms import trained_arm
from experiments.reversal.strings import batch_of_words, evaluate, random_batch
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings, check_word
from experiments.setting_checks import check_least, check_some

Array = jax.Array

# Least sharpness of a head that aligns, and least spread of a head that spreads.
ALIGNS, SPREADS = 0.5, 0.9


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores to train; figures show the first.
        encoder_layers: number of encoder blocks.
        num_heads: heads of every attention.
        strings: random strings for the means.
        word: the word whose attention is drawn, for the first seed; all strings have its length.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = ("scaled",)
    encoder_layers: int = 3
    num_heads: int = 4
    strings: int = 512
    word: str = "reversal"
    workdir: Path = Path("runs/rollout")

    def __post_init__(self) -> None:
        check_some(self, "scores")
        check_least(self, strings=1)
        check_word(self.word, letters=2)
        check_folder("workdir", self.workdir)
        for score in self.scores:
            self.training(score)

    def training(self, score: str) -> Reversal:
        """Returns the settings of one run."""
        return self.training_of(
            SHORT_STRINGS, score=score, self_attention_score=None,
            encoder_layers=self.encoder_layers, num_heads=self.num_heads,
        )  # fmt: skip


QUICK = Config(seeds=1, steps=100, encoder_layers=2, strings=32)


def run(config: Config) -> JSON:
    """Trains each score, and measures its attention."""
    measured, drawn = {}, {}
    for score in config.scores:
        measured[score], drawn[score] = _measure(config, score)
    return {"scores": measured, "word": drawn[config.scores[0]]}


def _measure(config: Config, score: str) -> tuple[JSON, JSON]:
    """The means over strings, and the attention on the word."""
    trained, _ = trained_arm(config.training(score), config.workdir / score_folder(score))
    look = functools.partial(_look, trained.task)
    length = len(config.word)
    batch = random_batch(
        jax.random.key(0), batch_size=config.strings,
        min_length=length, max_length=length, source_start=False,
    )  # fmt: skip
    attention = jax.jit(jax.vmap(look, in_axes=(0, None)))(trained.params, batch)
    exact = evaluate(trained, lengths=[length], strings=config.strings)[length].free_running_exact
    first_seed = jax.tree.map(lambda leaf: leaf[0], trained.params)
    drawn = jax.jit(look)(first_seed, batch_of_words([config.word], source_start=False))
    return (
        {**_means(attention, length), "exact_match": rounded(exact)},
        {name: rounded(array, 3) for name, array in drawn.items()},
    )


def _look(task: Reversal, params: Any, batch: Batch) -> dict[str, Array]:
    """Weights and rollouts of one seed with the right answers given."""
    (_, cross), attentions = capture(task.bind(params), *batch.inputs, return_weights=True)
    names = [name for name in attentions if name.startswith("encoder")]
    of_layers: Any = [attentions[name].weights for name in names]
    weights = jnp.stack(of_layers)  # [L, B, N, S, S]
    rollouts = attention_rollout(weights, return_layers=True)
    letters = batch.source.shape[1]  # the last target, EOS, is aligned with no letter
    cross = cross[-1, :, :letters]
    return {
        "encoder": jnp.moveaxis(weights, 1, 0),  # [B, L, N, S, S]
        "rollouts": jnp.moveaxis(rollouts, 1, 0),  # [B, L, S, S]
        "cross": cross,  # [B, S, S]
        "cross_rollout": cross_rollout(cross[:, None], rollouts[-1]),
    }


def _means(attention: dict[str, Array], length: int) -> JSON:
    """Means over strings, [seeds, ...]."""
    weights = np.asarray(attention["encoder"], np.float64)
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)
    own = np.diagonal(np.asarray(attention["rollouts"]), axis1=-2, axis2=-1)
    reversed_rows = np.arange(length)[::-1]

    def on_the_letter(array: Array) -> list[float]:
        aligned = np.asarray(array)[:, :, np.arange(length), reversed_rows]
        return rounded(aligned.mean((1, 2)), 4)

    return {
        "sharpness": rounded(weights.max(-1).mean((1, 4)), 4),  # [seeds, L, N]
        "spread": rounded(entropy.mean((1, 4)) / np.log(length), 4),
        # The share that a position keeps of its own letter.
        "own_letter": rounded(own.mean((1, 3)), 4),  # [seeds, L]
        "cross_on_the_letter": on_the_letter(attention["cross"]),
        "cross_rollout_on_the_letter": on_the_letter(attention["cross_rollout"]),
    }


CAPTIONS = {
    "rollout_heads": "Weights of every encoder head on one word: some heads align, others spread"
    " over all letters.",
    "rollout": "Attention rollout after each encoder layer, the cross attention, and its rollout"
    " through the encoder.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the attention of the first score on the word."""
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
            heads, columns=encoder.shape[1], ylabel="position (query)", xlabel=xlabel, size=2.2
        ),
        "rollout": plotting.weight_heatmaps(
            mixed, columns=3, ylabel="position or letter (query)", xlabel=xlabel, size=2.5
        ),
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """Cross attention finds the letter to write, and its rollout puts less weight on it."""
    checks = []
    for score, measured in numbers["scores"].items():
        on_the_letter = measured["cross_on_the_letter"]
        pairs = zip(on_the_letter, measured["cross_rollout_on_the_letter"], strict=True)
        for seed, (cross, rollout) in enumerate(pairs):
            claim = f"{score}, seed {seed}: cross attention on the letter minus its rollout's share"
            checks.append(Expectation(claim, "", cross - rollout, 0.1, 1, "a clear margin"))
        claim, worst = f"{score}: cross attention on the letter, worst seed", min(on_the_letter)
        checks.append(Expectation(claim, "", worst, 0.8, 1, "most of the weight"))
        claim, worst = f"{score}: strings reversed, worst seed", min(measured["exact_match"])
        checks.append(Expectation(claim, "", worst, 0.98, 1, "nearly all strings"))
    return checks


def report(numbers: JSON) -> str:
    """Returns one row per score and seed, and what the rollout says."""
    config = numbers["config"]
    heads, length = config["encoder_layers"] * config["num_heads"], len(config["word"])
    lines = [
        f"Each model has {config['encoder_layers']} encoder layers with {config['num_heads']} heads"
        f" each. A head aligns if its largest weight is at least {ALIGNS} on average, and spreads"
        f" if its entropy is at least {SPREADS} of that of uniform weights. All numbers but the"
        f" counts of heads are %, on {config['strings']} random strings of {length} letters.",
        "",
        f"| score | seed | of {heads} heads align | spread | own letter after each layer | cross"
        " attention on the letter to write | its rollout | strings reversed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for score, measured in numbers["scores"].items():
        lines += [_row(score, seed, measured) for seed in range(len(measured["exact_match"]))]
    cross, mixed, own = (
        _range([100 * share for of in numbers["scores"].values() for share in shares(of)])
        for shares in (
            lambda of: of["cross_on_the_letter"],
            lambda of: of["cross_rollout_on_the_letter"],
            lambda of: [by_layer[-1] for by_layer in of["own_letter"]],
        )
    )
    lines += [
        "",
        f"The cross attention puts {cross} % of its weight on the position of the letter that it"
        f" writes. By rollout that position holds {own} % of its own letter after the last encoder"
        f" layer, and the cross attention reaches the letter with {mixed} %. Rollout counts what is"
        " mixed into a position, not what the model uses: it writes the right letters all the"
        " same.",
    ]
    return "\n".join(lines)


def _row(score: str, seed: int, measured: JSON) -> str:
    aligning = int((np.array(measured["sharpness"][seed]) >= ALIGNS).sum())
    spreading = int((np.array(measured["spread"][seed]) >= SPREADS).sum())
    kept = " / ".join(f"{100 * share:.0f}" for share in measured["own_letter"][seed])
    shares = (
        100 * measured[name][seed]
        for name in ("cross_on_the_letter", "cross_rollout_on_the_letter", "exact_match")
    )
    cells = " | ".join(f"{share:.0f}" for share in shares)
    return f"| {score} | {seed} | {aligning} | {spreading} | {kept} | {cells} |"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    run_experiment(__name__)
