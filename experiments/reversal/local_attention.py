"""Which kinds and windows of attention reverse a string?

Answer:   A window around the anti-diagonal does, even one of a single key. A window around the
          diagonal and monotonic attention reverse only 17 and 11 % of the strings, unless an
          encoder carries the letters to where they look: then it is over 99 %.
Source:   chapter 38 ("Attention Variants"), §38.7 and exercise 38.5; Luong, Pham and Manning 2015,
          section 3.2 (local-m, local-p); See, Liu and Manning 2017, section 2.3 (coverage); Raffel
          et al. 2017 (monotonic); Vaswani et al. 2017, section 3.2.2 (heads).
Command:  .venv/bin/python -m experiments.reversal.local_attention  # 40 minutes on 2 busy cores

A window of radius D around the diagonal, p = i, holds the letter to write where |S - 1 - 2i| <= D.
Without an encoder it reverses strings of at most D + 1 letters. In a longer string some letters i
and S - 1 - i are out of sight of each other. Of each such pair the model has to guess one letter;
copying the letter in sight writes both right where they happen to be equal. Hence

    exact match <= (1 / 26)^(pairs with |S - 1 - 2i| > D)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.reports import plotting
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.pages import AXES
from attention_jax.tasks.reversal import Reversal
from experiments import lab
from experiments.lab import Claim, Row, column, where
from experiments.reversal.arms import SHORT_STRINGS, TrainingSettings, attention_on, trained_arms

LENGTHS = range(SHORT_STRINGS.min_length, SHORT_STRINGS.max_length + 1)
WORD = "reversal"  # drawn
SCORES = ("cosine", "distance", "concat", "softcap")
# By kind of attention: settings of the model.
LOCAL: dict[str, dict[str, Any]] = {
    "local-m, anti-diagonal": {"attention": "local-m", "alignment": "reversed"},
    "local-m, diagonal": {"attention": "local-m", "alignment": "monotonic"},
    "local-p": {"attention": "local-p"},
}
ANTI, DIAGONAL, PREDICTED = (f"no encoder, {kind}" for kind in LOCAL)
WINDOWS = {f"no encoder, {kind}": {**LOCAL[kind], "encoder_layers": 0} for kind in LOCAL} | {
    kind: settings for kind, settings in LOCAL.items() if kind != "local-p"
}
KINDS: dict[str, dict[str, Any]] = {
    **{score: {"score": score} for score in SCORES},
    "4 heads": {"num_heads": 4},
    **LOCAL,
    "coverage": {"attention": "coverage", "score": "additive"},
    "monotonic": {"attention": "monotonic"},
    "no encoder": {"encoder_layers": 0},
    ANTI: WINDOWS[ANTI],
    DIAGONAL: WINDOWS[DIAGONAL],
    "no encoder, monotonic": {"encoder_layers": 0, "attention": "monotonic"},
}
# These were expected to fail. The same without an encoder was added after they had not.
EXPECTED_TO_FAIL = ("local-m, diagonal", "monotonic")
WITHOUT = tuple(f"no encoder, {kind}" for kind in EXPECTED_TO_FAIL)


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: of the cross attention through windows; those of the kinds are in `KINDS`.
        radii: D of the windows without an encoder; a predicted center needs at least 1.
        encoder_radii: D of the windows with an encoder.
        steps: of the trainings with windows.
        kinds: which of `KINDS` to train.
        kind_steps: of their trainings.
        strings: test strings per length.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: lab.ScoreNames = ("scaled",)
    radii: tuple[int, ...] = (0, 1, 2, 3, 5)
    encoder_radii: tuple[int, ...] = (0, 1, 2)
    steps: int = 1000
    kinds: tuple[str, ...] = tuple(KINDS)
    kind_steps: int = 2500
    strings: int = 1000
    workdir: Path = Path("runs/local_attention")

    def __post_init__(self) -> None:
        lab.check_least(self, strings=1)
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"kinds must be of {', '.join(KINDS)}; got {unknown}")

    def arms(self) -> Iterator[tuple[Row, Reversal]]:
        """Yields the labels and the settings of every arm."""
        longer = dataclasses.replace(self, steps=self.kind_steps)
        for kind in self.kinds:
            yield {"kind": kind}, longer.training_of(SHORT_STRINGS, **KINDS[kind])
        for score, (window, settings) in itertools.product(self.scores, WINDOWS.items()):
            for radius in self.radii if "encoder_layers" in settings else self.encoder_radii:
                if radius or window != PREDICTED:
                    model = {"score": score, "radius": radius, **settings}
                    labels = {"window": window, "score": score, "radius": radius}
                    yield labels, self.training_of(SHORT_STRINGS, **model)


QUICK = Config(
    seeds=2,
    steps=25,
    radii=(2,),
    encoder_radii=(),
    kinds=(DIAGONAL,),  # a window of radius 2, too: one training
    kind_steps=25,
    strings=50,
)


def run(config: Config) -> list[Row]:
    """A row for each kind and each window."""
    rows = []
    for labels, trained in trained_arms(config.arms(), config.workdir):
        by_length = accuracies(trained.task, trained.params, LENGTHS, strings=config.strings)
        exact = [measured.free_running_exact for measured in by_length.values()]
        row = {**labels, "strings": config.strings, "exact": lab.significant(exact)}
        if labels.get("kind") in set(KINDS) - set(SCORES):
            row["weights"], row["answer"], _ = attention_on(WORD, trained)
        rows.append(row)
    return rows


def ceilings(radius: int) -> np.ndarray:
    """The largest possible exact match by length, without an encoder, around the diagonal.

    Query i has to write letter S - 1 - i. It sees letters i - D to i + D and the letters written so
    far. (Letters that earlier queries saw do not reach it: self attention comes first in the one
    decoder layer.) Of a pair i, S - 1 - i that is out of sight, the first letter has to be guessed;
    the second can be copied if the guess was letter i itself.
    """
    pairs = [sum(n - 1 - 2 * step > radius for step in range(n)) for n in LENGTHS]
    return float(len(Reversal.vocabulary.alphabet)) ** -np.array(pairs)


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """Kinds and windows reverse strings as far as letters reach them."""
    kinds = {row["kind"]: np.mean(row["exact"], axis=0) for row in where(rows, "kind")}
    failing = ("no encoder", *EXPECTED_TO_FAIL, *WITHOUT)
    least = min(kinds[kind].min() for kind in kinds if kind not in failing)
    most = max(kinds[kind].max() for kind in WITHOUT)
    right, wrong, predicted = (by_radius(rows, window) for window in (ANTI, DIAGONAL, PREDICTED))
    within = [exact[ceilings(D) == 1].mean() for D, exact in wrong.items() if 1 in ceilings(D)]
    strings = rows[0]["strings"]
    beyond = [lucky(D, strings) - exact[ceilings(D) < 1].mean() for D, exact in wrong.items()]
    carried = by_radius(rows, "local-m, diagonal").items()
    over = _worst([exact - ceilings(D)[:, None] for D, exact in carried])
    gain = _worst([right[D] - wrong[D] for D in right])
    text = "scaled, no encoder: exact match around"
    wider = f"{text} predicted centers, D = 2 less D = 1"
    lucky_less = f"{text} the diagonal, longer strings: lucky guesses less it"
    carries = "scaled, encoder: around the diagonal, over the most without one"
    return [
        Claim("no encoder: exact match, worst seed", kinds["no encoder"].min(), 0.9, 1),
        Claim("no encoder, diagonal or monotonic: exact match, best seed", most, 0, 0.5),
        Claim("every other kind: exact match, worst seed of the worst", least, 0.99, 1),
        *(
            Claim(f"{kind}: exact match, best seed", kinds[kind].max(), 0, 0.5)
            for kind in EXPECTED_TO_FAIL
        ),
        Claim(f"{text} the anti-diagonal less the diagonal", gain, 0.1, 1, "exercise 38.5"),
        Claim(f"{text} the anti-diagonal, D = 0", _worst([right[0]]), 0.99, 1),
        Claim(f"{text} it, D = 0 less D = 5", _worst([right[0] - right[5]]), 0.05, 1),
        Claim(wider, _worst([predicted[2] - predicted[1]]), 0.1, 1),
        Claim(f"{text} the diagonal, strings within reach", min(within), 0.85, 1),
        Claim(lucky_less, min(beyond), 0, 1),
        Claim(carries, over, 0.1, 1),
    ]


def by_radius(rows: list[Row], window: str) -> dict[int, np.ndarray]:
    """Exact match by radius, [lengths, seeds]."""
    return {row["radius"]: np.array(row["exact"]) for row in where(rows, window=window)}


def lucky(radius: int, strings: int) -> float:
    """What guesses may reach of the strings out of reach: their mean and 4 standard errors."""
    most = ceilings(radius)
    mean = float(most[most < 1].mean())
    return mean + 4 * math.sqrt(mean / (strings * np.sum(most < 1)))  # seeds have the same strings


def _worst(gains: list[np.ndarray]) -> float:
    """The smallest mean over lengths, [lengths, seeds] each, of any radius and seed."""
    return min(float(gain.mean(0).min()) for gain in gains)


def table(rows: list[Row]) -> str:
    """Exact match by window, and by kind."""
    windows = where(rows, "window")
    radii = sorted({row["radius"] for row in windows})
    lines = []
    for score, window in dict.fromkeys((row["score"], row["window"]) for row in windows):
        exact = by_radius(where(rows, score=score), window)
        cells = (f"{100 * exact[D].mean():.1f}" if D in exact else "" for D in radii)
        lines.append((score, window, *cells))
    first = lab.markdown(("score", "window", *(f"D = {radius}" for radius in radii)), lines)
    lines = []
    for row in where(rows, "kind"):
        percent = 100 * np.mean(row["exact"], axis=0)
        lines.append((row["kind"], f"{lab.spread(percent)} ({percent.min():.1f})"))
    deviation = "exact match, %: mean ± deviation over seeds (worst)"
    head = "attention, D = 2, longer training", deviation
    lengths = f"strings of {LENGTHS[0]} to {LENGTHS[-1]} letters"
    return (
        f"Exact match on {lengths} by radius D of the window, mean over seeds, %. The center of"
        f" local-m is given, that of local-p predicted:\n\n{first}\n\n{lab.markdown(head, lines)}"
    )


CAPTIONS = {
    "local_attention": "Exact match against the radius of the window, after 1,000 steps: without an"
    " encoder, where a window around the diagonal cannot get above the dashed line, and with an"
    " encoder. Bands: one deviation over seeds.",
    "local_attention_kinds": "Attention weights of each kind of attention while it writes a word"
    " backwards. Windows around the diagonal and monotonic attention look where the encoder has"
    " moved the letters.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """Accuracy, and the weights of each kind."""
    panels = {}
    for row in where(rows, "weights"):
        title = row["kind"].replace("encoder, ", "encoder,\n")
        panels[title] = np.array(row["weights"]), row["answer"], list(WORD)
    figures = {"local_attention": _accuracy(rows)}
    if panels:
        weights = plotting.weight_heatmaps(panels, columns=5, size=2.5, **AXES)
        figures["local_attention_kinds"] = weights
    return figures


def _accuracy(rows: list[Row]) -> Any:
    """Of the first score."""
    score = column(rows, "score")[0]
    arms = where(rows, score=score)
    figure, axes = plotting.new_figure(8, 4.1, columns=2, sharey=True, grid=True)
    for window, settings in WINDOWS.items():
        ax, kind = axes["encoder_layers" not in settings], window.removeprefix("no encoder, ")
        if exact := by_radius(arms, window):
            means = np.array([each.mean(0) for each in exact.values()])
            index = plotting.index_of(kind, LOCAL)
            plotting.draw_band(ax, list(exact), means, index=index, label=kind, limits=(0, 1))
    radii = [*by_radius(arms, DIAGONAL)]
    most = [ceilings(radius).mean() for radius in radii]
    color = plotting.style_of(plotting.index_of("local-m, diagonal", LOCAL))["color"]
    label = "most possible around the diagonal"
    axes[0].plot(radii, most, "--", color=color, label=label, zorder=0)
    windows = {"no encoder": ANTI, "encoder": "local-m, diagonal"}
    for ax, (title, window) in zip(axes, windows.items(), strict=True):
        ax.set(title=title, xticks=[*by_radius(arms, window)])
        ax.set_xlabel("radius D of the window (keys)")
    axes[0].set(ylabel=f"exact match ({score})", ylim=(-0.03, 1.03))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    lab.main(__name__)
