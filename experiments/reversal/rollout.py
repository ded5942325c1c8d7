"""Which letters has the encoder mixed into each position, and which heads did it?

Answer:   after three layers a position holds 27 to 30 % of its own letter by rollout; the cross
          attention has 83 to 85 % of its weight on the right position, but only 24 to 27 % on the
          right letter. At most 2 of 12 heads align, and 5 to 7 spread.
Source:   Abnar and Zuidema 2020, section 3 (attention rollout); topic 7: heads that align and heads
          that spread.
Command:  .venv/bin/python -m experiments.reversal.rollout   # 3 minutes on 2 CPU cores

The model reverses strings with three encoder layers of four heads. A head aligns if the largest
weights of its rows are at least 0.5 on average. It spreads if the entropy of its rows is on average
at least 0.9 of that of uniform rows, log S. With `--scores`, each score is used in the cross
attention and in the self attentions.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import attention_rollout, capture, cross_rollout
from attention_jax.reports import plotting
from attention_jax.scores import score_folder
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from experiments.lab import Claim, Row, ScoreNames, check_least, column, main, markdown, significant
from experiments.reversal.arms import trained_arm
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings

Array = jax.Array

WORD = "reversal"  # drawn; all strings have its length
ALIGNS, SPREADS = 0.5, 0.9


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores to train; figures show the first.
        encoder_layers: number of encoder blocks.
        num_heads: heads of every attention.
        strings: random strings for the means.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = ("scaled",)
    encoder_layers: int = 3
    num_heads: int = 4
    strings: int = 512
    workdir: Path = Path("runs/rollout")

    def __post_init__(self) -> None:
        check_least(self, encoder_layers=1, strings=1)

    def training(self, score: str) -> Reversal:
        """Returns the settings of one run."""
        return self.training_of(
            SHORT_STRINGS, score=score, self_attention_score=None,
            encoder_layers=self.encoder_layers, num_heads=self.num_heads,
        )  # fmt: skip


QUICK = Config(seeds=2, steps=50, encoder_layers=2, strings=32)


def run(config: Config) -> list[Row]:
    """A row for each score and seed; the first seed's row has the attention on the word."""
    trainings = {score: config.training(score) for score in config.scores}
    rows = []
    for score, training in trainings.items():
        trained, _ = trained_arm(training, config.workdir / score_folder(score))
        exact = accuracies(training, trained.params, [len(WORD)], strings=config.strings)
        look = functools.partial(look_at, training)
        drawn = training.batch(jax.random.key(0), size=config.strings, length=len(WORD))
        measured = means(jax.jit(jax.vmap(look, in_axes=(0, None)))(trained.params, drawn))
        measured["reversed"] = np.asarray(exact[len(WORD)].free_running_exact)
        for seed in range(config.seeds):
            by_name = {name: significant(values[seed]) for name, values in measured.items()}
            rows.append({"score": score, "seed": seed, **by_name})
        word = jnp.array([training.vocabulary.encode(WORD)]), jnp.array([len(WORD)])
        reversed_word = jnp.flip(word[0], axis=1), word[1]
        weights = jax.jit(look)(trained.params_of(0), training.padded(word, reversed_word))
        rows.append({
            "score": score,
            **{name: np.round(np.float64(each[0]), 3).tolist() for name, each in weights.items()},
        })  # fmt: skip
    return rows


def look_at(task: Reversal, params: Any, batch: Batch) -> dict[str, Array]:
    """Weights and rollouts of one seed with the right answers given."""
    (_, cross), attentions = capture(task.bind(params), *batch.inputs, return_weights=True)
    layers: Any = [each.weights for name, each in attentions.items() if name.startswith("encoder")]
    rollouts = attention_rollout(jnp.stack(layers), return_layers=True)  # [L, B, S, S]
    cross = cross[-1, :, : batch.source.shape[1]]  # the last target, EOS, is no letter's
    return {
        "encoder": jnp.stack(layers, axis=1),  # [B, L, N, S, S]
        "rollouts": jnp.moveaxis(rollouts, 1, 0),  # [B, L, S, S]
        "cross": cross,  # [B, S, S]
        "cross_rollout": cross_rollout(cross[:, None], rollouts[-1]),
    }


