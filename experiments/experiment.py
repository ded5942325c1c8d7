"""The frame of every experiment: run it, write numbers and figures, check them against the source.

An experiment is a module with

    Config                      a frozen dataclass: every setting and its default, `results` last
    QUICK                       a Config that takes a minute or two, for a first look
    CAPTIONS                    {file stem of a figure: what the figure shows, in words}
    run(config) -> numbers      computes the numbers, as JSON; writes nothing
    plot(numbers) -> figures    {file stem: figure}, drawn from the numbers alone
    expectations(numbers)       `Expectation`s: what the source says, and what was measured
    report(numbers) -> text     optional: tables or sentences to print
    missing(config) -> reason   optional: which data the user has yet to bring; "" for none

and ends with

    if __name__ == "__main__":
        run_experiment(__name__)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import environment, make_folder, write_json
from attention_jax.training.metrics import mean_and_deviation

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from command_line import run_command

JSON = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A claim about one number, with the bounds within which the claim holds.

    Attributes:
        claim: the claim, in a few words.
        source: the source's number or words; "" if it has none.
        measured: our number.
        low: the smallest number that supports the claim.
        high: the largest.
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
        """Whether the measured number is within the bounds; False for NaN."""
        return self.low <= self.measured <= self.high

    @property
    def bounds(self) -> str:
        """The bounds in words."""
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
    """Returns the `Expectation` that a number is `expected`, plus or minus `within`."""
    low, high = expected - within, expected + within
    return Expectation(claim, source, float(measured), low, high, tolerance)


def run_experiment(module: str) -> None:
    """Runs an experiment from the command line; the fields of its Config are the options.

    Args:
        module: the experiment's `__name__`.
    """
    experiment = sys.modules[module]
    run_command(experiment.Config, functools.partial(conduct, experiment))


def conduct(experiment: ModuleType, config: Any) -> int:
    """Runs an experiment, writes NAME.json and the figures to `config.results`, and prints checks.

    Returns:
        1 if an expectation is missed with the default settings, for which they are made; else 0.

    Raises:
        ValueError: if data is missing, or if `config.results` cannot be written.
    """
    if hasattr(experiment, "missing") and (reason := experiment.missing(config)):
        raise ValueError(reason)
    make_folder("results", config.results)
    numbers = {
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        "environment": environment(),
        **experiment.run(config),
    }
    path = numbers_path(config.results, _name(experiment))
    write_json(path, numbers)
    print(path)
    for stem, figure in experiment.plot(numbers).items():
        print(plotting.save(figure, config.results / f"{stem}.png"))
    if hasattr(experiment, "report"):
        print(experiment.report(numbers))
    checks = experiment.expectations(numbers)
    for check in checks:
        print(check)
    if all(check.met for check in checks):
        return 0
    if _without_folders(config) == _without_folders(type(config)()):
        return 1
    print("settings are not the default ones, which the expectations are made for")
    return 0


def _name(experiment: ModuleType) -> str:
    if experiment.__name__ == "__main__":
        return Path(str(experiment.__file__)).stem
    return experiment.__name__


def _without_folders(config: Any) -> JSON:
    """The settings that numbers depend on."""
    return {k: v for k, v in dataclasses.asdict(config).items() if not isinstance(v, Path)}


def numbers_path(results: Path, name: str) -> Path:
    """Returns the file of an experiment's numbers."""
    return results / f"{name}.json"


def exit_if_interrupted(status: int) -> None:
    """Exits with `status` if a signal has stopped a training; 0 means that none has."""
    if status:
        print("stopped by a signal; the same command goes on from here", file=sys.stderr)
        sys.exit(status)


# --- numbers for JSON, and for sentences ---


def rounded(numbers: Any, decimals: int = 5) -> Any:
    """Returns a number or an array as floats, or nested lists of them, for JSON."""
    return np.asarray(numbers, np.float64).round(decimals).tolist()


def significant(numbers: Any) -> Any:
    """Returns numbers, arrays or dicts of them with five significant digits, for JSON."""
    if isinstance(numbers, dict):
        return {name: significant(value) for name, value in numbers.items()}
    array = np.asarray(numbers)
    return [significant(part) for part in array] if array.ndim else float(f"{float(array):.5g}")


def spread(by_seed: Sequence[float] | np.ndarray, digits: int = 3) -> str:
    """Returns "mean ± deviation" over seeds; 1200 rather than 1.2e+03."""
    mean, deviation = (
        float(f"{float(number):.{count}g}")
        for number, count in zip(mean_and_deviation(by_seed), (digits, 1), strict=True)
    )
    return f"{mean:g} ± {deviation:g}"
