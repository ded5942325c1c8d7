"""Which kinds and windows of attention reverse a string?

Answer:   a window around the anti-diagonal does, even one of a single key. A window around the
          diagonal and monotonic attention reverse only 17 and 11 % of the strings, unless an
          encoder carries the letters to where they look: then it is over 99 %.
Source:   chapter 38 ("Attention Variants"), §38.7 and exercise 38.5; Luong, Pham and Manning 2015,
          section 3.2 (local-m, local-p); See, Liu and Manning 2017, section 2.3 (coverage); Raffel
          et al. 2017 (monotonic); Vaswani et al. 2017, section 3.2.2 (heads).
Command:  .venv/bin/python -m experiments.reversal.local_attention   # 40 minutes on 2 CPU cores

A window of radius D around the diagonal, p = i, holds the letter to write where |S - 1 - 2i| <= D.
Without an encoder it reverses strings of at most D + 1 letters. To reverse a longer string, the
model has to guess one letter of each pair i and S - 1 - i that is out of sight (copying reverses
palindromes):

    exact match <= (1 / 26)^(pairs with |S - 1 - 2i| > D)

Local-p multiplies the weights after the softmax by a Gaussian of deviation D / 2, so that the
weights of a row sum to less than 1. For logits that are independent of the position, and a center
anywhere between keys, the sum is on average

    integral over |x| <= D of exp(-2 x^2 / D^2) dx / 2D = sqrt(pi / 8) erf(sqrt(2)) = 0.598

whatever D is; with the center on a key it is less, 0.424 for D = 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax.functional.centers import reversed_centers
from attention_jax.functional.local import local_attention_weights, window_mask
from attention_jax.reports import plotting
from attention_jax.scores import score_folder
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.pages import AXES, cross_attention
from attention_jax.tasks.reversal import Reversal
from experiments.lab import (
    Claim,
    Row,
    ScoreNames,
    check_least,
    column,
    main,
    markdown,
    significant,
    spread,
    where,
)
from experiments.reversal.arms import trained_arm
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings

LENGTHS = range(SHORT_STRINGS.min_length, SHORT_STRINGS.max_length + 1)
WORD = "reversal"  # drawn
# §38.7's figure: 16 queries, 20 keys, D = 3, noise of deviation 2 from a generator with seed 2.
QUERIES, KEYS, PICTURE_RADIUS, NOISE, NOISE_SEED = 16, 20, 3, 2.0, 2
# By the center of the windows: settings of the cross attention.
CENTERS: dict[str, dict[str, Any]] = {
    "anti-diagonal": {"attention": "local-m", "alignment": "reversed"},
    "diagonal": {"attention": "local-m", "alignment": "monotonic"},
    "predicted": {"attention": "local-p"},
}
ENCODER = ("no encoder", "encoder")  # by the number of its layers
SCORES = ("cosine", "distance", "concat", "softcap")
# By kind of attention: settings of the model. Windows have radius 2.
KINDS: dict[str, dict[str, Any]] = {
    **{score: {"score": score} for score in SCORES},
    "4 heads": {"num_heads": 4},
    "local-p": CENTERS["predicted"],
    "local-m, anti-diagonal": CENTERS["anti-diagonal"],
    "coverage": {"attention": "coverage", "score": "additive"},
    "local-m, diagonal": CENTERS["diagonal"],
    "monotonic": {"attention": "monotonic"},
    "no encoder": {"encoder_layers": 0},
    "no encoder, local-m, anti-diagonal": {"encoder_layers": 0, **CENTERS["anti-diagonal"]},
    "no encoder, local-m, diagonal": {"encoder_layers": 0, **CENTERS["diagonal"]},
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

    scores: ScoreNames = ("scaled",)
    radii: tuple[int, ...] = (0, 1, 2, 3, 5)
    encoder_radii: tuple[int, ...] = (0, 1, 2)
    steps: int = 1000
    kinds: tuple[str, ...] = tuple(KINDS)
    kind_steps: int = 2500
    strings: int = 1000
    workdir: Path = Path("runs/local_attention")

    def __post_init__(self) -> None:
        check_least(self, strings=1)
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"kinds must be of {', '.join(KINDS)}; got {unknown}")

    def trainings(self) -> list[tuple[Row, Reversal]]:
        """Returns what to train, and the labels of its row."""
        longer = dataclasses.replace(self, steps=self.kind_steps)
        kinds: list[tuple[Row, Reversal]] = [
            ({"kind": kind}, longer.training_of(SHORT_STRINGS, **KINDS[kind]))
            for kind in self.kinds
        ]
        windows = [
            (
                {"score": score, "encoder": ENCODER[layers], "center": center, "radius": radius},
                self.training_of(
                    SHORT_STRINGS, score=score, encoder_layers=layers, radius=radius, **settings
                ),
            )
            for score in self.scores
            for layers, radii in enumerate((self.radii, self.encoder_radii))
            for center, settings in CENTERS.items()
            for radius in radii
            if center != "predicted" or radius > layers == 0
        ]
        return [*kinds, *windows]


QUICK = Config(
    seeds=2, steps=25, radii=(2,), encoder_radii=(2,), kinds=("no encoder, monotonic",),
    kind_steps=25, strings=50,
)  # fmt: skip


def run(config: Config) -> list[Row]:
    """A row for each of the chapter's masks, each kind and each window."""
    rows = chapter_masks()
    for labels, training in config.trainings():
        folder = score_folder(" ".join(map(str, labels.values())))
        trained, _ = trained_arm(training, config.workdir / folder)
        by_length = accuracies(training, trained.params, LENGTHS, strings=config.strings)
        exact = [measured.free_running_exact for measured in by_length.values()]
        row = {**labels, "strings": config.strings, "exact": significant(exact)}
        if labels.get("kind") in set(KINDS) - set(SCORES):
            params = trained.params_of(0)
            answers = training.answers(params, [WORD])
            drawn = cross_attention(training, params, answers.batch, answers.labels)
            weights, row["answer"], _ = next(iter(drawn.values()))
            row["weights"] = np.round(np.float64(weights), 3).tolist()
        rows.append(row)
    return rows


