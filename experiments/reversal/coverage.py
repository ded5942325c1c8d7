"""Does coverage keep attention from looking twice, and a model from writing twice?

Answer: Yes, but the answers get no better. The coverage loss of a string falls from 3.1 to its
    floor of 1.0. In strings longer than those of training, the share of wrongly repeated letters
    falls from 2.6 % to 0.03 %, but no string is right and the cross entropy rises.
Source: chapter 38 ("Attention Variants"), §38.8; See, Liu and Manning 2017, equations 10-13.
Command: .venv/bin/python -m experiments.reversal.coverage  # 2 minutes on 2 CPU cores

The chapter gives formulas and no numbers. The experiment has two parts:

1. A stuck decoder: its query never changes, and so neither does plain attention. With coverage in
   the score, v . tanh(q + k_j + w cov_tj), a negative w moves attention on. There are four keys of
   one feature each. This part is about additive attention, for which the formula was written.
2. Reversal with additive attention, or with each of `--scores`: without coverage, with coverage in
   the score, and with the coverage loss added to the cross entropy. Models are examined throughout
   training, on strings as long as those of training and on longer ones, where they break down and
   repeat themselves. The models have the settings for short strings (`SHORT_STRINGS` in `arms.py`).

The loss cannot fall to 0 in part 2. A string of n letters takes n + 1 queries, one of them for EOS,
and each query distributes a weight of 1 over n letters. The weight that escapes the loss,
max(0, a_tj - cov_tj), is at most the amount by which a_tj raises the largest weight that letter j
has had, which adds up to at most 1 per letter:

    sum_t loss_t >= (n + 1) - sum_j max_t a_tj >= 1

Attention that visits each letter once, and any letter for EOS, reaches the floor. Looking twice is
not the same as writing twice: repetition counts the letters of an answer that occur more than once,
and more often than in the right answer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.coverage import coverage_attention, coverage_loss
from attention_jax.reports import plotting
from attention_jax.tasks.evaluation import decoded
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import FIRST, Batch
from attention_jax.training.losses import cross_entropy, real_tokens
from attention_jax.training.metrics import exact_match
from experiments import lab
from experiments.lab import Claim, Row, ScoreNames, column, gain, significant, where
from experiments.reversal.arms import SHORT_STRINGS, TrainingSettings, looks

Array = jax.Array

# The stuck decoder: the feature of its query and of four keys, v, and the number of queries.
QUERY, KEYS, V, STEPS = 0.0, (0.8, 0.4, 0.0, -0.4), 10.0, 4
PLAIN, IN_SCORE, IN_LOSS = ARMS = "no coverage", "in the score", "in the score and the loss"
NEAR, FAR = "trained lengths", "longer"
FLOOR = 1.0  # of the coverage loss per string
MOST_DRAWN = 0.12  # of the repeated letters, which begin at one half


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
        if len(self.kernels) < 2 or self.kernels[0] != 0 or max(self.kernels) > 0:
            raise ValueError(f"kernels must be 0 and then one or more below it; got {self.kernels}")
        far_length = SHORT_STRINGS.max_length + 1
        lab.check_least(self, steps=1, look_every=1, seeds=2, strings=1, far_length=far_length)
        if self.steps % self.look_every:
            raise ValueError(f"steps must be a multiple of look_every; got {self.steps}")

    def task(self, score: str, arm: str) -> Reversal:
        """The settings of one arm."""
        attention = "global" if arm == PLAIN else "coverage"
        task = self.training_of(SHORT_STRINGS, score=score, attention=attention)
        return dataclasses.replace(task, coverage_weight=float(arm == IN_LOSS))


QUICK = Config(kernels=(0.0, -2.0), steps=4, look_every=2, seeds=2, strings=8)


def run(config: Config) -> list[Row]:
    """A row per kernel of the stuck decoder, and per look at an arm on both kinds of strings."""
    rows = [stuck_decoder(kernel) for kernel in config.kernels]
    near_rng, far_rng = jax.random.split(jax.random.key(1))
    longer: Any = {"min_length": config.far_length, "max_length": config.far_length}
    batches = {
        NEAR: SHORT_STRINGS.batch(near_rng, size=config.strings),
        FAR: dataclasses.replace(SHORT_STRINGS, **longer).batch(far_rng, size=config.strings),
    }
    for score, arm in itertools.product(config.scores, ARMS):
        task = config.task(score, arm)

        def look(params: Any, task: Reversal = task) -> dict[str, dict[str, Array]]:
            return {name: measure(task, params, batch) for name, batch in batches.items()}

        for step, found in looks(task, config.look_every, look):
            for strings, measured in found.items():
                row = {"score": score, "arm": arm, "strings": strings, "step": step}
                rows.append(row | significant(measured))
    return rows


def stuck_decoder(kernel: float) -> Row:
    """The weights and the loss of every query, and the coverage after the last."""
    ones = jnp.ones((1, 1))
    result = coverage_attention(
        jnp.full((STEPS, 1), QUERY),
        jnp.array(KEYS)[:, None],
        jnp.eye(len(KEYS)),
        score="additive",
        params={"query_kernel": ones, "key_kernel": ones, "v": jnp.array([V])},
        coverage_kernel=jnp.array([kernel]),
    )
    names = ("weights", "coverage", "loss")
    return {"kernel": kernel} | {name: significant(getattr(result, name)) for name in names}


def measure(task: Reversal, params: Any, batch: Batch) -> dict[str, Array]:
    """What one seed's model does on a batch, [] each."""
    model, lengths = task.bind(params), batch.target_lengths
    logits, weights = model(*batch.inputs, return_weights=True)
    answers = decoded(model, batch)
    return {
        "cross_entropy": cross_entropy(logits, batch.targets, lengths),
        "coverage_loss": loss_per_string(weights[0], lengths),
        "repeated": repeated_letters(answers, batch.targets),
        "exact_match": exact_match(answers, batch.targets, lengths),
    }


