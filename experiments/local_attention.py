"""How wide must a local window be, and around what, to reverse a string?

Source:   chapter 38 ("Attention Variants"), §38.7 and exercise 38.5; Luong, Pham and Manning 2015,
          section 3.2.
Command:  .venv/bin/python experiments/local_attention.py
Time:     about 12 minutes on 2 CPU cores.
Expected: the answer to the exercise is the anti-diagonal, p = S - 1 - i: there radius 0 is enough.
          A window around the diagonal, p = i, holds the letter to be written only where
          |S - 1 - 2i| <= D. Without an encoder it reverses strings of at most D + 1 letters; longer
          ones only if of each pair that is out of sight, i and S - 1 - i, one is guessed (copying
          reverses palindromes):

              exact match <= (1 / 26)^(pairs with |S - 1 - 2i| > D)

          An encoder can carry letters into the window; then no radius is too small.

Three parts:

1. The chapter's masks, global, local-m and local-p, from its own numbers, and the anti-diagonal.
   Its text has local-m predict its center; its code takes floor(i S / T), and Luong i itself. Its
   local-p is drawn as local-m with noise.
2. Local-p's Gaussian, of deviation D / 2, which the chapter leaves out. It comes after the softmax,
   so that the weights of a row sum to less than 1. For logits that know nothing of the position,
   and a center anywhere between keys, what is left is on average

       integral over |x| <= D of exp(-2 x^2 / D^2) dx / 2D = sqrt(pi / 8) erf(sqrt(2)) = 0.598

   whatever D is; with the center on a key it is less, 0.424 for D = 1. Through it alone gradients
   reach the center.
3. Reversal, by radius: windows around the anti-diagonal and the diagonal, each with an encoder and
   without, and around a predicted center without. `attention_family.py` trains more kinds, for
   longer, at radius 2.

The anti-diagonal is told the length of the source: with radius 0 nothing is left to attend to but
the right letter, and after the last one nothing at all. A wider window is worse without an encoder:
the right letter is still to be found in it, by a query that does not know S. Predicted centers do
better there; their Gaussian prefers the middle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import JSON, Expectation, conduct, near, run_command
from local_attention_figures import CAPTIONS, plot
from reversal_arms import accuracies, heat_map, mean_over_lengths, trained_arm

from attention_jax.functional.local import local_attention_weights, reversed_centers, window_mask
from attention_jax.nn.cross_attention import CrossAttentionConfig
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.reversal.data import random_batch
from attention_jax.tasks.reversal.evaluation import evaluate, reverse
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig, ReversalRun, bind
from attention_jax.training.loop import LoopConfig
from attention_jax.training.losses import real_tokens

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "run"]

Array = jax.Array

# The center of the windows -> settings of the cross attention.
CENTERS: dict[str, dict[str, Any]] = {
    "anti-diagonal": {"attention": "local-m", "alignment": "reversed"},
    "diagonal": {"attention": "local-m", "alignment": "monotonic"},
    "predicted": {"attention": "local-p"},
}
WITHOUT, WITH = "no encoder", "encoder"
ARMS = (  # what is trained at every radius
    (WITHOUT, "anti-diagonal"),
    (WITHOUT, "diagonal"),
    (WITHOUT, "predicted"),
    (WITH, "anti-diagonal"),
    (WITH, "diagonal"),
)
LENGTHS = range(ReversalConfig.min_length, ReversalConfig.max_length + 1)
EXACT = "free_running_exact"

# §38.7's picture: 16 queries, 20 keys, D = 3, noise of deviation 2 from a generator seeded with 2.
QUERIES, KEYS, PICTURE_RADIUS, NOISE, NOISE_SEED = 16, 20, 3, 2.0, 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; the training itself has its own in `ReversalConfig`.

    Attributes:
        radii: D of the windows without an encoder; the Gaussian and predicted centers have those
            of at least 1.
        encoder_radii: D of those with one.
        seeds: trainings of each arm.
        steps: optimiser steps of each.
        strings: test strings of each length.
        samples: random queries that go through the Gaussian at each radius.
        word: drawn as heat maps.
        workdir: where the runs are kept; what is finished there is not trained again.
        results: where numbers and figures go.
    """

    radii: tuple[int, ...] = (0, 1, 2, 3, 5)
    encoder_radii: tuple[int, ...] = (0, 1, 2)
    seeds: int = 3
    steps: int = 1000
    strings: int = 1000
    samples: int = 4096
    word: str = "reversal"
    workdir: Path = Path("runs/local_attention")
    results: Path = Path("experiments/results")

    def __post_init__(self) -> None:
        for name in ("radii", "encoder_radii"):
            radii = getattr(self, name)
            if not radii or min(radii) < 0 or tuple(sorted(set(radii))) != radii:
                raise ValueError(
                    f"{name} must be at least 0, each larger than the last; got {radii}"
                )
        common = {radius for radius in self.encoder_radii if radius > 0} & set(self.radii)
        if not common:
            raise ValueError(
                f"radii and encoder_radii must have one of at least 1 in common, to be drawn; got"
                f" {self.radii} and {self.encoder_radii}"
            )
        for name, least in (("strings", 1), ("samples", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if not VOCABULARY.encode(self.word):
            raise ValueError("word must have at least one letter; got none")
        self.training(WITH, "diagonal", self.encoder_radii[0])
        for name in ("workdir", "results"):
            check_folder(name, getattr(self, name))

    @property
    def positive_radii(self) -> list[int]:
        """Those that can have a Gaussian: its deviation is D / 2."""
        return [radius for radius in self.radii if radius > 0]

    @property
    def drawn_radius(self) -> int:
        """The largest that all arms have."""
        return max(set(self.encoder_radii) & set(self.radii))

    def radii_of(self, encoder: str, centers: str) -> Sequence[int]:
        """Those that an arm is trained at."""
        if encoder == WITH:
            return self.encoder_radii
        return self.positive_radii if centers == "predicted" else self.radii

    def training(self, encoder: str, centers: str, radius: int) -> ReversalConfig:
        """One run's settings."""
        layers = Seq2SeqConfig.encoder_layers if encoder == WITH else 0
        cross_attention = CrossAttentionConfig(radius=radius, **CENTERS[centers])
        model = Seq2SeqConfig(cross_attention=cross_attention, encoder_layers=layers)
        return ReversalConfig(model=model, loop=LoopConfig(seeds=self.seeds, steps=self.steps))


QUICK = Config(
    radii=(2,), encoder_radii=(2,), seeds=2, steps=50, strings=50, samples=256,
    workdir=Path("runs/local_attention_quick"),
)  # fmt: skip


def run(config: Config) -> JSON:
    """Masks, the Gaussian, and every training."""
    return {
        "masks": chapter_masks(),
        "gaussian": [gaussian_mass(config, radius) for radius in config.positive_radii],
        "ceiling": {
            str(radius): [_rounded(exact_match_ceiling(length, radius)) for length in LENGTHS]
            for radius in sorted({*config.radii, *config.encoder_radii})
        },
        "arms": {
            f"{encoder}, {centers}": {
                str(radius): _arm(config, encoder, centers, radius)
                for radius in config.radii_of(encoder, centers)
            }
            for encoder, centers in ARMS
        },
    }


# --- 1. masks ---


def chapter_masks() -> JSON:
    """The pairs that may attend, 0 or 1, [T, S] each; and weights through local-p's Gaussian."""
    in_proportion = np.arange(QUERIES) * KEYS / QUERIES
    noise = np.random.default_rng(NOISE_SEED).normal(0, NOISE, QUERIES)
    noisy = np.clip(in_proportion + noise, 0, KEYS - 1)
    centers = {
        "local-m": in_proportion.astype(int),
        "local-p": noisy.astype(int),
        "anti-diagonal": reversed_centers(QUERIES, jnp.array(KEYS)),
    }
    masks = {
        name: window_mask(jnp.asarray(of_name), PICTURE_RADIUS).materialize(QUERIES, KEYS)
        for name, of_name in centers.items()
    }
    masks = {"global": jnp.ones((QUERIES, KEYS), bool), **masks}
    weights = local_attention_weights(
        jnp.zeros((QUERIES, 1)), jnp.zeros((KEYS, 1)),
        centers=jnp.asarray(noisy), radius=PICTURE_RADIUS, sigma=PICTURE_RADIUS / 2,
    )  # fmt: skip
    return {
        "pairs": {name: np.asarray(mask, int).tolist() for name, mask in masks.items()},
        "gaussian_weights": _rounded(weights),
        "gaussian_centers": _rounded(noisy),
    }


# --- 2. the Gaussian ---


def gaussian_mass(config: Config, radius: int) -> JSON:
    """How much of a row's weight local-p's Gaussian leaves, over random queries and keys.

    Centers are on a key, or uniform between two; windows do not reach beyond the keys.
    """
    length, dim = 2 * radius + 3, 16

    def left(rng: Array, offset: Array) -> Array:
        query, key = jax.random.normal(rng, (2, length, dim))
        weights = local_attention_weights(
            query[:1], key, centers=radius + 1 + offset[None], radius=radius, sigma=radius / 2
        )
        return jnp.sum(weights)

    rngs = jax.random.split(jax.random.key(radius), config.samples)
    between = jax.random.uniform(jax.random.key(radius + 100), (config.samples,), maxval=1.0)
    found: JSON = {"radius": radius}
    for name, offsets in (("on a key", jnp.zeros(config.samples)), ("between keys", between)):
        sums = np.asarray(jax.jit(jax.vmap(left))(rngs, offsets), np.float64)
        found[name] = {
            "mean": _rounded(sums.mean()),
            "standard_error": _rounded(sums.std(ddof=1) / math.sqrt(config.samples)),
        }
    found["on a key"]["formula"] = _rounded(mass_on_a_key(radius))
    found["between keys"]["formula"] = _rounded(mass_between_keys())
    return found


def mass_on_a_key(radius: int) -> float:
    """The mean of exp(-2 k^2 / D^2) over k = -D, ..., D: each key has the same share on average."""
    distances = np.arange(-radius, radius + 1)
    return float(np.mean(np.exp(-2 * (distances / radius) ** 2)))


def mass_between_keys() -> float:
    """The same over all distances in between: 2 D keys, whatever the center's offset."""
    return math.sqrt(math.pi / 8) * math.erf(math.sqrt(2))


# --- 3. reversal ---


def exact_match_ceiling(length: int, radius: int) -> float:
    """The largest that there can be without an encoder, in windows around the diagonal.

    Query i is to write letter S - 1 - i and sees letters i - D to i + D, and what has been written.
    (What earlier queries saw does not reach it: self attention comes first in the one decoder
    layer.) The first of a pair i, S - 1 - i that is out of sight has to be guessed; then the
    second, if that guess was letter i itself, need not.
    """
    pairs = sum(length - 1 - 2 * step > radius for step in range(length))
    return float(len(VOCABULARY.alphabet)) ** -pairs


def _arm(config: Config, encoder: str, centers: str, radius: int) -> JSON:
    folder = "-".join([encoder, centers, str(radius)]).replace(" ", "-")
    trained, measured = trained_arm(
        config.training(encoder, centers, radius), config.workdir / folder
    )
    evaluations = evaluate(trained, lengths=LENGTHS, strings=config.strings)
    numbers = {
        "loss": _rounded(measured["loss"][-1]),
        "accuracy": {EXACT: accuracies(evaluations)[EXACT]},
    }
    if centers == "predicted":
        numbers |= _where_it_looks(trained, config.strings)
    if radius == config.drawn_radius:
        numbers |= heat_map(reverse(trained, [config.word])[0])
    return numbers


def _where_it_looks(trained: ReversalRun, strings: int) -> JSON:
    """By seed, over the letters of random strings, the right ones before each being given.

    `weight` is the sum of a row; `on_the_letter` what of it is at the letter to be written.
    """
    batch = random_batch(
        jax.random.key(0), vocabulary=VOCABULARY, batch_size=strings,
        min_length=LENGTHS[0], max_length=LENGTHS[-1],
    )  # fmt: skip
    lengths = batch.source_lengths

    @jax.jit
    @jax.vmap
    def look(params: Any) -> tuple[Array, Array]:
        model = bind(trained.config.model, params)
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
    return {"weight": _rounded(weight), "on_the_letter": _rounded(on_the_letter)}


def _rounded(numbers: Any) -> Any:
    return np.asarray(numbers, np.float64).round(5).tolist()


# --- what was expected ---


def expectations(numbers: JSON) -> list[Expectation]:
    """Of the Gaussian by sampling error; of reversal by what windows can hold."""
    found = []
    for drawn in numbers["gaussian"]:
        for place in ("on a key", "between keys"):
            of = drawn[place]
            # Rounded to five digits: of one key alone, in the window of radius 1, no error is left.
            within = 4 * of["standard_error"] + 1e-5
            claim = f"weight that is left with D = {drawn['radius']}, center {place}"
            found.append(near(claim, "", of["mean"], of["formula"], within, "4 standard errors"))
    arms = numbers["arms"]
    exact = {
        arm: {radius: mean_over_lengths(measured["accuracy"], EXACT, LENGTHS)
              for radius, measured in by_radius.items()}
        for arm, by_radius in arms.items()
    }  # fmt: skip
    right, wrong = exact[f"{WITHOUT}, anti-diagonal"], exact[f"{WITHOUT}, diagonal"]
    for radius in right:
        gain = float((right[radius] - wrong[radius]).min())
        claim = f"no encoder, D = {radius}: exact match around the anti-diagonal - the diagonal"
        found.append(
            Expectation(claim, "exercise 38.5", gain, 0.1, 1, "a clear margin, worst seed")
        )
    narrow, *_, wide = right.values() if len(right) > 1 else [*right.values()] * 2
    claim = f"no encoder, anti-diagonal, D = {next(iter(right))}: exact match, worst seed"
    found.append(Expectation(claim, "", float(narrow.min()), 0.99, 1, "a clear margin, no more"))
    claim = f"no encoder, anti-diagonal: exact match, narrowest window - widest ({[*right][-1]})"
    loss = float((narrow - wide).min())
    found.append(Expectation(claim, "", loss, 0.05, 1, "a clear margin, worst seed"))
    for radius, measured in arms[f"{WITHOUT}, diagonal"].items():
        found += _against_ceiling(
            radius, measured, numbers["ceiling"][radius], numbers["config"]["strings"]
        )
    for radius in arms[f"{WITH}, diagonal"]:
        claim = f"encoder, diagonal, D = {radius}: exact match over the ceiling without one"
        gain = float(
            (exact[f"{WITH}, diagonal"][radius] - np.mean(numbers["ceiling"][radius])).min()
        )
        found.append(Expectation(claim, "", gain, 0.1, 1, "a clear margin, worst seed"))
    return found


def _against_ceiling(
    radius: str, measured: JSON, ceiling: list[float], strings: int
) -> list[Expectation]:
    exact = measured["accuracy"][EXACT]
    within_reach = [length for length, most in zip(LENGTHS, ceiling, strict=True) if most == 1]
    beyond = [length for length in LENGTHS if length not in within_reach]
    found = []
    if within_reach:
        claim = f"no encoder, diagonal, D = {radius}: exact match up to length {within_reach[-1]}"
        mean = float(mean_over_lengths({EXACT: exact}, EXACT, within_reach).mean())
        found.append(Expectation(claim, "", mean, 0.85, 1, "a clear margin"))
    if beyond:
        claim = f"no encoder, diagonal, D = {radius}: exact match from length {beyond[0]} on"
        share = float(mean_over_lengths({EXACT: exact}, EXACT, beyond).mean())
        most = float(np.mean(ceiling[-len(beyond) :]))
        error = math.sqrt(most / (strings * len(beyond)))  # all seeds have the same strings
        tolerance = "by luck alone, and 4 standard errors of it"
        found.append(Expectation(claim, "", share, 0, most + 4 * error, tolerance))
    return found


if __name__ == "__main__":
    run_command(
        Config,
        functools.partial(
            conduct, "local_attention", run=run, plot=plot, expectations=expectations
        ),
    )
