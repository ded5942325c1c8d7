"""The effect of a padding mask on the peer: the GRU of the published comparison, with and without.

The published model is trained on padded batches without a mask, and tested on single strings, which
have no padding. This benchmark trains it that way, and again with padding masked in its attention.
"""

from __future__ import annotations

import dataclasses
import importlib.util

from attention_jax.tasks.reversal.task import ReversalConfig
from benchmarks.measure import INSTALL, JSON, Options, Report, print_progress

_LENGTHS = (3, 5, 7, 8, 10)
_STRINGS = 1000
_COLUMNS = {
    "score": ("score", ""),
    "model": ("model", ""),
    **{f"length {length}": (str(length), ".3f") for length in _LENGTHS},
}


def check(options: Options) -> None:
    """Raises ValueError if PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"gru-padding needs PyTorch: {INSTALL}")


def run(options: Options) -> list[Report]:
    """Trains the peer twice with each score, one seed, with the recipe of our training."""
    from benchmarks import pytorch_gru_reverser

    config = ReversalConfig()
    rows: list[JSON] = []
    for score in options.scores:
        for mask_padding in (False, True):
            name = "padding masked" if mask_padding else "padding seen, as published"
            print_progress(f"gru-padding, {score}: {name}")
            training = pytorch_gru_reverser.training_like_ours(
                score, config, mask_padding=mask_padding
            )
            training.threads = 1  # such small operations gain nothing from more
            training.steps(config.loop.steps)
            right = {str(n): training.letters_right(n, _STRINGS) for n in _LENGTHS}
            rows.append({"score": score, "model": name, **right})
    report = Report(
        name="gru-padding",
        title="PyTorch GRU on reversal: share of correct letters, teacher-forced, without padding",
        columns=_COLUMNS,
        rows=rows,
        settings={"config": dataclasses.asdict(config), "strings": _STRINGS},
        notes=[f"one seed of {config.loop.steps:,} steps per row"],
    )
    return [report]
