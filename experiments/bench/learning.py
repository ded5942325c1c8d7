"""Which tasks does a small model learn with each score, and how fast?

Answer: Dot and scaled dot are one score: with its scale chosen, each has the other's numbers, digit
    for digit, on all four tasks. Additive sorts best (97.9 % of the strings; scaled dot 94.3), but
    does not recall four of 31 keys within 1,000 steps (30.6 %; scaled dot 100). Of 19 scores
    hyperbolic alone stays above 94 % on all four: 94.9 % on sort, 99.9 % and more on the others.
Source: ours. The tasks and their sources are in `attention_jax/tasks`; their published sizes are
    larger.
Command: .venv/bin/python -m experiments.bench.learning  # 1.5 hours on 2 CPU cores, estimated

All models of a task have the same size and the same number of steps, and differ in the score of
their attentions alone. What could decide by accident:

1. The size of the logits. A constant factor stands before each score: e = factor score(q, k). One
   seed learns with each of `factors` at the second of the four rates.
2. The learning rate. The same seed learns with each of `rates` and the best of the factors. The
   best has the smallest loss over the last tenth of the steps. All batches are drawn anew, so this
   is a loss on examples that were not seen before.
3. Chance. The numbers are means over other seeds, on test examples.

Steps until 90 % (99 %) are those after which the accuracy has reached 90 % (99 %) of the best mean
of any score; the accuracy is that of batches before they are learned, a mean of a twentieth of all
steps.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import SCORES, score_folder
from attention_jax.tasks.noisy_recall import NoisyRecall
from attention_jax.tasks.recall import Recall
from attention_jax.tasks.selective_copy import SelectiveCopy
from attention_jax.tasks.sort import Sort
from attention_jax.training.loop import initial_state, train_steps
from attention_jax.training.task import Task, TrainConfig
from experiments import lab
from experiments.bench import relations
from experiments.bench.training import kept, known_by, with_score
from experiments.lab import (
    FOUR_SCORES,
    Claim,
    Row,
    ScoreNames,
    interleaved,
    markdown,
    ratio,
    significant,
)

# Small: a seed learns in 2 to 10 seconds of CPU time. The published sizes are in each task.
SMALL = TrainConfig(steps=1000, batch_size=16)
TASKS: dict[str, Task] = {
    "recall": Recall(train=SMALL, length=20),
    "noisy_recall": NoisyRecall(train=SMALL, length=32),
    "selective_copy": SelectiveCopy(
        train=dataclasses.replace(SMALL, steps=600), length=32, copied=8
    ),
    "sort": Sort(train=dataclasses.replace(SMALL, steps=600)),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; sizes and steps of the tasks are in `TASKS`.

    Attributes:
        scores: scores to train.
        tasks: tasks to learn.
        rates: Adam's highest learning rates, from low to high.
        factors: constant factors of the logits.
        seeds: trainings with the best factor and rate.
        budget: the steps of every task are multiplied by this.
        workdir: folder of what is finished; an unchanged task and score is not trained again.
    """

    scores: ScoreNames = tuple(SCORES)
    tasks: tuple[str, ...] = tuple(TASKS)
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    factors: tuple[float, ...] = (1 / 64, 1 / 8, 1, 8)
    seeds: int = 3
    budget: float = 1.0
    workdir: Path = Path("runs/learning")

    def __post_init__(self) -> None:
        lab.check_least(self, seeds=2, rates=1e-9, factors=1e-9, budget=1e-9)
        if not self.scores:
            raise ValueError("scores must be one or more; got none")
        lab.check_names("tasks", self.tasks, TASKS)
        for task in self.tasks:
            for score in self.scores:
                self.task(task, score)

    def task(self, name: str, score: str) -> Any:
        """A task with this score."""
        return with_score(TASKS[name], score, self.seeds, self.budget)


