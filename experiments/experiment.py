"""What experiments share: numbers are held to what was expected of them, and written with figures.

An experiment is a module with

    Config                      a frozen dataclass: all settings and their defaults, `results` last
    QUICK                       settings with which it takes a minute or two, for a look
    CAPTIONS                    {figure's file stem: what is to be seen in it, in words}
    run(config) -> numbers      JSON; computes, and writes nothing
    plot(numbers) -> figures    {file stem: figure}, from the numbers alone
    missing(config)             if it needs data of the user's: "", or what is not there
    expectations(numbers)       what the source says and what came out, as `Expectation`s

and `conduct` runs it from a command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import environment, make_folder, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from command_line import run_command as run_command

JSON = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One number that was expected, and came out or did not.

    Attributes:
        claim: what is said, in a sentence.
        source: what the source has, as it prints it; "" where it has nothing.
        measured: our number.
        low: smallest number that bears the claim out.
        high: largest.
        tolerance: where these bounds come from.
    """

    claim: str
    source: str
    measured: float
    low: float
    high: float
    tolerance: str

    @property
    def met(self) -> bool:
        return self.low <= self.measured <= self.high  # never if it is NaN

    @property
    def bounds(self) -> str:
        if math.isinf(self.high):
            return f"at least {self.low:.6g}"
        if math.isinf(self.low):
            return f"at most {self.high:.6g}"
        return f"{self.low:.6g} to {self.high:.6g}"

    def __str__(self) -> str:
        mark = "ok  " if self.met else "MISS"
        return f"{mark} {self.claim}: {self.measured:.6g} ({self.bounds})"


def near(
    claim: str, source: str, measured: float, expected: float, within: float, tolerance: str
) -> Expectation:
    """A number that should be `expected`, give or take `within`."""
    low, high = expected - within, expected + within
    return Expectation(claim, source, float(measured), low, high, tolerance)


def numbers_path(results: Path, name: str) -> Path:
    """Where an experiment's numbers are."""
    return results / f"{name}.json"


def significant(numbers: Any) -> Any:
    """As lists of floats of five digits; dicts of them too."""
    if isinstance(numbers, dict):
        return {name: significant(value) for name, value in numbers.items()}
    array = np.asarray(numbers)
    return [significant(part) for part in array] if array.ndim else float(f"{float(array):.5g}")


def conduct(
    name: str,
    config: Any,
    run: Callable[[Any], JSON],
    plot: Callable[[JSON], Mapping[str, Figure]],
    expectations: Callable[[JSON], Sequence[Expectation]],
    *,
    report: Callable[[JSON], str] | None = None,
) -> int:
    """Runs, writes NAME.json and the figures to `config.results`, and says what was found.

    Returns:
        0, or 1 if an expectation is not met that the settings are made for: the default ones.
    """
    make_folder("results", config.results)
    numbers = {
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        "environment": environment(),
        **run(config),
    }
    path = numbers_path(config.results, name)
    write_json(path, numbers)
    print(path)
    for stem, figure in plot(numbers).items():
        print(plotting.save(figure, config.results / f"{stem}.png"))
    if report is not None:
        print(report(numbers))
    found = expectations(numbers)
    for expectation in found:
        print(expectation)
    if all(expectation.met for expectation in found):
        return 0
    if _numbers_of(config) == _numbers_of(type(config)()):
        return 1
    print("settings are not the default ones, which the expectations are made for")
    return 0


def _numbers_of(config: Any) -> JSON:
    """The settings but for folders."""
    return {k: v for k, v in dataclasses.asdict(config).items() if not isinstance(v, Path)}
