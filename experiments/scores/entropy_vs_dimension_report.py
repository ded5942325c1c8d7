"""The report of entropy_vs_dimension.py, written from its numbers alone."""

from __future__ import annotations

import math

from experiments.experiment import JSON, spread
from experiments.scores.entropy_vs_dimension_slopes import FALLING_DIMS, differences, slopes

DAY_11_KEYS, DAY_11_DIM = 10, 512
_COLUMNS = (1, 16, 64, 256, 1024, 4096)


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    parts = [_entropies(numbers), _claims(numbers), _faster(numbers), _day_11(numbers)]
    return "\n\n".join(part for part in parts if part)


def _entropies(numbers: JSON) -> str:
    config = numbers["config"]
    columns = [n for n, dim in enumerate(config["dims"]) if dim in _COLUMNS]
    dims = " | ".join(f"d_k = {config['dims'][n]:,}" for n in columns)
    lines = [
        f"Mean entropy in nats over {config['samples']:,} random queries:\n",
        f"| keys T | log T | score | {dims} |",
        f"| --- | --- | --- |{' --- |' * len(columns)}",
    ]
    for keys, by_score in numbers["sweeps"].items():
        for score, measures in by_score.items():
            entropies = " | ".join(f"{measures['entropy']['mean'][n]:.3f}" for n in columns)
            lines.append(f"| {keys} | {math.log(int(keys)):.2f} | {score} | {entropies} |")
    return "\n".join(lines)


def _claims(numbers: JSON) -> str:
    sentences = []
    if "dot" in numbers["day_11"]:
        sentences.append(
            "Raw entropy (dot) goes to 0 as the source says, as 1 / √d_k: at large d_k it is"
            " (π²/6) m_T E[1/|q|], where m_T is the expected largest of T standard normal numbers."
        )
    if "scaled" in numbers["more_keys"]:
        config, distances = numbers["config"], numbers["more_keys"]["scaled"]
        of_keys = ", ".join(
            f"{math.log(count) - mean:.2f} (T = {count:,})"
            for count, mean in zip(config["more_keys"], distances["mean"], strict=True)
        )
        sentences.append(
            "Scaled entropy does not depend on d_k from 16 on, but it does not hug log T: it stays"
            f" below by {of_keys} nats at d_k = {config['more_keys_dim']}. The limit is half a nat,"
            " log T - 1/2 + (1 + e) / 2T."
        )
    return " ".join(sentences)


def _faster(numbers: JSON) -> str:
    found = differences(numbers)
    if not found:
        return ""
    config = numbers["config"]
    few, many = min(config["keys"]), max(config["keys"])
    falls = {keys: slopes(numbers, keys) for keys in (few, many)}
    in_nats, in_shares = (
        " and ".join(f"{spread(fall / unit(keys))} (T = {keys})" for keys, fall in falls.items())
        for unit in (lambda keys: 1, lambda keys: math.log(keys) / 100)
    )
    (nats, nats_half), (share, share_half) = found.values()
    return (
        f'Exercise 38.3 says that raw entropy "crashes faster" for T = {many} than for T = {few}.'
        f" From d_k = {FALLING_DIMS[0]} to {FALLING_DIMS[1]} it falls per doubling of d_k by"
        f" {in_nats} nats, a difference of {nats:.3f} ± {nats_half:.3f} (95 % interval), and by"
        f" {in_shares} % of log T, a difference of {100 * share:.2f} ± {100 * share_half:.2f}"
        " points. At large d_k both fall as 1 / √d_k."
    )


def _day_11(numbers: JSON) -> str:
    by_score = numbers["day_11"]
    if "dot" not in by_score:
        return ""
    return (
        "Day 11's line for the entropy, -(w log w).sum(), is NaN in"
        f" {100 * by_score['dot']['nan_in_formula']:.0f} % of the raw draws at d_k ="
        f" {DAY_11_DIM}, where a weight underflows to 0. The largest of {DAY_11_KEYS} raw weights"
        f" is {by_score['dot']['max_weight']['mean']:.2f} there on average."
    )