QUICK = Config(("scaled",), ("recall",), rates=(3e-3,), factors=(1, 8), seeds=2, budget=0.02)


def run(config: Config) -> list[Row]:
    """Rows of each score: its cost, and of each task the trials of rates, results and curves."""
    rows: list[Row] = []
    make_folder("workdir", config.workdir)
    parts = [(score, task) for score in config.scores for task in (*config.tasks, "")]
    start = time.monotonic()
    for index, (score, name) in enumerate(parts):
        path = config.workdir / f"{score_folder(score)},{name or 'cost'}.json"
        settings: Any = config.task(name or "recall", score), config.factors, config.rates
        if name:
            found = kept(path, *settings)
        else:
            measure = functools.partial(cost, config, score)
            found = lab.kept_rows(path, known_by(*settings), measure)
        rows += [{"score": score, **row} for row in found]
        minutes = (time.monotonic() - start) / 60
        what = f"{score}, {name or 'milliseconds per step'}{'' if found else ': missing'}"
        lab.say(f"{index + 1} of {len(parts)}: {what}; {minutes:.1f} min", error=True)
    return rows


def cost(config: Config, score: str) -> list[Row]:
    """One row: the time of a training step, and its ratio to that with scaled dot, run in turns."""
    turns = interleaved({"scaled": _steps(config, "scaled"), "this": _steps(config, score)}, 9)
    mine, scaled = ({"turns": turns[name]} for name in ("this", "scaled"))
    milliseconds = significant(np.median(turns["this"]) / 4)
    return [{"milliseconds": milliseconds, "over": ratio(mine, scaled)}]


@functools.cache
def _steps(config: Config, score: str) -> Any:
    """Four compiled steps of all seeds."""
    task = config.task("recall", score)
    state = initial_state(task)
    advance = jax.jit(jax.vmap(functools.partial(train_steps, task, 4))).lower(state).compile()
    return lambda: jax.block_until_ready(advance(state))


# --- what came out ---


