"""Which letters has the encoder mixed into each position, and which heads did it?

Answer:   By rollout, a position keeps 27 to 30 % of its own letter after three layers. The cross
          attention has 83 to 85 % of its weight on the right position, but through the encoder only
          24 to 27 % on the right letter. At most 2 of 12 heads align, and 5 to 7 spread.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import attention_rollout, capture, cross_rollout
from attention_jax.reports import plotting
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from experiments import lab
from experiments.heads import ALIGNS, SPREADS, entropy
from experiments.lab import Claim, Row, column, where
from experiments.reversal.arms import SHORT_STRINGS, TrainingSettings, trained_arms

Array = jax.Array

WORD = "reversal"  # drawn; all strings have its length


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

    scores: lab.ScoreNames = ("scaled",)
    encoder_layers: int = 3
    num_heads: int = 4
    strings: int = 512
    workdir: Path = Path("runs/rollout")

    def __post_init__(self) -> None:
        lab.check_least(self, encoder_layers=1, strings=1)

    def arms(self) -> Iterator[tuple[Row, Reversal]]:
        """Yields the labels and the settings of every arm."""
        sizes = {"encoder_layers": self.encoder_layers, "num_heads": self.num_heads}
        for score in self.scores:
            scores = {"score": score, "self_attention_score": None}
            yield {"score": score}, self.training_of(SHORT_STRINGS, **scores, **sizes)


QUICK = Config(seeds=2, steps=50, encoder_layers=2, strings=32)


def run(config: Config) -> list[Row]:
    """A row for each score and seed; and one for each score, with the first seed's attention."""
    rows: list[Row] = []
    for labels, trained in trained_arms(config.arms(), config.workdir):
        task, look = trained.task, functools.partial(look_at, trained.task)
        strings = task.batch(jax.random.key(0), size=config.strings, length=len(WORD))
        measured = means(jax.jit(jax.vmap(look, in_axes=(0, None)))(trained.params, strings))
        exact = accuracies(task, trained.params, [len(WORD)], strings=config.strings)
        measured["reversed"] = np.asarray(exact[len(WORD)].free_running_exact)
        for seed in range(config.seeds):
            by_name = {name: lab.significant(values[seed]) for name, values in measured.items()}
            rows.append({**labels, "seed": seed, **by_name})
        letters = jnp.array([task.vocabulary.encode(WORD)])
        lengths = jnp.array([len(WORD)])
        word = task.padded((letters, lengths), (jnp.flip(letters, axis=1), lengths))
        drawn = jax.jit(look)(trained.params_of(0), word)
        rows.append({**labels, **{name: lab.significant(x[0]) for name, x in drawn.items()}})
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
    own = np.diagonal(arrays["rollouts"], axis1=-2, axis2=-1)
    on_letter = {  # the letter that query i writes is the i-th from the end
        f"{name}_on_letter": np.trace(arrays[name][..., ::-1], axis1=-2, axis2=-1).mean(1)
        for name in ("cross", "cross_rollout")
    }
    return {
        "sharpness": weights.max(-1).mean((1, 4)),  # [seeds, L, N]
        "spread": entropy(weights).mean((1, 4)) / np.log(weights.shape[-1]),
        "own_letter": own.mean((1, 3)),  # [seeds, L]: the share that a position keeps
        **{name: sums / weights.shape[-1] for name, sums in on_letter.items()},
    }


def claims(rows: list[Row]) -> list[Claim]:
    """Cross attention finds the letter to write, and its rollout puts less weight on it."""
    cross, right = (np.array(column(rows, name)) for name in ("cross_on_letter", "reversed"))
    less = (cross - column(rows, "cross_rollout_on_letter")).min()
    text = "scaled: cross attention on the letter"
    return [
        Claim(f"{text}, worst seed", cross.min(), 0.8, 1),
        Claim(f"{text} less its rollout's share, worst seed", less, 0.1, 1),
        Claim("scaled: strings reversed, worst seed", right.min(), 0.98, 1),
    ]


def table(rows: list[Row]) -> str:
    """Heads and letters by seed."""
    shares = {
        "cross attention on the letter to write, %": "cross_on_letter",
        "the same by rollout, %": "cross_rollout_on_letter",
        "strings reversed, %": "reversed",
    }
    heads = ("heads that align", "heads that spread", "own letter by rollout after each layer, %")
    lines = []
    for row in where(rows, "seed"):
        aligned = np.sum(np.array(row["sharpness"]) >= ALIGNS)
        spread = np.sum(np.array(row["spread"]) >= SPREADS)
        kept = " / ".join(f"{100 * share:.0f}" for share in row["own_letter"])
        percent = (f"{100 * row[name]:.0f}" for name in shares.values())
        lines.append((row["score"], row["seed"], aligned, spread, kept, *percent))
    return lab.markdown(("score", "seed", *heads, *shares), lines)


CAPTIONS = {
    "rollout": "Attention rollout after each encoder layer, the cross attention, and its rollout"
    " through the encoder."
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """The attention of the first score on the word."""
    word = where(rows, "rollouts")[0]
    letters, back = list(WORD), list(reversed(WORD))
    panels = {
        f"rollout after layer {layer}": (np.array(weights), letters, letters)
        for layer, weights in enumerate(word["rollouts"], start=1)
    }
    panels["cross attention"] = np.array(word["cross"]), back, letters
    panels["its rollout"] = np.array(word["cross_rollout"]), back, letters
    labels: Any = {"xlabel": "source letter (key)", "ylabel": "position or letter (query)"}
    return {"rollout": plotting.weight_heatmaps(panels, columns=3, size=2.3, **labels)}


if __name__ == "__main__":
    lab.main(__name__)
