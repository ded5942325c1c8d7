"""What makes dot product attention better or worse: its score, its scale, or its size?

Answer: Its scale. At d = 256 dot ends with a loss of 0.21 nats per token, and scaled dot, the same
    score times 1/16, with 0.002 (additive: 0.0005). At d = 16 and 64 the loss ends below 0.001
    where dot's logits begin with a deviation of 0.25, 1 or 2 within a row, and above it from 4 on.
Source: chapter 38 ("Attention Variants"), exercise 38.4: train unscaled dot and scaled dot on the
    reversal task with d = 256, compare their final losses, and plot the entropy of attention across
    training. The walkthrough, step 2: dot and additive perform alike where d is modest, and for
    larger d unscaled dot is worse. The comparison at equal logits is ours.
Command: .venv/bin/python -m experiments.reversal.scale_and_dimension  # 35 minutes on 2 CPU cores

All models are the reversal model for short strings (`SHORT_STRINGS` in `arms.py`) with padding
masked; only the cross attention's score changes. At d = 16 and 64 unscaled dot stops improving
within this number of steps; at d = 256 it would need more. Every arm is trained at several learning
rates, and compared at the rate with its lowest mean final loss.

1. Dimension: additive, dot and scaled dot at d of 16, 64 and 256; the chapter's exercise is
   d = 256.
2. Size of logits: dot times a constant, chosen for each seed so that its logits begin with a given
   deviation within a row. Scaled dot is the same function: at equal logits both are one model.
3. The four scores at one d, as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import learning_statistics
from attention_jax.reports import plotting
from attention_jax.scores import Additive, Dot, General
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.metrics import exact_match
from attention_jax.training.step import TrainState, initial_state, train_steps
from experiments import lab
from experiments.lab import Claim, Row, column, gain, markdown, plus_minus, significant, where
from experiments.reversal.arms import SHORT_STRINGS, AtRate, changed
from experiments.reversal.multiplied_scores import Times

PLAIN, SCALED = "as it is", "scaled"  # sizes of logits; a number is their deviation
LABELS = {
    "loss": "loss (nats per token)",
    "entropy": "entropy (nats)",
    "logit_sd": "logits' sd within a row",
}
CROSS = ("entropy", "logit_sd")  # of the cross attention
GUESSING = 5.5 / 6.5 * math.log(26)  # loss of guessing the letters, but not EOS: 5.5 on average


ADDITIVE, DOT, GENERAL = Times(Additive()), Times(Dot()), Times(General())
WITHOUT_KEY = Times(Additive(key_part=False))
# Scores of the rows beside dot, and what a table calls them.
NAMES = {
    "additive": "additive",
    "general": "general",
    "without_key": "additive without its key-only part",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; all others are those of `SHORT_STRINGS`.

    Attributes:
        dims: model sizes d of part 1, multiples of 4.
        steps: optimiser steps, a multiple of `look_every`.
        size_dims: d of part 2, if they are among `dims`.
        sizes: initial deviations of dot's logits within a row, in part 2.
        score_dim: the one of `dims` for part 3, or another, to leave it out.
        rates: Adam's initial learning rates at d = `score_dim`; at other d times `score_dim` / d,
            as the best rate of a hidden layer falls about as 1 / d (Yang et al. 2022).
        seeds: trainings per arm and rate.
        batch_size: strings per step.
        look_every: steps between two measurements of entropy and loss.
        strings: strings in the batch for these measurements.
        test_strings: strings for the final loss and exact match.
    """

    dims: tuple[int, ...] = (16, 64, 256)
    steps: int = 1600
    size_dims: tuple[int, ...] = (16, 64)
    sizes: tuple[float, ...] = (0.25, 1, 2, 4, 8, 16)
    score_dim: int = 64
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: int = 3
    batch_size: int = 32
    look_every: int = 50
    strings: int = 64
    test_strings: int = 512

    def __post_init__(self) -> None:
        lab.check_least(self, dims=4, steps=1, seeds=2, look_every=1, strings=1, test_strings=1)
        if self.steps % self.look_every:
            raise ValueError(f"steps must be a multiple of look_every; got {self.steps}")
        for dim in self.dims:
            self.task("dot", dim)

    def task(self, score: str, dim: int) -> Reversal:
        """The settings of one training, without its learning rate."""
        sizes = {"seeds": self.seeds, "steps": self.steps, "batch_size": self.batch_size}
        name = f"experiments.reversal.scale_and_dimension:{score.upper()}"
        return changed(SHORT_STRINGS, sizes, score=name, dim=dim)