def means(attention: dict[str, Array]) -> dict[str, np.ndarray]:
    """Means over strings of what `look_at` returns with a leading axis of seeds, [seeds, ...]."""
    arrays = {name: np.asarray(array, np.float64) for name, array in attention.items()}
    weights = arrays["encoder"]
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)
    own = np.diagonal(arrays["rollouts"], axis1=-2, axis2=-1)
    # The letter that query i writes is the i-th from the end.
    on_letter = {
        f"{name}_on_letter": np.trace(arrays[name][..., ::-1], axis1=-2, axis2=-1).mean(1)
        / weights.shape[-1]
        for name in ("cross", "cross_rollout")
    }
    return {
        "sharpness": weights.max(-1).mean((1, 4)),  # [seeds, L, N]
        "spread": entropy.mean((1, 4)) / np.log(weights.shape[-1]),
        "own_letter": own.mean((1, 3)),  # [seeds, L]: the share that a position keeps
        **on_letter,
    }


def claims(rows: list[Row]) -> list[Claim]:
    """Cross attention finds the letter to write, and its rollout puts less weight on it."""
    found = []
    for score in dict.fromkeys(column(rows, "score")):
        cross, mixed = (
            np.array(column(rows, f"{name}_on_letter", score=score))
            for name in ("cross", "cross_rollout")
        )
        found += [
            Claim(f"{score}: cross attention on the letter, worst seed", cross.min(), 0.8, 1),
            Claim(f"{score}: its rollout's share of the letter is less by, worst seed",
                  (cross - mixed).min(), 0.1, 1),
            Claim(f"{score}: strings reversed, worst seed",
                  min(column(rows, "reversed", score=score)), 0.98, 1),
        ]  # fmt: skip
    return found


def table(rows: list[Row]) -> str:
    """Heads and letters by seed, in %."""
    lines = [
        [
            row["score"], row["seed"],
            f"{np.sum(np.array(row['sharpness']) >= ALIGNS)} of {np.size(row['sharpness'])}",
            f"{np.sum(np.array(row['spread']) >= SPREADS)} of {np.size(row['spread'])}",
            " / ".join(f"{100 * share:.0f}" for share in row["own_letter"]),
            *(f"{100 * row[name]:.0f}"
              for name in ("cross_on_letter", "cross_rollout_on_letter", "reversed")),
        ]
        for row in rows if "seed" in row
    ]  # fmt: skip
    head = (
        "score", "seed", "heads that align", "that spread", "own letter after each layer, %",
        "cross attention on the letter to write, %", "its rollout, %", "strings reversed, %",
    )  # fmt: skip
    return markdown(head, lines)


CAPTIONS = {
    "rollout": "Attention rollout after each encoder layer, the cross attention, and its rollout"
    " through the encoder.",
    "rollout_heads": "Weights of every encoder head on one word: few heads align, and most of the"
    " deeper ones spread over all letters.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """The attention of the first score on the word."""
    word = next(row for row in rows if "encoder" in row)
    letters = list(WORD)
    heads = {
        f"layer {layer}, head {head}": (np.array(weights), letters, letters)
        for layer, of_layer in enumerate(word["encoder"], start=1)
        for head, weights in enumerate(of_layer, start=1)
    }
    mixed = {
        f"rollout after layer {layer}": (np.array(weights), letters, letters)
        for layer, weights in enumerate(word["rollouts"], start=1)
    }
    for name, title in (("cross", "cross attention"), ("cross_rollout", "its rollout")):
        mixed[title] = (np.array(word[name]), letters[::-1], letters)
    xlabel, columns = "source letter (key)", len(word["encoder"][0])
    return {
        "rollout": plotting.weight_heatmaps(
            mixed, columns=3, ylabel="position or letter (query)", xlabel=xlabel, size=2.5
        ),
        "rollout_heads": plotting.weight_heatmaps(
            heads, columns=columns, ylabel="position (query)", xlabel=xlabel, size=2.2
        ),
    }


if __name__ == "__main__":
    main(__name__)
