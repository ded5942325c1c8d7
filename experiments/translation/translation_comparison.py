"""How do translators with additive and with scaled dot cross attention differ, over three seeds?

Answer:   Little: scaled dot is ahead by 0.24 ± 0.57 BLEU (± a deviation over seeds) on the test
          set of 2016 and by 0.78 ± 0.22 to 1.74 ± 0.31 on later ones. With seed 0, an epoch takes
          2.2 minutes with scaled dot and 2.7 with additive, and in 70 % of the rows both have their
          largest weight at the same subword.
Source:   day 11, exercise E11.3: time per epoch, BLEU, heat maps, where they agree; Multi30K
          (Elliott et al. 2016 and 2017, Barrault et al. 2018). Heads that align and heads that
          spread: topic 7.
Command:  .venv/bin/python -m experiments.translation.translation_comparison --data FOLDER
          # 4 to 6 hours on 2 CPU cores

FOLDER holds Multi30K's raw files, train.de.gz, train.en.gz, val.*, test_2016_flickr.*, ..., from
data/task1/raw of github.com/multi30k/dataset; they are not part of this project. `--tests
test_2016_flickr` does without the later test sets. Encoder, decoder, self attention (scaled dot),
subwords and batches are the same: only the score between decoder and encoder differs. The first
part has one seed of every score, and the second several seeds of the first two. Give every training
the same number of cores. A run that is finished is not trained again, if FOLDER is spelt the same
way.

Weights are means over layers and heads, while the model reads the right translation. Every number
is a mean over rows: the target's subwords and its EOS, each with its weights over the source's
subwords and EOS. A head aligns if its rows' largest weights have a mean of at least 0.5, and
spreads if their mean entropy is at least 0.9 of that of uniform rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import capture
from attention_jax.reports import plotting
from attention_jax.scores import score_folder
from attention_jax.tasks.translation.batches import Batches, encode_pairs
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.text import ParallelText
from attention_jax.tasks.translation.translate import Translator, translated_ids
from attention_jax.tasks.vocabulary import EOS, Batch, padded_batch
from experiments import lab
from experiments.lab import Claim, Row, column, main, markdown, spread, where
from experiments.translation import translators
from experiments.translation.translators import SEARCHES, Texts, bootstrapped, tested, trained

CAPTIONS = {
    "translation_heatmaps": "Cross attention of the decoder while it translates the same sentences:"
    " means over layers and heads, two scores side by side.",
}
# Bounds, in BLEU, written before the runs: the least by score and search, and how much lower a
# later test set may be than the first.
LEAST = {"scaled": {"greedy": 37, "4 beams": 38}, "additive": {"greedy": 35, "4 beams": 36}}
MOST_LOWER = {"test_2017_flickr": 10, "test_2017_mscoco": 13, "test_2018_flickr": 13}
TOPIC_7 = "topic 7: some heads align, some spread"
ALIGNS, SPREADS = 0.5, 0.9  # of a head: see above


@dataclasses.dataclass(frozen=True)
class Config(Texts):
    """Settings, beside those of `Texts`.

    Attributes:
        scores: of the cross attention, two or more; the others are compared with the first.
        steps: batches of every training.
        seeds: trainings of each of the first two scores in the second part.
        drawn: indices of the test sentences to draw.
    """

    scores: lab.ScoreNames = ("scaled", "additive", "general", "dot")
    steps: int = 7000
    seeds: int = 3
    drawn: tuple[int, ...] = (0, 4)

    def __post_init__(self) -> None:
        lab.check_least(self, steps=1, seeds=2)
        if len(self.scores) < 2 or len(set(self.scores)) != len(self.scores):
            raise ValueError(f"scores must be two or more, each once; got {self.scores}")


missing = translators.missing
QUICK = Config(**translators.SMALL, scores=("scaled", "additive"), steps=25, seeds=2, drawn=(0,))


def run(config: Config) -> list[Row]:
    """A row per arm of one seed; heat maps; the tests of all seeds of the first two scores."""
    texts = {test: config.text(test) for test in config.tests}
    first_test, text = next(iter(texts.items()))
    arms: dict[str, Row] = {}
    answers: dict[str, list[str]] = {}
    weights: dict[str, list[np.ndarray]] = {}
    maps: list[Row] = []

    def folder_of(score: str, seed: int) -> Path:
        return config.workdir / score_folder(score) / f"seed_{seed}"

    for arm in config.scores:
        task = config.training(arm, config.steps)
        translator, training = trained(folder_of(arm, 0), task)
        subwords = encode_pairs(config.text("train"), translator.subwords, task.max_tokens)
        batches = Batches(subwords, tokens=task.batch_tokens, buckets=task.buckets)
        arms[arm] = {"part": "arm", "score": arm, **training, "epoch": batches.steps_per_epoch}
        for row, answers[arm] in tested(translator, {first_test: text}):  # the last with beams
            arms[arm][row["search"]] = row["bleu"]
        weights[arm] = cross_attention(translator, text)
        arms[arm] |= heads(weights[arm])
        for index in config.drawn if arm in config.scores[:2] else ():
            row = heat_map(translator, text.source[index])
            maps.append({"part": "map", "score": arm, **row})
    first, second = config.scores[:2]
    for arm, interval in bootstrapped(answers, text.target).items():
        arms[arm] |= interval
        arms[arm] |= agreement(weights[first], weights[arm])
    rows = [*arms.values(), *maps]
    for score, seed in itertools.product((first, second), range(config.seeds)):
        task = config.training(score, config.steps, seed)
        translator, training = trained(folder_of(score, seed), task)
        of_seed = {"part": "seeds", "score": score, "seed": seed, **training}
        rows += [{**of_seed, **row} for row, _ in tested(translator, texts)]
    return rows


# --- where the cross attention looks ---


@functools.partial(jax.jit, static_argnums=0)
def look(task: Translation, params: Any, batch: Batch) -> jax.Array:
    """The weights between decoder and encoder, [L, B, N, T, S]."""
    attentions = capture(task.bind(params), *batch.inputs).attentions
    layers = (attentions[f"decoder_{i}/cross_attention"] for i in range(task.model.decoder_layers))
    return jnp.stack([jnp.asarray(layer.weights) for layer in layers])


def cross_attention(translator: Translator, text: ParallelText) -> list[np.ndarray]:
    """The weights [L, N, T, S] of each pair of sentences, computed in batches of few shapes."""
    sides = [[[*ids, EOS] for ids in translator.subwords.encode(sentences)] for sentences in text]
    shapes: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(zip(*sides, strict=True)):
        shapes.setdefault(tuple(-(-len(ids) // 8) * 8 for ids in pair), []).append(index)
    weights = {}
    for shape, members in shapes.items():
        for first in range(0, len(members), 32):
            chunk = members[first : first + 32]
            source, target = ([side[index] for index in chunk] for side in sides)
            batch = padded_batch(source, target, 32, *shape)
            every = np.asarray(look(translator.task, translator.params, batch), np.float64)
            for row, index in enumerate(chunk):
                weights[index] = every[:, row, :, : len(target[row]), : len(source[row])]
    return [weights[index] for index in range(len(weights))]


def heat_map(translator: Translator, sentence: str) -> Row:
    """The mean weights [T, S] while a sentence is translated with 4 beams."""
    source, target = translated_ids(translator, sentence, SEARCHES["4 beams"])
    weights = look(translator.task, translator.params, padded_batch([source], [target]))
    rows, columns = ([*map(translator.subwords.label, ids)] for ids in (target, source))
    mean = np.asarray(weights[:, 0]).mean((0, 1)).round(3).tolist()
    return {"source": sentence, "rows": rows, "columns": columns, "weights": mean}


def heads(pairs: list[np.ndarray]) -> Row:
    """The mean largest weight of each head, and its entropy over that of uniform rows, [L, N]."""
    largest = [weights.max(-1) for weights in pairs]
    relative = [entropy(weights) / np.log(weights.shape[-1]) for weights in pairs]
    means = (np.concatenate(rows, axis=-1).mean(-1).round(4) for rows in (largest, relative))
    return dict(zip(("largest", "entropy"), (mean.tolist() for mean in means), strict=True))


def agreement(first: list[np.ndarray], second: list[np.ndarray]) -> Row:
    """The Jensen-Shannon divergence of two models' rows in nats, that of each from uniform rows,
    and how often both rows have the same largest weight.
    """
    rows = []
    for pair in zip(first, second, strict=True):
        one, other = (weights.mean((0, 1)) for weights in pair)
        uniform = np.full_like(one, 1 / one.shape[-1])
        same = one.argmax(-1) == other.argmax(-1)
        from_uniform = (divergence(weights, uniform) for weights in (one, other))
        rows.append(np.stack([divergence(one, other), same, *from_uniform]))
    mean = np.concatenate(rows, axis=-1).mean(-1).round(4).tolist()
    return {"divergence": mean[0], "same_largest": mean[1], "from_uniform": mean[2:]}


def entropy(weights: np.ndarray) -> np.ndarray:
    """The entropy of rows of weights, in nats."""
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)


def divergence(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence of rows, in nats."""
    return entropy((one + other) / 2) - (entropy(one) + entropy(other)) / 2


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """BLEU of the seeds, the later test sets, where attention looks, and which heads align."""
    found, spreading = [], 0
    first, *later = dict.fromkeys(column(rows, "test", part="seeds"))
    for score, bounds in LEAST.items():
        for search, least in bounds.items():
            text = f"{score}: BLEU of {first}, {search}, mean over seeds"
            found.append(Claim(text, _bleu(rows, score, first, search).mean(), least, 100))
        for test in later:
            lower = (_bleu(rows, score, first) - _bleu(rows, score, test)).mean()
            text = f"{score}: BLEU of {first} minus that of {test}, 4 beams, means over seeds"
            found.append(Claim(text, lower, -100, MOST_LOWER[test]))
        (arm,) = where(rows, part="arm", score=score)
        aligned = float(np.mean(np.array(arm["largest"]) >= ALIGNS))
        found.append(Claim(f"{score}: share of heads that align", aligned, 0.5, 1, TOPIC_7))
        spreading += int(np.sum(np.array(arm["entropy"]) >= SPREADS))
    deviation = max(_bleu(rows, score, first).std(ddof=1) for score in LEAST)
    ahead = [
        (_bleu(rows, "scaled", x) - _bleu(rows, "additive", x)).mean() for x in (first, *later)
    ]
    share, same = arm["divergence"] / min(arm["from_uniform"]), arm["same_largest"]  # additive's
    spread_text = "heads that spread, of both (a bound written after the run)"
    text = "scaled minus additive: BLEU, 4 beams, means over seeds, the"
    of_both = "scaled and additive:"
    return [
        *found,
        Claim(spread_text, spreading, 0, 0, TOPIC_7, denies=True),
        Claim("deviation of BLEU over seeds, 4 beams, larger of both", deviation, 0, 1),
        Claim(f"{text} least of all tests", min(ahead), 0, 2),
        Claim(f"{text} most of all tests", max(ahead), 0, 2),
        Claim(f"{of_both} divergence of their rows over that from uniform rows", share, 0, 0.5),
        Claim(f"{of_both} share of rows with the same largest weight", same, 0.6, 1),
    ]