QUICK = Config(dims=(16,), sizes=(16,), rates=(3e-3,), seeds=2, steps=2, look_every=1)  # no part 3


# --- training: one program per score and dimension, for all sizes of logits, rates and seeds ---


def run(config: Config) -> list[Row]:
    """A row per arm and rate; of dot and scaled dot at their best rates, with looks on the way."""
    rows = []
    for dim in config.dims:
        sizes = config.sizes if dim in config.size_dims else ()
        arms: dict[str, tuple[str | float, ...]] = {"dot": (PLAIN, SCALED, *sizes)}
        arms["additive"] = (PLAIN,)
        if dim == config.score_dim:
            arms |= {"general": (PLAIN,), "without_key": (PLAIN,)}
        for score, of_score in arms.items():
            rows += _trained(config, score, dim, of_score)
    return rows


def _trained(config: Config, score: str, dim: int, sizes: Sequence[str | float]) -> list[Row]:
    task = config.task(score, dim)
    runs = [*itertools.product(sizes, [rate * config.score_dim / dim for rate in config.rates])]
    batch_rng, loss_rng, test_rng = jax.random.split(jax.random.key(0), 3)
    batch = task.batch(batch_rng, size=config.strings)
    test = task.batch(test_rng, size=config.test_strings)

    def look(params: Any) -> dict[str, jax.Array]:
        found = learning_statistics(task.loss, params, batch, loss_rng, depth=0)
        cross = {name: found[f"decoder_0/cross_attention/{name}"] for name in CROSS}
        return {"loss": found["loss"], **cross}

    def examine(params: Any) -> dict[str, jax.Array]:
        # Greedy decoding is right where each token is, given the right ones before it.
        predicted = jnp.argmax(task.bind(params)(*test.inputs), axis=-1)
        exact = exact_match(predicted, test.targets, test.target_lengths)
        return {"loss": task.loss(params, test, loss_rng)[0], "exact": exact}

    def advance(state: TrainState, rate: jax.Array) -> TrainState:
        return train_steps(AtRate(task, rate), config.look_every, state)[0]

    look_at_all = jax.jit(jax.vmap(jax.vmap(look)))
    advance_all = jax.jit(jax.vmap(jax.vmap(advance, in_axes=(0, None))), donate_argnums=0)
    seeds = initial_state(AtRate(task, 1.0))
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(runs)), seeds)
    of_factor_1 = np.asarray(look_at_all(state.params)["logit_sd"])
    fixed = {PLAIN: 1.0, SCALED: dim**-0.5}
    factors = [
        np.full_like(sd, fixed[size]) if isinstance(size, str) else size / sd
        for (size, _), sd in zip(runs, of_factor_1, strict=True)
    ]
    attention = state.params["decoder"][0]["cross_attention"]["attention"]
    attention["params_of_score"]["factor"] = jnp.asarray(factors)

    rates, looks = jnp.array([rate for _, rate in runs]), [look_at_all(state.params)]
    for _ in range(config.steps // config.look_every):
        state = advance_all(state, rates)
        looks.append(look_at_all(state.params))
    final = jax.device_get(jax.jit(jax.vmap(jax.vmap(examine)))(state.params))
    lab.say(f"{score}, d = {dim}: {len(runs)} runs of {config.seeds} seeds")

    rows: list[Row] = []
    for index, (size, rate) in enumerate(runs):
        measured: Row = {name: significant(values[index]) for name, values in final.items()}
        if score == "dot" and size in (PLAIN, SCALED):
            curves = {name: [significant(each[name][index]) for each in looks] for name in LABELS}
            steps = [*range(0, config.steps + 1, config.look_every)]
            measured["looks"] = {"step": steps, **curves}
        rows.append({"score": score, "dim": dim, "size": size, "rate": rate, **measured})
    for row in rows:
        if row is not best(rows, size=row["size"]):
            row.pop("looks", None)
    return rows


# --- what came out ---


def loss_of(row: Row) -> float:
    """The mean final loss."""
    return float(np.mean(row["loss"]))


def best(rows: list[Row], **arm: Any) -> Row:
    """An arm at its best rate."""
    return min(where(rows, **arm), key=loss_of)


def by_dimension(rows: list[Row]) -> dict[int, dict[str | float, Row]]:
    """By d, dot by size of its logits, and other scores, each at its best rate."""
    found: dict[int, dict[str | float, Row]] = {}
    for dim in column(rows, "dim", score="dot"):
        at = where(rows, dim=dim)
        found[dim] = {
            size: best(at, score="dot", size=size) for size in column(at, "size", score="dot")
        }
        for other in NAMES:
            if where(at, score=other):
                found[dim][other] = best(at, score=other)
    return found


def claims(rows: list[Row]) -> list[Claim]:
    """What the source and theory predict."""
    dim, arms = max(by_dimension(rows).items())
    entropies = [arms[size]["looks"]["entropy"][0] for size in (PLAIN, SCALED)]
    loss, bound = gain(arms[PLAIN]["loss"], arms[SCALED]["loss"])
    harm = max(
        loss_of(other) - loss_of(row)
        for row in where(rows, score="dot", size=PLAIN)
        for other in where(rows, score="dot", size=SCALED, dim=row["dim"], rate=row["rate"])
    )
    falls = "unscaled entropy falls with d (§38.5)"
    least = "scaled .39/.17/.30/.12 of letters right, the least of four, at d = 64 (§38.6)"
    begins = f"at d = {dim} dot begins with a lower entropy than scaled dot: over all seeds, nats"
    harms = "scaling harms at no d and no rate: highest mean loss of scaled dot minus dot's, nats"
    found = [
        Claim(f"at d = {dim} unscaled dot's loss ends above scaled dot's, nats", loss, bound),
        Claim(begins, max(entropies[0]) - min(entropies[1]), high=0, source=falls),
        Claim(harms, harm, high=0, source=least, denies=True),
    ]
    (four,) = (arms for arms in by_dimension(rows).values() if "general" in arms)
    four = {"dot" if x == PLAIN else x: four[x] for x in ("additive", PLAIN, "general", SCALED)}
    worst = max(four, key=lambda score: loss_of(four[score]))
    gap, of_chance = gain(four["scaled"]["loss"], four[worst]["loss"])
    most = -of_chance if worst != "scaled" else -math.inf
    text = f"at d = {four['dot']['dim']} scaled dot is not the worst of four: its loss - {worst}'s"
    found.append(Claim(text, gap, high=most, source=least, denies=True))
    few, small = min(by_dimension(rows).items())
    exact = [np.mean(small[arm]["exact"]) for arm in ("additive", PLAIN)]
    text = f"at d = {few}: strings that additive reverses minus those of unscaled dot"
    found.append(Claim(text, float(exact[0] - exact[1]), -0.02, 0.02, "alike where d is modest"))
    at_64 = where(rows, dim=four["dot"]["dim"])
    exact = [np.mean(best(at_64, score=score)["exact"]) for score in ("without_key", "additive")]
    text = "strings that additive without its key-only part reverses minus those of additive"
    found.append(Claim(text, float(exact[0] - exact[1]), -0.05, 0.05))
    more, bound = gain(arms[PLAIN]["loss"], arms["additive"]["loss"])
    text = f"at d = {dim} unscaled dot's loss ends above additive's, nats"
    found.append(Claim(text, more, bound, source="unscaled dot is worse for larger d"))
    text = f"at d = {dim}: share of the gap between dot's loss and additive's that scaling closes"
    return [*found, Claim(text, loss / more, 0.95, 1.05)]


def table(rows: list[Row]) -> str:
    """Dot by size of its logits, and other scores: losses, strings reversed."""
    lines = []
    names: dict[Any, str] = {PLAIN: "dot", SCALED: "scaled dot"}
    names |= NAMES
    for dim, arms in by_dimension(rows).items():
        least = min(arms.values(), key=loss_of)
        for size, row in arms.items():
            looks = [np.mean(row["looks"][n], axis=1) for n in CROSS if "looks" in row]
            ends = [f"{values[0]:.3g} → {values[-1]:.3g}" for values in looks] or ["", ""]
            name = names.get(size, f"times a constant: deviation {size}")
            gap = "least" if row is least else plus_minus(*gain(row["loss"], least["loss"]))
            lines.append((dim, name, f"{row['rate']:g}", _outcome(row), gap, *ends))
    outcome, error = "nats ± deviation over seeds (strings reversed)", "± 2 standard errors"
    heads = ["d", "score", "best rate", f"final loss, {outcome}"]
    heads += [f"minus the least of this d, {error}", "entropy of attention, before → after"]
    heads += ["deviation of logits, before → after"]
    return markdown(heads, lines)


def _outcome(row: Row) -> str:
    return f"{lab.spread(row['loss'])} ({100 * np.mean(row['exact']):.0f} %)"


CAPTIONS = {
    "scale_and_dimension_sizes": "Final loss over the initial deviation of the logits, at the best"
    " learning rate, a point for each seed: dot, scaled dot, and dot times other constants. Lines:"
    " means of additive and general, whose deviations were not measured.",
    "scale_and_dimension_training": "Dot and scaled dot while they learn, at their best learning"
    " rates: loss, entropy of the cross attention and deviation of its logits within a row. Means"
    " over seeds, and bands of one deviation, of logarithms where the axis is logarithmic.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """The figures of parts 2 and 1."""
    return dict(zip(CAPTIONS, (_sizes(rows), _training(rows)), strict=True))


def _training(rows: list[Row]) -> Any:
    dims = by_dimension(rows)
    shape: Any = {"rows": 3, "columns": len(dims), "sharex": "col", "sharey": "row"}
    figure, axes = plotting.new_figure(0.6 + 2.8 * len(dims), 6.8, grid=True, **shape)
    panels = zip(axes, itertools.product(LABELS.items(), dims.items()), strict=True)
    for ax, ((name, label), (dim, arms)) in panels:
        for size, score in ((PLAIN, "dot"), (SCALED, "scaled")):
            looks, log = arms[size]["looks"], name != "entropy"
            index = plotting.index_of(score)
            options: Any = {"index": index, "label": score, "log": log, "limits": (0, np.inf)}
            plotting.draw_band(ax, looks["step"], np.array(looks[name]), **options)
        ax.set(yscale="log" if name != "entropy" else "linear", ylabel=label)
        if name == "loss":
            ax.set_title(f"reversal model, d = {dim}")
            ax.axhline(GUESSING, color="black", ls="--", lw=1, label="guessing letters")
        ax.set_xlabel("step")
        ax.label_outer()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _sizes(rows: list[Row]) -> Any:
    dims = by_dimension(rows)
    shape: Any = {"columns": len(dims), "sharex": True, "sharey": True}
    figure, axes = plotting.new_figure(0.6 + 2.8 * len(dims), 3.8, grid=True, **shape)
    lines = {}
    for ax, (dim, arms) in zip(axes, dims.items(), strict=True):
        for size, row in arms.items():
            if size in ("additive", "general"):
                look: Any = {"color": plotting.COLORS[plotting.index_of(str(size))], "lw": 1.5}
                lines[f"{size}, mean"] = ax.axhline(loss_of(row), **look)
                continue
            name = {PLAIN: "dot", SCALED: "scaled"}.get(str(size), "dot times a constant")
            at = [size] * len(row["loss"]) if "looks" not in row else row["looks"]["logit_sd"][0]
            look = plotting.style_of(plotting.index_of(name))
            (lines[name],) = ax.plot(at, row["loss"], ls="", alpha=0.7, ms=5, **look)
        lines["guessing letters"] = ax.axhline(GUESSING, color="black", ls="--", lw=1)
        others = "" if len(arms) > 3 else ", no other constants"
        ax.set(xscale="log", yscale="log", title=f"d = {dim}{others}")
        ax.set_xlabel("deviation of the first logits")
    axes[0].set_ylabel(f"final {LABELS['loss']}")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    lab.main(__name__)