def results(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """The row of each task and score."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "task" in row:
            found.setdefault(row["task"], {})[row["score"]] = row
    return found


def interval(row: Row) -> tuple[float, float]:
    """Mean minus and plus the standard deviation over seeds."""
    mean, deviation = np.mean(row["by_seed"]), np.std(row["by_seed"], ddof=1)
    return float(mean - deviation), float(mean + deviation)


def apart(row: Row, other: Row) -> bool:
    """Whether the intervals of two rows do not overlap."""
    (low, high), (other_low, other_high) = interval(row), interval(other)
    return low > other_high or other_low > high


def best_and_worst(of_task: dict[str, Row]) -> tuple[Row, Row]:
    """The rows with the best and the worst mean."""
    order = sorted(of_task.values(), key=lambda row: float(np.mean(row["by_seed"])))
    return (order[-1], order[0]) if order[0]["larger_is_better"] else (order[0], order[-1])


def separates(of_task: dict[str, Row]) -> bool:
    """Whether best and worst score are 10 points, or a factor of 2 of an error, apart."""
    best, worst = best_and_worst(of_task)
    a, b = np.mean(best["by_seed"]), np.mean(worst["by_seed"])
    far = a - b >= 10 if best["larger_is_better"] else b >= 2 * a
    return bool(far) and apart(best, worst)


def steps_until(of_task: dict[str, Row], score: str, share: float) -> list[float]:
    """By seed: after how many steps the accuracy reaches a share of the best; infinite for never.

    The best is the highest mean accuracy over seeds at the end of training, of any score.
    """
    if any(row["curve_of"] != "accuracy" for row in of_task.values()):
        return []
    curves = {name: np.array(row["curve"]) for name, row in of_task.items()}
    most = max(float(curve[-1].mean()) for curve in curves.values())
    reached = curves[score] >= share * most
    every = of_task[score]["every"]
    return [every * (1 + int(np.argmax(r))) if r.any() else np.inf for r in reached.T]


def claims(rows: list[Row]) -> list[Claim]:
    """What the scores' papers say, where all else is equal."""
    tasks, found = results(rows), []
    shared = [of_task for of_task in tasks.values() if {"dot", "scaled"} <= set(of_task)]
    if len(tasks) >= 4 and all(len(of_task) >= 4 for of_task in tasks.values()):
        number = sum(map(separates, tasks.values()))
        text = "tasks whose best and worst score are 10 points, or a factor of 2, and intervals"
        found.append(Claim(f"{text} apart", number, low=4))
    if shared:
        number = sum(apart(each["dot"], each["scaled"]) for each in shared)
        text = "dot and scaled dot, each with the best of the factors: tasks that tell them"
        found.append(Claim(f"{text} apart", number, high=1))
    if both := [each for each in tasks.values() if {"additive", "scaled"} <= set(each)]:
        number = sum(
            apart(each["additive"], each["scaled"])
            and best_and_worst({name: each[name] for name in ("additive", "scaled")})[0]
            is each["additive"]
            for each in both
        )
        found.append(Claim("tasks that additive learns better than scaled dot", number, low=1))
    if faster := [
        float(np.mean(until["scaled"]) / np.mean(until["ngpt"]))
        for each in tasks.values()
        if {"ngpt", "scaled"} <= set(each)
        for until in [{name: steps_until(each, name, 0.9) for name in ("ngpt", "scaled")}]
        if until["scaled"] and np.isfinite([*until["scaled"], *until["ngpt"]]).all()
    ]:
        text = "nGPT's score alone: steps of scaled dot until 90 % over its own, the most of a task"
        found.append(Claim(text, max(faster), high=2))
    return found


def table(rows: list[Row]) -> str:
    """Results by score and task; then what they cost."""
    tasks = results(rows)
    scores = dict.fromkeys(row["score"] for row in rows)
    head = ["score", *headings(tasks)]
    cells = [[score, *(cell(each.get(score)) for each in tasks.values())] for score in scores]
    parts = [markdown(head, cells)]
    head = [
        "score",
        *(f"{task}: steps until 90 / 99 %; factor; rate" for task in tasks),
        "time of a step",
    ]
    costs = {row["score"]: row for row in rows if "over" in row}
    lines = []
    for score in scores:
        speeds = [_speed(each, score) for each in tasks.values()]
        over = costs[score]["over"] if score in costs else None
        ratio = f"{over[1]:.2f} ({over[0]:.2f}-{over[2]:.2f})" if over else "-"
        lines.append([score, *speeds, ratio])
    return "\n\n".join([*parts, markdown(head, lines)])


def summary(
    of_relations: Sequence[Row], of_tasks: Sequence[Row]
) -> tuple[list[str], list[list[str]]]:
    """The head of a table, and a row for each score: relations learned, tasks, time of a step."""
    cells = relations.means(relations.matrix([*of_relations]))
    tasks = results([*of_tasks])
    costs = {row["score"]: row["over"] for row in of_tasks if "over" in row}
    head = ["score"]
    if cells:
        head.append(f"relations of {len(relations.RELATIONS)}, at 90 % and above")
    head += headings(tasks)
    if costs:
        head.append("time of a step / scaled dot's")
    lines = []
    for score in dict.fromkeys(row["score"] for row in (*of_relations, *of_tasks)):
        line = [score]
        if cells:
            shares = [*cells.get(score, {}).values()]
            learned = np.sum(np.array(shares) >= 0.9)
            line.append(f"{learned}" if shares else "-")
        line += [cell(each.get(score)) for each in tasks.values()]
        if costs:
            line.append(f"{costs[score][1]:.2f}" if score in costs else "-")
        lines.append(line)
    return head, lines


def four_scores(rows: list[Row]) -> str:
    """The summary of the four scores of the chapter, with the rows of the other experiments."""
    others = {name: lab.content_of(name) or {"rows": []} for name in ("relations", "language")}
    head, lines = summary(others["relations"]["rows"], [*rows, *others["language"]["rows"]])
    return markdown(head, [line for line in lines if line[0] in FOUR_SCORES])


def headings(tasks: dict[str, dict[str, Row]]) -> list[str]:
    """Each task with what is measured."""
    first = {task.replace("_", " "): next(iter(each.values())) for task, each in tasks.items()}
    return [f"{task}: {row['metric']}" for task, row in first.items()]


def cell(row: Row | None) -> str:
    """Mean ± deviation (worst seed)."""
    if row is None:
        return "-"
    return lab.spread_and_worst(row["by_seed"], min if row["larger_is_better"] else max)


def _speed(of_task: dict[str, Row], score: str) -> str:
    if score not in of_task:
        return "-"
    texts = []
    for share in (0.9, 0.99):
        until = steps_until(of_task, score, share)
        if until:
            texts.append(f"{np.median(until):.0f}" if np.isfinite(np.median(until)) else "never")
    row = of_task[score]
    return f"{' / '.join(texts) or '-'}; {row['factor']:g}; {row['rate']:g}"


CAPTIONS = {
    "learning": "What each score learns of each task, with the best of four factors of the"
    " logits and of four rates: every seed, the mean, and one standard deviation on either side.",
    "learning_curves": "Accuracy on fresh batches while the models learn, means over seeds: the"
    " four scores of the chapter, and of the others, in grey, each one.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """Results, and learning curves, a panel per task."""
    tasks = results(rows)
    return {"learning": _results(tasks), "learning_curves": _curves(tasks)}


def _results(tasks: dict[str, dict[str, Row]]) -> Any:
    scores = [*dict.fromkeys(score for each in tasks.values() for score in each)]
    width = 1.4 + 2.1 * len(tasks)
    figure, axes = plotting.new_figure(
        width, 1.3 + 0.24 * len(scores), columns=len(tasks), sharey=True
    )
    for ax, (task, each) in zip(axes, tasks.items(), strict=True):
        for place, score in enumerate(scores):
            if score not in each:
                continue
            by_seed, (low, high) = each[score]["by_seed"], interval(each[score])
            color = lab.style(score)["color"] if score in FOUR_SCORES else "#666666"
            ax.plot([low, high], [place, place], color=color, lw=1.6, alpha=0.6)
            ax.plot(by_seed, [place] * len(by_seed), "o", ms=3, color=color, alpha=0.6)
            ax.plot(np.mean(by_seed), place, "|", ms=9, mew=2, color=color)
        best, _ = best_and_worst(each)
        ax.set_title(task.replace("_", " "), fontsize=10)
        ax.set_xlabel(best["metric"], fontsize=9)
        if best["larger_is_better"]:
            ax.set_xlim(-3, 103)
        ax.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(scores)), scores)
    axes[0].invert_yaxis()
    return figure


def _curves(tasks: dict[str, dict[str, Row]]) -> Any:
    figure, axes = plotting.new_figure(1.4 + 2.1 * len(tasks), 3.2, columns=len(tasks))
    for ax, (task, each) in zip(axes, tasks.items(), strict=True):
        for score, row in each.items():
            curve = np.mean(row["curve"], axis=1)
            steps = row["every"] * (1 + np.arange(len(curve)))
            known = score in FOUR_SCORES
            color = lab.style(score)["color"] if known else "#aaaaaa"
            label = score if known else "_"
            ax.plot(steps, curve, color=color, lw=1.6 if known else 0.8, label=label)
            ax.set_ylabel(row["curve_of"], fontsize=9)
        ax.set_title(task.replace("_", " "), fontsize=10)
        ax.set_xlabel("step", fontsize=9)
        ax.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(tasks), fontsize=9)
    return figure


if __name__ == "__main__":
    lab.main(__name__)