def _bleu(rows: list[Row], score: str, test: str, search: str = "4 beams") -> np.ndarray:
    """BLEU of each seed."""
    return np.array(column(rows, "bleu", part="seeds", score=score, test=test, search=search))


def table(rows: list[Row]) -> str:
    """The arms with one seed, and BLEU over seeds."""
    arms: list[list[Any]] = []
    for arm in where(rows, part="arm"):
        largest, epoch = np.ravel(arm["largest"]), arm["minutes"] * arm["epoch"] / arm["steps"]
        cells = [arm["score"], f"{arm['steps']:,}", f"{arm['minutes']:.0f}", f"{epoch:.1f}"]
        cells += [f"{arm['greedy']:.1f}", f"{arm['4 beams']:.1f} ± {arm['half_width']:.1f}"]
        cells += [arm["p"] or "", f"{np.sum(largest >= ALIGNS)} of {largest.size}"]
        if "divergence" in arm and arms:  # the first is what the others are compared with
            cells += [f"{arm['same_largest']:.0%}", arm["divergence"]]
        arms.append(cells + [""] * (10 - len(cells)))
    pair, tests = [arm[0] for arm in arms[:2]], []
    seeds = where(rows, part="seeds", score=pair[0], seed=0)
    for test, search in ((row["test"], row["search"]) for row in seeds):
        first, second = (_bleu(rows, score, test, search) for score in pair)
        both = (spread(bleu.tolist()) for bleu in (first, second, first - second))
        tests.append([test, search, *both])
    head = ["cross attention", "batches", "minutes", "minutes per epoch", "BLEU, greedy", "4 beams"]
    head += [f"p of no difference from {pair[0]}", "heads that align"]
    head.append(f"rows with the same largest weight as {pair[0]}")
    head.append(f"divergence from {pair[0]}'s rows, nats")
    note = f"{seeds[0]['test']}, seed 0. ± is half of the 95 % interval over sentences; it and p"
    note += f" come from a paired bootstrap, with 4 beams. BLEU is `{seeds[0]['signature']}`."
    of_seeds = "all seeds, ± one standard deviation", "search", *pair, "difference"
    return "\n\n".join((note, markdown(head, arms), markdown(of_seeds, tests)))


def plot(rows: list[Row]) -> dict[str, Any]:
    """Heat maps of the first two scores."""
    pair = column(rows, "score", part="arm")[:2]
    maps = zip(*(where(rows, part="map", score=score) for score in pair), strict=True)
    panels = {
        f"{row['score']}, sentence {index}": (np.array(row["weights"]), row["rows"], row["columns"])
        for index, drawn in enumerate(maps, start=1)
        for row in drawn
    }
    axes = {"ylabel": "subword written (query)", "xlabel": "source subword (key)"}
    heatmaps = plotting.weight_heatmaps(panels, columns=2, size=3.6, **axes)
    for ax in heatmaps.axes[: len(panels)]:
        ax.set_aspect("auto")  # panels of one size, whatever the lengths of the sentences
        ax.tick_params(labelsize=8)
    return {"translation_heatmaps": heatmaps}


if __name__ == "__main__":
    main(__name__)