def loss_per_string(weights: Array, target_lengths: Array) -> Array:
    """The coverage loss, sum_tj min(a_tj, cov_tj), a mean over strings.

    Args:
        weights: [B, T, S].
        target_lengths: [B], in queries, EOS included.
    """
    real = real_tokens(target_lengths, weights.shape[1])
    return jnp.mean(jnp.sum(jnp.where(real, coverage_loss(weights), 0), axis=-1))


def repeated_letters(answers: Array, targets: Array) -> Array:
    """The share of the answers' letters that are wrong repetitions; [B, T] -> [].

    A letter counts from its second occurrence on, and only if the right answer has it less often.
    """
    letters = SHORT_STRINGS.vocabulary.size - FIRST
    # one_hot of a special token, which is out of range, is all 0.
    written, right = (
        jnp.sum(jax.nn.one_hot(tokens - FIRST, letters, dtype=jnp.int32), axis=1)
        for tokens in (answers, targets)
    )
    repeated = jnp.maximum(written - jnp.maximum(right, 1), 0)
    return jnp.sum(repeated) / jnp.maximum(jnp.sum(written), 1)


# --- what came out ---


def last(rows: list[Row], score: str, strings: str, name: str) -> dict[str, np.ndarray]:
    """What the last look at each arm measured: [seeds]."""
    looks = where(rows, score=score, strings=strings)
    return {arm: np.array(column(looks, name, arm=arm)[-1]) for arm in ARMS}


def claims(rows: list[Row]) -> list[Claim]:
    """Coverage moves the stuck decoder on; in reversal, loss and repetition fall."""
    totals = [sum(row["loss"]) for row in where(rows, "kernel")]
    text = "the stuck decoder: least loss with a kernel / without coverage"
    penalised = "the coverage loss penalises double-attending (§38.8)"
    near, far = (functools.partial(last, rows, "additive", strings) for strings in (NEAR, FAR))
    loss, repeated, entropy = near("coverage_loss"), far("repeated"), far("cross_entropy")
    at_end = "additive: coverage loss per string after training, with the coverage loss"
    lowers = "additive: the coverage loss per string is lower than with coverage in the score alone"
    writes = "additive: the coverage loss lowers the share of repeated letters, longer strings"
    higher = "additive: cross entropy of longer strings, coverage loss minus no coverage"
    worst = min(float(by_seed.min()) for by_seed in near("exact_match").values())
    best = max(float(by_seed.max()) for by_seed in far("exact_match").values())
    return [
        Claim(text, min(totals) / totals[0], 0, 0.2, penalised),
        Claim(at_end, float(loss[IN_LOSS].mean()), 0.9, 1.1, "falls"),
        Claim(lowers, *gain(loss[IN_SCORE], loss[IN_LOSS]), source="falls"),
        Claim(writes, *gain(repeated[PLAIN], repeated[IN_LOSS]), source="falls"),
        Claim("additive: exact match at trained lengths, worst seed of any arm", worst, 0.98, 1),
        Claim("additive: exact match of longer strings, best seed of any arm", best, 0, 0.02),
        Claim(higher, *gain(entropy[IN_LOSS], entropy[PLAIN])),
    ]


