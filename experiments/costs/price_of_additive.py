"""When is additive attention worth its price? Exercise 38.6 of the chapter, from result files.

Every row compares additive with scaled dot at equal sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import catalogue
from experiments.experiment import JSON, numbers_path, spread

_BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks" / "results"
_SCORES = ("additive", "scaled")


def price_of_additive(ledger: JSON) -> str:
    """Returns the price of additive attention and what it buys, as tables.

    Args:
        ledger: the numbers of complexity_ledger.py; the others are read from their files.
    """
    long = _long()
    share = long["scaled"] / long["additive"]
    return "\n".join(
        [
            "*The price.*",
            "",
            "| on a CPU | additive | scaled dot |",
            "| --- | --- | --- |",
            *_of_ledger(ledger),
            *_of_times(),
            "",
            "*What it buys, and what it does not.*",
            "",
            "| measured | additive | scaled dot |",
            "| --- | --- | --- |",
            *_of_models(),
            "",
            "Additive's logits are at most sum |v|, however large the inputs are, so that its"
            " softmax stays soft where that of dot products becomes one-hot. Its queries and keys"
            " may differ in size. It is worth its price for short sequences, for tokens whose scale"
            " is not under control, and for queries and keys of different kinds. For long sequences"
            f" of normalised tokens, scaled dot takes {100 * share:.0f} % of its time.",
        ]
    )


def _of_ledger(ledger: JSON) -> Iterator[str]:
    scores, length = ledger["scores"], ledger["config"]["lengths"][-1]
    parameters = (f"{scores[score]['parameters']:,}" for score in _SCORES)
    yield _row(f"parameters at d = {ledger['config']['dim']}", parameters)
    for form, name in (("naive", "the formula as written"), ("tiled", "tiled")):
        held = (scores[score]["memory"][form]["backward"]["bytes"][-1] for score in _SCORES)
        yield _row(
            f"MiB of temporary memory with all gradients, T = S = {length:,},"
            f" d = {ledger['config']['dim']}, {name}",
            (f"{each / 2**20:,.1f}" for each in held),
        )


def _of_times() -> Iterator[str]:
    benchmarks = _benchmarks("benchmark")
    short = _by_score(benchmarks["attention"], contestant="ours", setting_starts="B64 N1 T9 S8 D64")
    yield _row(
        "ms forward and backward, 64 sequences, T = 9, S = 8, d = 64",
        (f"{short[score]['milliseconds']:.2f}" for score in _SCORES),
    )
    long = _long()
    yield _row(
        "ms forward and backward, T = S = 8,192, d = 64",
        (f"{long[score]:,.0f}" for score in _SCORES),
    )
    decoding = _by_score(benchmarks["decoding"], heads=1)
    yield _row(
        "ms to decode 64 sequences of 64 tokens, d = 64",
        (f"{decoding[score]['milliseconds']:.1f}" for score in _SCORES),
    )
    reversal = _by_score(benchmarks["reversal"], model="ours")
    yield _row(
        "training steps per second, reversal model, 5 seeds at once",
        (f"{reversal[score]['steps_per_second']:.0f}" for score in _SCORES),
    )
    translation = _by_score(_benchmarks("translation_speed")["translation"], variant="ours")
    yield _row(
        "ms per training step, translator",
        (f"{translation[score]['milliseconds']:.0f}" for score in _SCORES),
    )


def _long() -> dict[str, float]:
    """Milliseconds of global attention, which windows are compared with: 8,192 tokens, d = 64."""
    rows = _by_score(_benchmarks("benchmark")["local"], attention="local-m", radius=64)
    assert all(rows[score]["shape"].startswith("B1 N1 T=S=8192 D64") for score in _SCORES)
    return {score: rows[score]["global_milliseconds"] for score in _SCORES}


def _of_models() -> Iterator[str]:
    gradients = _numbers("gradient_analysis")
    kernels, scale = gradients["kernels"], gradients["config"]["kernel_scales"][-1]
    yield _row(
        f"entropy of the weights with kernels {scale:g} times as large, nats (gradient_analysis)",
        (f"{kernels[score]['entropy']['mean'][-1]:.2g}" for score in _SCORES),
    )
    curvature, steps = gradients["curvature"], gradients["config"]["curvature_steps"]
    yield _row(
        f"loss of the reversal model after {steps} steps (gradient_analysis)",
        (spread(curvature[score]["loss"][-1]) for score in _SCORES),
    )
    trained = _numbers("reversal_comparison")["scores"]
    worst = []
    for score in _SCORES:
        exact = trained[score]["accuracy"]["free_running_exact"]
        worst.append(np.mean([exact[str(length)] for length in range(3, 9)], axis=0).min())
    yield _row(
        "strings of 3 to 8 letters reversed, worst seed (reversal_comparison)",
        (f"{100 * share:.2f} %" for share in worst),
    )
    translation = _numbers("translation_seeds")
    for split in translation["config"]["corpus"]["tests"]:
        bleu = (
            translation["scores"][score]["tests"][split]["4 beams"]["bleu"] for score in _SCORES
        )
        yield _row(f"BLEU of {split}, 4 beams (translation_seeds)", map(spread, bleu))


def _row(name: str, cells: Iterator[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _benchmarks(name: str) -> JSON:
    content: JSON = json.loads((_BENCHMARKS / f"{name}.json").read_text())["benchmarks"]
    return content


def _numbers(name: str) -> JSON:
    content: JSON = json.loads(numbers_path(catalogue.folder_of(name), name).read_text())
    return content


def _by_score(benchmark: JSON, *, setting_starts: str = "", **values: Any) -> JSON:
    """The row of each score among those with the given values."""
    return {
        row["score"]: row
        for row in benchmark["rows"]
        if row.get("setting", "").startswith(setting_starts)
        and all(row[name] == value for name, value in values.items())
    }