def chapter_masks() -> list[Row]:
    """The allowed pairs [T, S] of each mask, and uniform weights under the Gaussian."""
    in_proportion = np.arange(QUERIES) * KEYS / QUERIES
    noise = np.random.default_rng(NOISE_SEED).normal(0, NOISE, QUERIES)
    noisy = np.clip(in_proportion + noise, 0, KEYS - 1)
    centers = {
        "local-m, diagonal": in_proportion.astype(int),
        "local-p, the chapter's": noisy.astype(int),
        "local-m, anti-diagonal": np.asarray(reversed_centers(QUERIES, jnp.array(KEYS))),
    }
    pairs = {"global": np.ones((QUERIES, KEYS))} | {
        name: window_mask(jnp.asarray(of_mask), PICTURE_RADIUS).materialize(QUERIES, KEYS)
        for name, of_mask in centers.items()
    }
    pairs["local-p, the paper's"] = local_attention_weights(
        jnp.zeros((QUERIES, 1)), jnp.zeros((KEYS, 1)),
        centers=jnp.asarray(noisy), radius=PICTURE_RADIUS, sigma=PICTURE_RADIUS / 2,
    )  # fmt: skip
    return [{"mask": name, "pairs": significant(values)} for name, values in pairs.items()]


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
    kinds = {row["kind"]: np.mean(row["exact"], axis=0) for row in rows if "kind" in row}
    found = [
        Claim(f"{kind}: exact match, best seed", kinds[kind].max(), 0, 0.5)
        for kind in EXPECTED_TO_FAIL if kind in kinds
    ]  # fmt: skip
    if set(KINDS) == set(kinds):
        failing = ("no encoder", *EXPECTED_TO_FAIL, *WITHOUT)
        least = min(kinds[kind].min() for kind in kinds if kind not in failing)
        most = max(kinds[kind].max() for kind in WITHOUT)
        found += [
            Claim("every other kind: exact match, worst seed of the worst", least, 0.99, 1),
            Claim("no encoder: exact match, worst seed", kinds["no encoder"].min(), 0.9, 1),
            Claim("no encoder, diagonal or monotonic: exact match, best seed", most, 0, 0.5),
        ]
    for score in dict.fromkeys(column(rows, "score")):
        found += _of_windows(score, where(rows, score=score))
    return found


def by_radius(rows: list[Row], encoder: str, center: str) -> dict[int, np.ndarray]:
    """Exact match by radius, [lengths, seeds]."""
    arms = where(rows, encoder=encoder, center=center)
    return {row["radius"]: np.array(row["exact"]) for row in arms}


def _of_windows(score: str, rows: list[Row]) -> list[Claim]:
    right, wrong, predicted = (by_radius(rows, ENCODER[0], center) for center in CENTERS)
    carried, narrow, wide = by_radius(rows, ENCODER[1], "diagonal"), min(right), max(right)
    reached, guessed = [], []
    for radius, exact in wrong.items():
        most = ceilings(radius)
        beyond = most < 1
        if not np.all(beyond):
            reached.append(exact[~beyond].mean())
        # All seeds have the same strings.
        error = math.sqrt(most[beyond].mean() / (rows[0]["strings"] * beyond.sum()))
        guessed.append(most[beyond].mean() + 4 * error - exact[beyond].mean())
    wider = [predicted[2] - predicted[1]] if {1, 2} <= set(predicted) else []
    over = [exact - ceilings(radius)[:, None] for radius, exact in carried.items()]
    # Exact match in all of these; of the worst seed, where there are seeds.
    least: list[tuple[str, list[float], float, str]] = [
        ("anti-diagonal less diagonal, least of all D",
         _worst(right[radius] - wrong[radius] for radius in right), 0.1, "exercise 38.5"),
        (f"anti-diagonal, D = {narrow}", _worst([right[narrow]]), 0.99, ""),
        (f"anti-diagonal, D = {narrow} less D = {wide}", _worst([right[narrow] - right[wide]]),
         0.05, ""),
        ("predicted center, D = 2 less D = 1", _worst(wider), 0.1, ""),
        ("diagonal, strings within reach, least of all D", reached, 0.85, ""),
        ("diagonal, longer strings: below lucky guesses and 4 standard errors of them, by",
         guessed, 0, ""),
        ("diagonal with an encoder, above the most without one, least of all D", _worst(over),
         0.1, ""),
    ]  # fmt: skip
    return [
        Claim(f"{score}: exact match, {text}", min(values), low, 1, source)
        for text, values, low, source in least if values
    ]  # fmt: skip