def table(rows: list[Row]) -> str:
    """Each arm after training, means over seeds."""
    columns = (
        ("coverage loss per string", NEAR, "coverage_loss", "{:.3f}"),
        ("strings reversed", NEAR, "exact_match", "{:.1%}"),
        ("longer strings: letters repeated wrongly", FAR, "repeated", "{:.2%}"),
        ("longer strings: reversed", FAR, "exact_match", "{:.1%}"),
        ("longer strings: cross entropy, nats", FAR, "cross_entropy", "{:.2f}"),
    )
    heads = ("score", "coverage", *(head for head, *_ in columns))
    lines = []
    for score, arm in itertools.product(dict.fromkeys(column(rows, "score")), ARMS):
        means = (form.format(last(rows, score, *of)[arm].mean()) for _, *of, form in columns)
        lines.append((score, arm, *means))
    return lab.markdown(heads, lines)


CAPTIONS = {
    "coverage_stuck": "Attention of a decoder whose query never changes. Without coverage all rows"
    " are the same; with a negative kernel w in the score, attention moves from key to key. The"
    " coverage loss is least at w = -2, and rises again where tanh saturates.",
    "coverage": "Training without coverage, with coverage in the score, and with the coverage loss"
    " as well: the loss falls to its floor, and longer strings have fewer letters repeated wrongly"
    " but a higher cross entropy. Bands: one standard deviation over seeds.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """The stuck decoder, and what models do throughout training."""
    return {
        "coverage_stuck": _stuck(where(rows, "kernel")),
        "coverage": _learning(where(rows, "score")),
    }


def _stuck(rows: list[Row]) -> Any:
    ratios = (1, 1, 1.5)
    figure, (plain, moving, losses) = plotting.new_figure(10.5, 4.2, columns=3, width_ratios=ratios)
    least = min(rows, key=lambda row: sum(row["loss"]))
    numbers = [str(n + 1) for n in range(STEPS)]
    for ax, row in ((plain, rows[0]), (moving, least)):
        image = plotting.draw_weights(ax, np.array(row["weights"]), numbers, numbers)
        for (query, key), weight in np.ndenumerate(row["weights"]):
            color = "black" if weight > 0.6 else "white"
            ax.text(key, query, f"{weight:.2f}", ha="center", va="center", color=color, size=9)
        ax.set(xlabel="key", title=f"w = {row['kernel']:g}, loss {sum(row['loss']):.2f}")
    plain.set_ylabel("query (always the same)")
    figure.colorbar(image, ax=[plain, moving], label="attention weight", shrink=0.8)
    kernels, totals = column(rows, "kernel"), [sum(row["loss"]) for row in rows]
    spread = [np.ptp(row["coverage"]) for row in rows]
    measured: dict[str, list[Any]] = {
        "coverage loss of all queries": totals,
        "largest - smallest coverage of a key": spread,
    }
    for label, values in measured.items():
        look = plotting.style_of(plotting.index_of(label, measured))
        losses.plot(kernels, values, ls="", label=label, **look)
    losses.axhline(0, color="black", linestyle="--", label=f"floor: {STEPS} queries, {STEPS} keys")
    losses.set(xlabel="coverage kernel w", ylabel="sum of weights", ylim=(-0.15, None))
    losses.set_title("A stuck decoder moves on\nif covered keys lose score")
    losses.invert_xaxis()
    losses.grid(alpha=0.3)
    losses.legend(loc="upper right", fontsize=9)
    return figure


def _learning(rows: list[Row]) -> Any:
    scores = [*dict.fromkeys(column(rows, "score"))]
    panels = (
        (NEAR, "coverage_loss", "coverage loss per string", (FLOOR, np.inf)),
        (FAR, "repeated", f"share of letters repeated wrongly\n(cut off at {MOST_DRAWN})", (0, 1)),
        (FAR, "cross_entropy", "cross entropy (nats per token)", (0, np.inf)),
    )
    size = 9.6, 3.1 * len(scores) + 0.6
    shape: Any = {"rows": len(scores), "columns": len(panels), "sharex": True}
    figure, axes = plotting.new_figure(*size, grid=True, **shape)
    for ax, (score, panel) in zip(axes, itertools.product(scores, panels), strict=True):
        strings, name, label, limits = panel
        for arm in ARMS:
            looks = where(rows, score=score, strings=strings, arm=arm)
            values, steps = np.array(column(looks, name)), column(looks, "step")
            index = plotting.index_of(arm, ARMS)
            plotting.draw_band(ax, steps, values, index=index, label=arm, limits=limits)
        if name == "coverage_loss":
            ax.axhline(FLOOR, color="black", linestyle="--", linewidth=1, label="floor")
        ax.set_title(f"{score}, {'longer strings' if strings == FAR else strings}", fontsize=10)
        ax.set(xlabel="step", ylabel=label, ylim=(0, MOST_DRAWN if name == "repeated" else None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    lab.main(__name__)
