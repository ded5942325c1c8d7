"""How wide must a local window be, and around which position, to reverse a string?

Source:   chapter 38 ("Attention Variants"), §38.7 and exercise 38.5; Luong, Pham and Manning 2015,
          section 3.2.
Command:  .venv/bin/python -m experiments.reversal.local_attention
Time:     12 minutes on 2 CPU cores.
Expected: the answer to the exercise is the anti-diagonal, p = S - 1 - i: there radius 0 is enough.
          A window around the diagonal, p = i, holds the letter to write only where
          |S - 1 - 2i| <= D. Without an encoder it reverses strings of at most D + 1 letters. To
          reverse a longer string, it has to guess one letter of each pair i and S - 1 - i that is
          out of sight (copying reverses palindromes):

              exact match <= (1 / 26)^(pairs with |S - 1 - 2i| > D)

          An encoder can carry letters into the window; then no radius is too small.

The experiment has three parts:

1. The chapter's masks, global, local-m and local-p, from its own numbers, and the anti-diagonal.
   Its text has local-m predict its center; its code takes floor(i S / T), and Luong i itself. Its
   local-p is drawn as local-m with noise. (§38.7 also states causality as i <= j, which is the
   wrong way round if i is the query.)
2. Local-p's Gaussian, of deviation D / 2, which the chapter leaves out. It comes after the softmax,
   so that the weights of a row sum to less than 1. For logits that are independent of the position,
   and a center anywhere between keys, the sum is on average

       integral over |x| <= D of exp(-2 x^2 / D^2) dx / 2D = sqrt(pi / 8) erf(sqrt(2)) = 0.598

   whatever D is; with the center on a key it is less, 0.424 for D = 1. Gradients reach the center
   only through the Gaussian.
3. Reversal, by radius: windows around the anti-diagonal and the diagonal, each with an encoder and
   without, and around a predicted center without. `attention_family.py` trains more kinds, for
   longer, at radius 2.

The anti-diagonal knows the length of the source: with radius 0 the window holds only the right
letter, and nothing after the last letter. A wider window is worse without an encoder: the query has
to find the right letter in it without knowing S. Predicted centers do better there, because their
Gaussian prefers the middle. With `--scores`, every window is trained with each score in the cross
attention. The models have the settings for short strings (`SHORT_STRINGS` in
`training_settings.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.centers import reversed_centers
from attention_jax.nn.config import ModelConfig
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.losses import real_tokens
from attention_jax.training.run import TrainedRun
from experiments.experiment import JSON, Expectation, ScoreNames, rounded, run_experiment
from experiments.reversal.arms import (
    TRAINED_LENGTHS,
    accuracies,
    heat_map,
    mean_over_lengths,
    trained_arm,
)
from experiments.reversal.local_attention_figures import CAPTIONS, plot
from experiments.reversal.local_attention_report import report
from experiments.reversal.local_attention_windows import chapter_masks, gaussian_mass
from experiments.reversal.strings import VOCABULARY, evaluate, random_batch, reverse
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings, check_word
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

# The center of the windows -> settings of the cross attention.
CENTERS: dict[str, dict[str, Any]] = {
    "anti-diagonal": {"attention": "local-m", "alignment": "reversed"},
    "diagonal": {"attention": "local-m", "alignment": "monotonic"},
    "predicted": {"attention": "local-p"},
}
WITHOUT, WITH = "no encoder", "encoder"
ARMS = (  # the models that are trained at every radius
    (WITHOUT, "anti-diagonal"),
    (WITHOUT, "diagonal"),
    (WITHOUT, "predicted"),
    (WITH, "anti-diagonal"),
    (WITH, "diagonal"),
)
EXACT = "free_running_exact"


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores of the cross attention; heat maps show the first.
        radii: D of the windows without an encoder; the Gaussian and predicted centers take those
            of at least 1.
        encoder_radii: D of the windows with an encoder.
        num_heads: heads of the self attentions.
        strings: test strings per length.
        samples: random queries for the Gaussian at each radius.
        word: drawn as heat maps.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = ("scaled",)
    radii: tuple[int, ...] = (0, 1, 2, 3, 5)
    encoder_radii: tuple[int, ...] = (0, 1, 2)
    steps: int = 1000
    num_heads: int = ModelConfig.num_heads
    strings: int = 1000
    samples: int = 4096
    word: str = "reversal"
    workdir: Path = Path("runs/local_attention")

    def __post_init__(self) -> None:
        check_some(self, "scores")
        for name in ("radii", "encoder_radii"):
            radii = getattr(self, name)
            if not radii or min(radii) < 0 or tuple(sorted(set(radii))) != radii:
                raise ValueError(
                    f"{name} must be at least 0, each larger than the last; got {radii}"
                )
        common = {radius for radius in self.encoder_radii if radius > 0} & set(self.radii)
        if not common:
            raise ValueError(
                f"radii and encoder_radii must share a radius of at least 1, for the figure; got"
                f" {self.radii} and {self.encoder_radii}"
            )
        check_least(self, strings=1, samples=2)
        check_word(self.word)
        for score in self.scores:
            self.training(score, WITH, "diagonal", self.encoder_radii[0])
        check_folder("workdir", self.workdir)

    @property
    def positive_radii(self) -> list[int]:
        """The radii that can have a Gaussian, whose deviation is D / 2."""
        return [radius for radius in self.radii if radius > 0]

    @property
    def drawn_radius(self) -> int:
        """The largest radius that all arms share."""
        return max(set(self.encoder_radii) & set(self.radii))

    def radii_of(self, encoder: str, centers: str) -> Sequence[int]:
        """Returns the radii of an arm."""
        if encoder == WITH:
            return self.encoder_radii
        return self.positive_radii if centers == "predicted" else self.radii

    def training(self, score: str, encoder: str, centers: str, radius: int) -> Reversal:
        """Returns the settings of one run."""
        layers = SHORT_STRINGS.model.encoder_layers if encoder == WITH else 0
        return self.training_of(
            SHORT_STRINGS, score=score, encoder_layers=layers, radius=radius, **CENTERS[centers],
            num_heads=self.num_heads,
        )  # fmt: skip


QUICK = Config(
    radii=(2,), encoder_radii=(2,), seeds=2, steps=50, strings=50, samples=256,
    workdir=Path("runs/local_attention_quick"),
)  # fmt: skip


def run(config: Config) -> JSON:
    """Draws the masks, measures the Gaussian, and trains every arm."""
    return {
        "masks": chapter_masks(),
        "gaussian": [gaussian_mass(radius, config.samples) for radius in config.positive_radii],
        "ceiling": {
            str(radius): [
                rounded(exact_match_ceiling(length, radius)) for length in TRAINED_LENGTHS
            ]
            for radius in sorted({*config.radii, *config.encoder_radii})
        },
        "arms": {
            score: {
                f"{encoder}, {centers}": {
                    str(radius): _arm(config, score, encoder, centers, radius)
                    for radius in config.radii_of(encoder, centers)
                }
                for encoder, centers in ARMS
            }
            for score in config.scores
        },
    }


def exact_match_ceiling(length: int, radius: int) -> float:
    """Returns the largest possible exact match without an encoder, around the diagonal.

    Query i has to write letter S - 1 - i. It sees letters i - D to i + D and the letters written so
    far. (Letters that earlier queries saw do not reach it: self attention comes first in the one
    decoder layer.) Of a pair i, S - 1 - i that is out of sight, the first letter has to be guessed;
    the second can be copied if the guess was letter i itself.
    """
    pairs = sum(length - 1 - 2 * step > radius for step in range(length))
    return float(len(VOCABULARY.alphabet)) ** -pairs


def _arm(config: Config, score: str, encoder: str, centers: str, radius: int) -> JSON:
    folder = f"{score_folder(score)}-{encoder}-{centers}-{radius}".replace(" ", "-")
    trained, _ = trained_arm(
        config.training(score, encoder, centers, radius), config.workdir / folder
    )
    evaluations = evaluate(trained, lengths=TRAINED_LENGTHS, strings=config.strings)
    numbers: JSON = {"accuracy": {EXACT: accuracies(evaluations)[EXACT]}}
    if centers == "predicted":
        numbers |= _where_it_looks(trained, config.strings)
    if radius == config.drawn_radius:
        numbers |= heat_map(reverse(trained, [config.word])[0])
    return numbers


def _where_it_looks(trained: TrainedRun, strings: int) -> JSON:
    """Means over the letters of random strings, with the previous letters given, by seed.

    `weight` is the sum of a row, and `on_the_letter` the part of it at the letter to write.
    """
    batch = random_batch(
        jax.random.key(0), batch_size=strings,
        min_length=TRAINED_LENGTHS[0], max_length=TRAINED_LENGTHS[-1], source_start=False,
    )  # fmt: skip
    lengths = batch.source_lengths

    @jax.jit
    @jax.vmap
    def look(params: Any) -> tuple[Array, Array]:
        model = trained.task.bind(params)
        _, weights = model(batch.source, lengths, batch.target_inputs, return_weights=True)
        weights = weights[0]  # of the one layer
        letters = real_tokens(lengths, weights.shape[1])
        sums = jnp.sum(weights, axis=-1)
        alignment = reversed_centers(weights.shape[1], lengths)
        right = jax.nn.one_hot(alignment, weights.shape[2]) * weights
        count = jnp.sum(letters.astype(weights.dtype))
        return (
            jnp.sum(jnp.where(letters, sums, 0)) / count,
            jnp.sum(jnp.where(letters[..., None], right, 0)) / count,
        )

    weight, on_the_letter = look(trained.params)
    return {"weight": rounded(weight), "on_the_letter": rounded(on_the_letter)}


# --- expectations ---


def expectations(numbers: JSON) -> list[Expectation]:
    """Windows reverse strings as far as they hold the letters, with every score."""
    return [
        check
        for score, arms in numbers["arms"].items()
        for check in _of_score(score, arms, numbers)
    ]


def _of_score(score: str, arms: JSON, numbers: JSON) -> list[Expectation]:
    checks = []
    exact = {
        arm: {radius: mean_over_lengths(measured["accuracy"], EXACT, TRAINED_LENGTHS)
              for radius, measured in by_radius.items()}
        for arm, by_radius in arms.items()
    }  # fmt: skip
    without, margin = f"{score}, {WITHOUT}", "a clear margin, worst seed"
    right, wrong = exact[f"{WITHOUT}, anti-diagonal"], exact[f"{WITHOUT}, diagonal"]
    for radius in right:
        gain = float((right[radius] - wrong[radius]).min())
        claim = f"{without}, D = {radius}: exact match around the anti-diagonal - the diagonal"
        checks.append(Expectation(claim, "exercise 38.5", gain, 0.1, 1, margin))
    narrow, *_, wide = right.values() if len(right) > 1 else [*right.values()] * 2
    claim = f"{without}, anti-diagonal, D = {next(iter(right))}: exact match, worst seed"
    checks.append(Expectation(claim, "", float(narrow.min()), 0.99, 1, "a clear margin"))
    claim = f"{without}, anti-diagonal: exact match, narrowest window - widest ({[*right][-1]})"
    loss = float((narrow - wide).min())
    checks.append(Expectation(claim, "", loss, 0.05, 1, margin))
    predicted = exact[f"{WITHOUT}, predicted"]
    if {"1", "2"} <= set(predicted):
        claim = f"{without}, predicted: exact match, D = 2 - D = 1"
        gain = float((predicted["2"] - predicted["1"]).min())
        checks.append(Expectation(claim, "", gain, 0.1, 1, margin))
    for radius, measured in arms[f"{WITHOUT}, diagonal"].items():
        checks += _against_ceiling(
            f"{without}, diagonal, D = {radius}", measured, numbers["ceiling"][radius],
            numbers["config"]["strings"],
        )  # fmt: skip
    for radius in arms[f"{WITH}, diagonal"]:
        claim = f"{score}, {WITH}, diagonal, D = {radius}: exact match over the ceiling without one"
        gain = float(
            (exact[f"{WITH}, diagonal"][radius] - np.mean(numbers["ceiling"][radius])).min()
        )
        checks.append(Expectation(claim, "", gain, 0.1, 1, margin))
    return checks


def _against_ceiling(
    arm: str, measured: JSON, ceiling: list[float], strings: int
) -> list[Expectation]:
    exact = measured["accuracy"][EXACT]
    within_reach = [
        length for length, most in zip(TRAINED_LENGTHS, ceiling, strict=True) if most == 1
    ]
    beyond = [length for length in TRAINED_LENGTHS if length not in within_reach]
    checks = []
    if within_reach:
        claim = f"{arm}: exact match up to length {within_reach[-1]}"
        mean = float(mean_over_lengths({EXACT: exact}, EXACT, within_reach).mean())
        checks.append(Expectation(claim, "", mean, 0.85, 1, "a clear margin"))
    if beyond:
        claim = f"{arm}: exact match from length {beyond[0]} on"
        share = float(mean_over_lengths({EXACT: exact}, EXACT, beyond).mean())
        most = float(np.mean(ceiling[-len(beyond) :]))
        error = math.sqrt(most / (strings * len(beyond)))  # all seeds have the same strings
        tolerance = "lucky guesses, and 4 standard errors of them"
        checks.append(Expectation(claim, "", share, 0, most + 4 * error, tolerance))
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
