"""What the numbers of translation_comparison.py say: claims, tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.experiment import JSON, Expectation
from experiments.translation.translation_trainings import LEAST, MOST_BEHIND

# BLEU of a prototype of this project in plain JAX, for scaled dot.
PROTOTYPE = {"greedy": 38.4, "4 beams": 40.0}
ALIGNS = 0.5  # least mean of the largest weights of a head that aligns
SPREADS = 0.9  # least mean entropy, over that of uniform rows, of a head that spreads


def expectations(numbers: JSON) -> list[Expectation]:
    """BLEU: scaled dot against the prototype, others 2 below ours. Where attention looks."""
    split = numbers["config"]["corpus"]["tests"][0]
    checks = [
        Expectation(
            f"{score}: BLEU of {split}, {search}",
            f"{PROTOTYPE[search]:.1f}" if score == "scaled" else "",
            numbers["arms"][score]["tests"][split][search]["bleu"][0],
            least if score == "scaled" else least - MOST_BEHIND, 100.0,
            "a usable translator" if score == "scaled" else "2 below scaled dot's",
        )
        for score in numbers["config"]["scores"][:2]
        for search, least in LEAST.items()
    ]  # fmt: skip
    first, second = numbers["config"]["scores"][:2]
    names = f"{first} and {second}"
    compared = numbers["agreement"][names]
    of_uniform = compared["divergence"] / min(compared["divergence_from_uniform"])
    checks += [
        Expectation(
            f"{names}: divergence of their rows over that from uniform rows", "",
            of_uniform, 0.0, 0.5, "they look at the same subwords",
        ),
        Expectation(
            f"{names}: share of rows with the same largest weight", "",
            compared["same_largest"], 0.6, 1.0, "more than by chance among 16 subwords",
        ),
    ]  # fmt: skip
    for score in (first, second):
        arm = numbers["arms"][score]
        sharpness, spread = (np.array(arm["heads"][name]) for name in ("sharpness", "spread"))
        checks += [
            Expectation(
                f"{score}: share of heads that align", "topic 7: some heads align, some spread",
                float(np.mean(sharpness >= ALIGNS)), 0.5, 1.0, "half of them",
            ),
            Expectation(
                f"{score}: heads that spread", "topic 7: some heads align, some spread",
                float(np.sum(spread >= SPREADS)), 0.0, 0.0, "none did", contradicts=True,
            ),
            Expectation(
                f"{score}: error of the rollout's row sums", "1",
                arm["rollout"]["largest_row_sum_error"], 0.0, 1e-5, "float32",
            ),
        ]  # fmt: skip
    return checks


def report(numbers: JSON) -> str:
    """Returns the settings, BLEU and chrF, and what the cross attentions look at."""
    return "\n\n".join(
        "\n".join(part)
        for part in (
            _settings(numbers),
            _tests(numbers),
            _validation(numbers["arms"]),
            *(_agreement(*pair) for pair in numbers["agreement"].items()),
            _heads(numbers["arms"]),
            _differences(numbers),
        )
    )


def _settings(numbers: JSON) -> Iterator[str]:
    config = numbers["config"]
    recipe, corpus = config["recipe"], config["corpus"]
    yield (
        f"Models of {recipe['layers']} + {recipe['layers']} layers of width {recipe['dim']} with"
        f" {recipe['num_heads']} heads translate {corpus['source_language']} to"
        f" {corpus['target_language']}, with {recipe['vocabulary_size']:,} joint subwords. They"
        f" train for {recipe['steps']:,} batches of at most {recipe['batch_tokens']:,} subwords,"
        f" with dropout {recipe['dropout_rate']:g}"
        ". Only the score of the cross attention differs: all runs see the same batches. There is"
        " one seed; translation_seeds has more."
    )
    if config["equal_minutes"]:
        first, second = config["scores"][:2]
        steps = numbers["arms"][f"{second}, equal minutes"]["training"]["steps"]
        yield (
            f"{second.capitalize()} is also trained for {steps:,} batches: as many as fit, at the"
            f" speed of its full training, into the minutes of {first}."
        )


def _tests(numbers: JSON) -> Iterator[str]:
    split = numbers["config"]["corpus"]["tests"][0]
    first = numbers["config"]["scores"][0]
    yield f"Test set {split}, detokenised and cased:"
    yield ""
    yield (
        f"| cross attention | BLEU, greedy | BLEU, 4 beams | chrF, 4 beams | p, against {first} |"
        " minutes of training |"
    )
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, arm in numbers["arms"].items():
        test, drawn = arm["tests"][split], numbers["bootstrap"][name]
        p_value = "" if drawn["p_value"] is None else f"{drawn['p_value']:.3f}"
        yield (
            f"| {name} | {test['greedy']['bleu'][0]:.1f} |"
            f" {test['4 beams']['bleu'][0]:.1f} ± {drawn['half_width']:.1f} |"
            f" {test['4 beams']['chrf'][0]:.1f} | {p_value} | {arm['training']['minutes'][0]:.0f} |"
        )
    bleu, chrf = test["greedy"]["signatures"]
    yield ""
    yield (
        "± is half of the 95 % interval, and p the chance of a difference at least as large if both"
        " translated equally well, by sacrebleu's paired bootstrap over test sentences (1,000"
        " draws). They say nothing about how much two seeds differ. Minutes are those of this run,"
        f" on the cores that it had. BLEU is `{bleu}`, chrF is `{chrf}`."
    )


def _validation(arms: JSON) -> Iterator[str]:
    validated = next(iter(arms.values()))["training"]["validated"]
    yield (
        "| validation BLEU, greedy, after batches |"
        f" {' | '.join(f'{step:,}' for step in validated)} |"
    )
    yield f"| --- |{' --- |' * len(validated)}"
    for name, arm in arms.items():
        if arm["training"]["validated"] == validated:
            cells = [f"{bleu:.1f}" for (bleu,) in arm["training"]["validation_bleu"]]
            yield f"| {name} | {' | '.join(cells)} |"


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


def _differences(numbers: JSON) -> Iterator[str]:
    """Sentences that the first two scores translate differently."""
    found = numbers["differences"]
    if not found:
        return
    first, second = numbers["config"]["scores"][:2]
    yield (
        f"{found[0]['of']} short test sentences are translated differently by"
        f" {first} and {second}, with 4 beams. Below are, by chrF of the sentence, the one where"
        f" {first} is ahead by most, the one where {second} is, and the one in the middle:"
    )
    yield ""
    yield f"| sentence | reference | {first} | {second} | chrF |"
    yield "| --- | --- | --- | --- | --- |"
    for one in found:
        cells = [one["source"], one["reference"], *one["answers"]]
        scores = " and ".join(f"{score:.0f}" for score in one["chrf"])
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} | {scores} |"
