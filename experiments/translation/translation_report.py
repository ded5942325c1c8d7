"""What the numbers of translation_comparison.py say: claims, tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation

# BLEU of a prototype of this project in plain JAX, and what we ask for, both for scaled dot.
PROTOTYPE = {"greedy": 38.4, "4 beams": 40.0}
LEAST = {"greedy": 37.0, "4 beams": 38.0}
ALIGNS = 0.5  # least mean of the largest weights of a head that aligns
SPREADS = 0.9  # least mean entropy, over that of uniform rows, of a head that spreads


def expectations(numbers: JSON) -> list[Expectation]:
    """BLEU of every score: for scaled dot against the prototype, for others 2 below ours."""
    split = numbers["config"]["tests"][0]
    return [
        Expectation(
            f"{score}: BLEU of {split}, {search}",
            f"{PROTOTYPE[search]:.1f}" if score == "scaled" else "",
            float(np.mean(arm["tests"][split][search]["bleu"])),
            least if score == "scaled" else least - 2, 100.0,
            "a usable translator" if score == "scaled" else "2 below scaled dot's",
        )
        for score, arm in numbers["arms"].items()
        for search, least in LEAST.items()
    ]  # fmt: skip


def report(numbers: JSON) -> str:
    """Returns the settings, BLEU and chrF, and what the cross attentions look at."""
    return "\n\n".join(
        "\n".join(part)
        for part in (
            _settings(numbers["config"]),
            _tests(numbers),
            _validation(numbers["arms"]),
            *(_agreement(*pair) for pair in numbers["agreement"].items()),
            _heads(numbers["arms"]),
        )
    )


def _settings(config: JSON) -> Iterator[str]:
    seeds = "One seed" if config["seeds"] == 1 else f"{config['seeds']} seeds"
    yield (
        f"Models of {config['layers']} + {config['layers']} layers of width {config['dim']} with"
        f" {config['num_heads']} heads translate {config['source_language']} to"
        f" {config['target_language']}, with {config['vocabulary_size']:,} joint subwords. They"
        f" train for {config['steps']:,} batches of at most {config['batch_tokens']:,} subwords,"
        f" with dropout {config['dropout_rate']:g}. Only the score of the cross attention differs:"
        f" all runs see the same batches. {seeds} per score."
    )
    if config["seeds"] == 1:
        yield "One seed says nothing about how much two runs of the same score differ."


def _tests(numbers: JSON) -> Iterator[str]:
    split = numbers["config"]["tests"][0]
    yield f"Test set {split}, detokenised and cased:"
    yield ""
    yield "| cross attention | BLEU, greedy | BLEU, 4 beams | chrF, 4 beams | training, minutes |"
    yield "| --- | --- | --- | --- | --- |"
    for score, arm in numbers["arms"].items():
        test = arm["tests"][split]
        cells = [
            _over_seeds(test[search][metric])
            for search, metric in (("greedy", "bleu"), ("4 beams", "bleu"), ("4 beams", "chrf"))
        ]
        yield f"| {score} | {' | '.join(cells)} | {arm['training']['minutes']} |"
    bleu, chrf = test["greedy"]["signatures"]
    yield ""
    yield (
        f"BLEU is `{bleu}`, chrF is `{chrf}`. The minutes are of one core each, beside other work."
        " [The time of one step](../../scripts/README.md#speed-of-the-translator) was measured with"
        " nothing else running."
    )


def _validation(arms: JSON) -> Iterator[str]:
    validated = [f"{step:,}" for step in next(iter(arms.values()))["training"]["validated"]]
    yield f"| validation BLEU, greedy, after batches | {' | '.join(validated)} |"
    yield f"| --- |{' --- |' * len(validated)}"
    for score, arm in arms.items():
        cells = [_over_seeds(values) for values in arm["training"]["validation_bleu"]]
        yield f"| {score} | {' | '.join(cells)} |"


def _agreement(names: str, comparison: JSON) -> Iterator[str]:
    """Compares two cross attentions: means over layers and heads, the right translation given."""
    yield f"| {names} | rows | Jensen-Shannon divergence, nats | same largest weight |"
    yield "| --- | --- | --- | --- |"
    for kind, row in ({"all": comparison} | comparison["kinds"]).items():
        yield f"| {kind} | {row['rows']:,} | {row['divergence']:.3f} | {row['same_largest']:.0%} |"
    first, second = names.split(" and ")
    uniform = comparison["divergence_from_uniform"]
    diagonal = [f"{100 * share:.0f} %" for share in comparison["largest_on_the_diagonal"]]
    nearest = [int(np.argmin(row)) + 1 for row in comparison["divergence_of_layers"]]
    layers = ", ".join(f"{layer} to {near}" for layer, near in enumerate(nearest, 1))
    yield ""
    yield (
        "Weights are means over layers and heads while the right translation is given. Their"
        f" divergence from uniform weights is {uniform[0]:.2f} nats for {first} and"
        f" {uniform[1]:.2f} for {second}. The largest weight of a row lies on the diagonal in"
        f" {diagonal[0]} and {diagonal[1]} of the rows. The nearest layer of {second} to each layer"
        f" of {first}: {layers}."
    )


def _heads(arms: JSON) -> Iterator[str]:
    yield "| cross attention | heads | align | spread | of its own subword |"
    yield "| --- | --- | --- | --- | --- |"
    for score, arm in arms.items():
        sharpness, spread = (np.array(arm["heads"][name]) for name in ("sharpness", "spread"))
        yield (
            f"| {score} | {sharpness.size} | {int((sharpness >= ALIGNS).sum())}"
            f" | {int((spread >= SPREADS).sum())} | {arm['rollout']['of_its_subword']:.0%} |"
        )
    yield ""
    yield (
        f"A head aligns if its largest weights have a mean of at least {ALIGNS}, and spreads if its"
        f" entropy is at least {SPREADS} of that of uniform rows. The last column follows the"
        " position that the last layer looks at most through the encoder by rollout: the weight"
        " that its own subword has there."
    )


def _over_seeds(values: list[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.1f}" + (f" ± {deviation:.1f}" if len(values) > 1 else "")