def _worst(gains: Iterable[np.ndarray]) -> list[float]:
    """[lengths, seeds] -> of the worst seed."""
    return [gain.mean(0).min() for gain in gains]


def table(rows: list[Row]) -> str:
    """Exact match by window, and by kind."""
    windows = [row for row in rows if "radius" in row]
    radii = sorted({row["radius"] for row in windows})
    arms = dict.fromkeys((row["score"], row["encoder"], row["center"]) for row in windows)
    lines = []
    for score, encoder, center in arms:
        exact = by_radius(where(rows, score=score), encoder, center)
        cells = (f"{100 * exact[D].mean():.1f}" if D in exact else "" for D in radii)
        lines.append((score, f"{center}, {encoder}", *cells))
    head = ("score", "window around the", *(f"D = {radius}" for radius in radii))
    kinds = [
        (row["kind"], f"{spread(exact, 4)} ({exact.min():.1f})")
        for row in rows if "kind" in row
        for exact in [100 * np.mean(row["exact"], axis=0)]
    ]  # fmt: skip
    kind_head = ("attention, D = 2", "exact match, %: mean ± deviation over seeds (worst)")
    first = f"Exact match on strings of {LENGTHS[0]} to {LENGTHS[-1]} letters, mean over seeds, %:"
    return f"{first}\n\n{markdown(head, lines)}\n\n{markdown(kind_head, kinds)}"


CAPTIONS = {
    "local_attention": "Exact match against the radius of the window. Without an encoder, windows"
    " around the anti-diagonal reverse every string at radius 0, and fewer strings the wider they"
    " are; windows around the diagonal follow their ceiling; windows around a predicted center"
    " need radius 2. With an encoder both reverse, the diagonal less well. By length, the diagonal"
    " reverses most strings up to D + 1 letters and no longer ones. Bands: one deviation over"
    " seeds.",
    "local_attention_kinds": "Attention weights of each kind of attention while it writes a word"
    " backwards. Windows around the diagonal and monotonic attention look where the encoder has"
    " moved the letters.",
    "local_attention_masks": "The chapter's masks of 16 queries and 20 keys with radius 3, the mask"
    " that reversal needs, and uniform weights under the paper's Gaussian, whose rows sum to less"
    " than 1.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """Accuracy, weights and masks."""
    panels = {}
    for row in [row for row in rows if "weights" in row]:
        title = row["kind"].replace("encoder, ", "encoder,\n")
        panels[title] = np.array(row["weights"]), row["answer"], list(WORD)
    figures = {"local_attention": _accuracy(rows), "local_attention_masks": _masks(rows)}
    if panels:
        weights = plotting.weight_heatmaps(panels, columns=5, size=2.5, **AXES)
        figures["local_attention_kinds"] = weights
    return figures


def _accuracy(rows: list[Row]) -> Any:
    """Of the first score."""
    score = column(rows, "score")[0]
    arms = where(rows, score=score)
    figure, axes = plotting.new_figure(10, 4.1, columns=3, sharey=True)
    band = functools.partial(plotting.draw_band, limits=(0, 1))
    for ax, encoder in zip(axes, ENCODER, strict=False):
        for index, center in enumerate(CENTERS):
            if exact := by_radius(arms, encoder, center):
                means = np.array([each.mean(0) for each in exact.values()])
                band(ax, list(exact), means, index=index, label=center)
        ax.set(title=encoder, xlabel="radius D of the window (keys)")
        ax.set_xticks(sorted(set(column(arms, "radius", encoder=encoder))))
    by_length = by_radius(arms, ENCODER[0], "diagonal")
    most = [ceilings(radius).mean() for radius in by_length]
    axes[0].plot(list(by_length), most, "k_", markersize=16, label="the most of the diagonal")
    for index, (radius, exact_of_radius) in enumerate(by_length.items()):
        band(axes[2], LENGTHS, exact_of_radius, index=index, label=f"D = {radius}")
    axes[2].set(title="diagonal, no encoder", xlabel="length of the string (letters)")
    axes[0].set(ylabel=f"exact match ({score})", ylim=(-0.04, 1.06))
    axes[2].legend()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _masks(rows: list[Row]) -> Any:
    masks = [row for row in rows if "mask" in row]
    figure, axes = plotting.new_figure(2.6 * len(masks), 2.7, columns=len(masks), sharey=True)
    for ax, row in zip(axes, masks, strict=True):
        ax.imshow(row["pairs"], cmap="viridis", vmin=0, interpolation="nearest")
        ax.set(title=row["mask"], xlabel="source position j (key)")
    axes[0].set_ylabel("target position i (query)")
    return figure


if __name__ == "__main__":
    main(__name__)
