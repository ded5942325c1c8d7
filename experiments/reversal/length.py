"""What makes attention reverse strings of any length?

Answer:   Position ids that a letter shares with its place in the answer, drawn at random in
          training, and logits that grow with log n. Trained on strings of 1 to 40 letters, all four
          scores reverse every tested string of up to 5,000 letters (40 of that length each); with
          an alphabet of 2 letters additive learns nothing. If positions in the source are counted
          from its start, 4 % of the letters at length 500 are right.
Source:   Delétang et al. 2022 ("Neural Networks and the Chomsky Hierarchy"): train on lengths 1-40,
          test on every length from 41 to 500; of the networks there, only those with a stack or a
          tape reverse strings. Ruoss et al. 2023 (positions drawn at random); Chiang and Cholak
          2022 (logits that grow with log n). Normalisers: Martins and Astudillo 2016 (sparsemax),
          Peters et al. 2019 (entmax), Ramapuram et al. 2024 (sigmoid), Agarwal et al. 2025 (sinks),
          Nakanishi 2025 (SSMax).
Command:  .venv/bin/python -m experiments.reversal.length  # 64 minutes on 2 busy cores

Three tables of arms. The scores are trained with the task's default recipe (`MODEL` in
`attention_jax/tasks/reversal.py`): one cross attention from the letters written so far to those of
the source, no other attention, positions of the source counted from its end, SOS in the source,
weight decay. The parts are the recipe with scaled dot, without SOS and weight decay, and with each
part replaced. The normalisers are trained with the recipe on 3 to 8 letters, and with additive
attention on 1 to 40; decay also pulls SSMax's factor and the sink's logit to 0.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.nn.config import ANY_LENGTH, ModelConfig
from attention_jax.reports import plotting
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import TrainedRun
from experiments import lab
from experiments.lab import Claim, Row, column, where
from experiments.reversal import length_evaluation as evaluation
from experiments.reversal.arms import changed, name_of, trained_arms
from experiments.reversal.length_evaluation import measured

# The lengths that are tested, with the number of strings, by table.
LENGTHS = {
    "score": {20: 100, 40: 100, 100: 100, 200: 100, 500: 100, 1000: 40, 2000: 20, 5000: 8},
    "part": dict.fromkeys((40, 60, 100, 200, 500, 1000, 2000, 5000), 4),
    "3-8": {3: 100, 5: 100, 8: 100, 10: 100, 20: 100, 50: 50, 200: 20},
    "1-40": {20: 50, 40: 50, 80: 50, 160: 50, 320: 10, 640: 10},
}
NEAR = "41-500"  # the mean over these lengths
SHOWN = (40, 100, 500, 2000, 5000)  # in the table of the parts
SCORES = ("additive", "dot", "general", "scaled")
LONG = changed(
    Reversal(min_length=1, max_length=40), {"batch_size": 32}, normalizer="log_scaled(start=41)"
)
TASKS = {"3-8": Reversal(), "1-40": LONG}
RECIPE = changed(
    dataclasses.replace(LONG, source_start=False),
    {"learning_rate": 1e-2, "weight_decay": 0.0},
    normalizer="log_scaled(start=40)",
)
PLAIN = {"normalizer": "softmax"}
LEARNED = "experiments.reversal.multiplied_scores:LearnedTemperature"
BOTH = {"decoder_self_attention": True, "encoder_layers": 1}
# {part: {arm: settings of the model that differ from the recipe's}}; the first is the recipe.
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "where the source is counted from": {
        "its end": {},
        "its start": {"position_anchor": "start"},
        "both": {"position_anchor": "both"},
    },
    "which positions are seen in training": {
        "subsets of a random window": {},
        "random subsets of 8,192": {"position_draw": "subset"},
        "0, 1, 2, ...": {"position_draw": "none"},
    },
    "how a position enters": {
        "sinusoidal, fast waves": {},
        "sinusoidal, 2017's": {
            "max_wavelength": 10_000.0,
            "min_wavelength": 1.0,
            "position_scale": 1.0,
        },
        "learned": {"positions": "learned"},
        "rotary": {"positions": "rotary"},
        "no positions": {"positions": "none"},
    },
    "size of logits, scaled dot": {
        "growing with log n": {},
        "as they are": PLAIN,
        "learned factor": {**PLAIN, "score": f"{LEARNED}(score=scaled)"},
    },
    "size of logits, additive": {
        "growing with log n": {"score": "additive"},
        "as they are": {**PLAIN, "score": "additive"},
        "learned factor": {**PLAIN, "score": f"{LEARNED}(score=additive)"},
    },
    "other attention": {
        "no other": {},
        "the decoder's self attention": {"decoder_self_attention": True},
        "that and an encoder": BOTH,
        "that, and positions from the start": {
            **{name: getattr(ModelConfig, name) for name in ANY_LENGTH},
            **BOTH,
            **PLAIN,
        },
    },
}
WHERE, SEEN, ENTERS, SCALED, ADDITIVE, OTHER = PARTS
COSTLY = ((SEEN, "0, 1, 2, ..."), (SCALED, "as they are"), (ADDITIVE, "as they are"))
# {name: the normaliser, as in `get_normalizer`}; start: the first length that is not trained.
NORMALIZERS = {
    "softmax": "softmax",
    "softmax, log n": "log_scaled(start={start})",
    "SSMax": "ssmax",
    "softmax, sink": "softmax(sink=True)",
    "sigmoid": "sigmoid",
    "entmax 1.5": "entmax",
    "sparsemax": "sparsemax",
}
SHARPER = ("softmax, log n", "SSMax", "entmax 1.5", "sparsemax")
OF_LONG = ("softmax", *SHARPER[:3])  # the others, and other scores, are left out for time


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of all tables.

    Attributes:
        scores: of the tables of scores and of normalisers.
        only: arms are left out whose name contains none of these; none for all arms.
        seeds: trainings per arm; 0 for 5 of the scores, 3 of the others.
        steps: optimiser steps per training; 0 for those of each table.
        every: step between the tested lengths from 41 to 500.
        longest: longer strings are not tested.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: lab.ScoreNames = SCORES
    only: tuple[str, ...] = ()
    seeds: int = 0
    steps: int = 0
    every: int = 1
    longest: int = 5000
    workdir: Path = Path("runs/length")

    def __post_init__(self) -> None:
        lab.check_least(self, every=1, longest=40)

    def arms(self) -> list[tuple[Row, Reversal]]:
        """Returns the labels and the settings of the chosen arms."""
        chosen = self.only or ("",)
        return [arm for arm in self._arms() if any(part in name_of(arm[0]) for part in chosen)]

    def _arms(self) -> Iterator[tuple[Row, Reversal]]:
        for alphabet, score in itertools.product((26, 2), self.scores):
            task = dataclasses.replace(LONG, letters=alphabet)
            training = self._training(task, 5, 3000, score=score)
            yield {"alphabet": alphabet, "score": score}, training
        for part, replaced in PARTS.items():
            for arm, settings in replaced.items():
                yield {"part": part, "arm": arm}, self._training(RECIPE, 3, 1500, **settings)
        short = itertools.product(["3-8"], [1500], self.scores, NORMALIZERS)
        long = itertools.product(["1-40"], [1000], ["additive"], OF_LONG)
        for trained, steps, score, name in [*short, *long]:
            task = TASKS[trained]
            normalizer = NORMALIZERS[name].format(start=task.max_length + 1)
            training = self._training(task, 3, steps, score=score, normalizer=normalizer)
            yield {"trained": trained, "score": score, "normalizer": name}, training

    def _training(self, task: Reversal, seeds: int, steps: int, **model: Any) -> Reversal:
        training = {"seeds": self.seeds or seeds, "steps": self.steps or steps}
        return changed(task, training, **model)


QUICK = Config(
    scores=("scaled",),
    only=("26 scaled", "scaled dot as they are", "3-8 scaled entmax"),
    seeds=2,
    steps=25,
    every=460,
    longest=60,
)


def run(config: Config) -> list[Row]:
    """A row for each arm and tested length; one for each score and alphabet over 41 to 500."""
    runs = trained_arms(config.arms(), config.workdir)
    return [row for labels, trained in runs for row in tested(labels, trained, config)]


def tested(labels: Row, trained: TrainedRun, config: Config) -> Iterator[Row]:
    """The rows of an arm."""
    table = labels.get("trained", "part" if "part" in labels else "score")
    strings = {n: count for n, count in LENGTHS[table].items() if n <= config.longest}
    columns = {}
    if table == "score":
        near = dict.fromkeys(range(41, 501, config.every), 2)
        letters = measured(evaluation.letters_right, trained, near)
        mean = lab.significant(np.mean([*letters.values()], axis=0))
        yield {**labels, "length": NEAR, "letters": mean}
    if table == "part":
        columns["letters"] = measured(evaluation.letters_right, trained, strings)
    else:
        columns["strings"] = measured(evaluation.strings_right, trained, strings)
    if "normalizer" in labels:
        drawn = dict.fromkeys(strings, 2)
        columns["weight"] = measured(evaluation.weight_of_right_key, trained, drawn)
    for length in strings:
        values = {name: lab.significant(by_length[length]) for name, by_length in columns.items()}
        yield {**labels, "length": length, **values}


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """The recipe reverses any length; each part and the growth of the logits are needed."""
    found: list[Claim] = []

    def add(text: str, low: float, name: str, high: float = 1, **labels: Any) -> None:
        """The worst mean over seeds, of the arms that have one of the values of each label."""
        means = [
            float(np.mean(row[name]))
            for row in where(rows, name, *labels)
            if all(row[key] in any_of for key, any_of in labels.items())
        ]
        found.append(Claim(text, max(means) if high < 1 else min(means), low, high))

    near = "letters right at 41-500"
    add(f"26 letters: {near}, worst score", 0.999, "letters", alphabet=[26])
    add(f"2 letters: {near}, additive", 0.99, "letters", alphabet=[2], score=SCORES[:1])
    others: Any = {"alphabet": [2], "score": SCORES[1:]}
    add(f"2 letters: {near}, worst of the other scores", 0.999, "letters", **others)
    text = "26 letters: whole strings right at 500, 2,000 or 5,000 (8 per seed), worst score"
    add(text, 1, "strings", alphabet=[26], length=(500, 2000, 5000))
    recipe: Any = {"arm": ["its end", "growing with log n"], "length": [500, 5000]}
    text = "the recipe: letters right at 500 or 5,000 (4 strings per seed), worst"
    add(text, 0.99, "letters", **recipe)
    apart = ["its start", "no positions", "that, and positions from the start"]
    text = "source and answer share no positions: letters right at 500, best arm"
    add(text, 0, "letters", 0.2, arm=apart, length=[500])

    learned = [name for name in NORMALIZERS if name != "sigmoid"]
    short: Any = {"name": "strings", "trained": ["3-8"]}
    long: Any = {"name": "strings", "trained": ["1-40"]}
    text = "3-8 letters: strings right at 8"
    add(f"{text}, worst score, all but sigmoid", 0.95, normalizer=learned, length=[8], **short)
    add(f"{text}, sigmoid, worst score", 0.95, normalizer=["sigmoid"], length=[8], **short)
    text = "3-8 letters: strings right at 200"
    add(f"{text}, log n, worst score", 0.97, normalizer=SHARPER[:1], length=[200], **short)
    shared: Any = {"score": ["additive"], "normalizer": ["softmax", "softmax, sink", "sigmoid"]}
    text += ", additive with softmax, a sink or sigmoid, best"
    add(text, 0, high=0.2, length=[200], **shared, **short)
    text = "1-40 letters, additive: strings right at"
    add(f"{text} 40, worst of softmax and log n", 0.95, normalizer=OF_LONG[:2], length=[40], **long)
    add(f"{text} 80, softmax", 0.9, normalizer=["softmax"], length=[80], **long)
    add(f"{text} 640, log n", 0.9, normalizer=SHARPER[:1], length=[640], **long)
    for name, (length, low) in itertools.product(OF_LONG[2:], ((40, 0.95), (640, 0.9))):
        add(f"{text} {length}, {name}", low, normalizer=[name], length=[length], **long)
    return [*found, *_margins(rows)]


def _margins(rows: list[Row]) -> Iterator[Claim]:
    """The least margin of each comparison."""
    at_200 = where(rows, trained="3-8", length=200)
    shares: Any = {(row["score"], row["normalizer"]): row["weight"] for row in at_200}
    shares |= {(r["part"], r["arm"], r["length"]): r["letters"] for r in where(rows, "part")}
    waves = (ENTERS, "sinusoidal, 2017's")
    first = {part: (part, next(iter(arms)), 500) for part, arms in PARTS.items()}
    far = "letters right at 60 minus at 5,000 (4 strings per seed)"
    pairs: dict[str, list[Any]] = {
        "letters right at 500, the recipe's minus those of 2017's waves, of positions 0, 1, 2 and"
        " of logits as they are": [(first[arm[0]], (*arm, 500)) for arm in [*COSTLY, waves]],
        f"{far}, positions 0, 1, 2 and logits as they are": [
            ((*arm, 60), (*arm, 5000)) for arm in COSTLY
        ],
        f"{far}, 2017's waves, scaled dot": [((*waves, 60), (*waves, 5000))],
        "3-8 letters: weight of the right key at 200 with log n, SSMax, entmax or sparsemax, minus"
        " softmax's": [((x, name), (x, "softmax")) for x in SCORES for name in SHARPER],
    }
    for text, compared in pairs.items():
        margin = min(margin_over(shares[more], shares[less]) for more, less in compared)
        yield Claim(f"{text}, less 2 standard errors, least", margin, 0, 1)


def margin_over(more: Sequence[float], less: Sequence[float]) -> float:
    """The mean difference of seeds, less two standard errors: above 0 it is no chance."""
    mean, error = lab.gain(more, less)
    return mean - error


def table(rows: list[Row]) -> str:
    """Scores, parts of the recipe, and normalisers at the longest strings."""
    return (
        "Trained on 1 to 40 letters: letters right, with the earlier ones given, and whole strings"
        " right, by length (and number of strings per seed, of five), % (empty: not measured):\n\n"
        f"{_by_length(rows, ('alphabet', 'score'), 'strings', NEAR)}\n\n"
        "Parts of the recipe replaced, the first arm of each being the recipe's: letters right,"
        " with the earlier ones given, 4 strings for each of three seeds, %:\n\n"
        f"{_by_length(rows, ('part', 'arm'), 'letters')}\n\n"
        f"Normalisers: whole strings right (weight of the right key), %:\n\n{_normalizers(rows)}"
    )


def _normalizers(rows: list[Row]) -> str:
    """Means over seeds at the longest strings, with a column for each training and score."""
    rows = where(rows, "normalizer")
    longest = {row["trained"]: row["length"] for row in rows}  # the last of each training
    arms = dict.fromkeys((row["trained"], row["score"]) for row in rows)
    heads = [f"{score}, {trained}, at {longest[trained]}" for trained, score in arms]
    lines = []
    for name in dict.fromkeys(column(rows, "normalizer")):
        cells = []
        for trained, score in arms:
            labels: Any = {"trained": trained, "score": score, "length": longest[trained]}
            found = where(rows, normalizer=name, **labels)
            means = [100 * float(np.mean(row[x])) for row in found for x in ("strings", "weight")]
            cells.append("{:.0f} ({:.0f})".format(*means) if means else "")
        lines.append([name, *cells])
    return lab.markdown(["normaliser", *heads], lines)


def _by_length(rows: list[Row], names: Sequence[str], what: str, *more: str) -> str:
    """Means over seeds, with a line for each arm."""
    shares = {
        (*(row[name] for name in names), row["length"]): row.get("strings", row.get("letters"))
        for row in where(rows, *names)
    }
    lengths: tuple[Any, ...] = (*more, *SHOWN)
    heads = [*names, *(f"letters, {near}" for near in more)]
    counts = {n: f" ({LENGTHS['score'][n]})" if what == "strings" else "" for n in SHOWN}
    heads += [f"{what}, {n:,}{count}" for n, count in counts.items()]
    lines = []
    for arm in dict.fromkeys(key[:-1] for key in shares):
        by_length = [shares.get((*arm, length)) for length in lengths]
        cells = (f"{100 * np.mean(x):.2f}" if x else "" for x in by_length)
        lines.append([*arm, *cells])
    return lab.markdown(heads, lines)


CAPTIONS = {
    "length_logits": "Letters right against the length of the string, for models trained on 1 to 40"
    " letters (dotted). Logits that grow with log n keep their sharpness; a learned factor, the"
    " same at all lengths, does not help. Bands: one deviation over seeds."
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """The size of logits."""
    figure, axes = plotting.new_figure(10, 3.9, columns=2, sharey=True, grid=True)
    for ax, part in zip(axes, (SCALED, ADDITIVE), strict=True):
        arms = dict.fromkeys(column(rows, "arm", part=part))
        for arm in arms:
            line = where(rows, part=part, arm=arm)
            shares = 100 * np.array(column(line, "letters"))
            lengths = column(line, "length")
            index = plotting.index_of(arm, arms)
            plotting.draw_band(ax, lengths, shares, index=index, label=arm, limits=(0, 100))
        ax.axvline(40, color="gray", linestyle=":", linewidth=1)
        ax.set(title=part, xlabel="length of the string", xscale="log")
        ax.set_xticks(list(LENGTHS["part"]), [f"{n:,}" for n in LENGTHS["part"]], fontsize=8)
        ax.minorticks_off()
    axes[0].set(ylabel="letters right (%)", ylim=(-3, 103))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return {"length_logits": figure}


if __name__ == "__main__":
    lab.main(__name__)
