"""The frame of every experiment: run it, write numbers and figures, check them against the source.

An experiment is a module with

    Config                      a frozen dataclass: every setting and its default
    QUICK                       a Config that takes a minute or two, for a first look
    CAPTIONS                    {file stem of a figure: what the figure shows, in words}
    run(config) -> numbers      computes the numbers, as JSON; writes nothing
    plot(numbers) -> figures    {file stem: figure}, drawn from the numbers alone
    expectations(numbers)       `Expectation`s: what the source says, and what was measured
    report(numbers) -> text     what was found, as Markdown, with its numbers read from `numbers`
    missing(config) -> reason   optional: which data the user has yet to bring; "" for none

and ends with

    if __name__ == "__main__":
        run_experiment(__name__)
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import tyro

from attention_jax.reports import plotting
from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import check_folder, make_folder, write_json
from attention_jax.training.metrics import mean_and_deviation

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from command_line import ScoreNames as ScoreNames
from command_line import run_command

EXPERIMENTS = Path(__file__).parent
JSON = dict[str, Any]
Config = TypeVar("Config")
# What it means for the source that a claim is met: its number comes out, or it does not and ours
# does, or there is no source.
Verdict = Literal["reproduced", "contradicted", "ours"]
SCHEMA = 2  # of result files


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
        contradicts: whether the claim denies what the source says.
    """

    claim: str
    source: str
    measured: float
    low: float
    high: float
    tolerance: str
    contradicts: bool = False

    def __post_init__(self) -> None:
        if self.contradicts and not self.source:
            raise ValueError(f"source must say what the claim {self.claim!r} contradicts")

    @property
    def met(self) -> bool:
        """Whether the measured number is within the bounds; False for NaN."""
        return self.low <= self.measured <= self.high

    @property
    def verdict(self) -> Verdict | Literal["MISS"]:
        """What the number says about the source; "MISS" if it is outside the bounds."""
        if not self.met:
            return "MISS"
        if not self.source:
            return "ours"
        return "contradicted" if self.contradicts else "reproduced"

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        if math.isinf(self.high):
            return f"at least {self.low:.6g}"
        if math.isinf(self.low):
            return f"at most {self.high:.6g}"
        return f"{self.low:.6g} to {self.high:.6g}"

    def __str__(self) -> str:
        return f"{self.verdict:12} {self.claim}: {self.measured:.6g} ({self.bounds})"

    def to_json(self) -> JSON:
        """The claim and its verdict, for a result file; a bound that is infinite is None."""
        fields = dataclasses.asdict(self)
        bounds = {name: fields[name] if math.isfinite(fields[name]) else None for name in _BOUNDS}
        return {**fields, **bounds, "verdict": self.verdict}


_BOUNDS = ("measured", "low", "high")


def near(
    claim: str,
    source: str,
    measured: float,
    expected: float,
    within: float,
    tolerance: str,
    *,
    contradicts: bool = False,
) -> Expectation:
    """Returns the `Expectation` that a number is `expected`, plus or minus `within`."""
    low, high = expected - within, expected + within
    return Expectation(claim, source, float(measured), low, high, tolerance, contradicts)


def verdicts(checks: Sequence[Expectation]) -> str:
    """Returns how often each verdict occurs: "7 reproduced, 2 ours, 1 MISS"."""
    found = [check.verdict for check in checks]
    kinds = ("reproduced", "contradicted", "ours", "MISS")
    return ", ".join(f"{found.count(kind)} {kind}" for kind in kinds if kind in found)


# --- running an experiment ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Generic[Config]):
    """The command line of an experiment.

    Attributes:
        results: folder of the numbers and figures. If left out, those of the default settings are
            written beside the experiment, and those of other settings to runs/NAME.
    """

    results: Path | None = None
    config: Annotated[Config, tyro.conf.OmitArgPrefixes]


def run_experiment(module: str) -> None:
    """Runs an experiment from the command line; the fields of its Config are the options.

    Args:
        module: the experiment's `__name__`.
    """
    experiment = sys.modules[module]

    def main(arguments: Arguments[Any]) -> int:
        return conduct(experiment, arguments.config, arguments.results)

    run_command(
        lambda words: Arguments[experiment.Config],  # type: ignore[name-defined]
        main,
        prog=f"python -m {experiment.__spec__.name}" if experiment.__spec__ else sys.argv[0],
        description=f"{question(experiment)}\n\nTime: {labelled(experiment, 'Time')}\n\n"
        "The numbers and figures are held against what was expected: the exit status is 1 if a"
        " number of a run with the default settings is a MISS. The first lines of"
        f" {os.path.relpath(str(experiment.__file__))} say what was expected, and from where.",
    )


def conduct(experiment: ModuleType, config: Any, results: Path | None = None) -> int:
    """Runs an experiment, writes NAME.json and the figures, and prints what was found.

    Args:
        experiment: the module.
        config: its settings.
        results: the folder to write to; None as in `Arguments`.

    Returns:
        1 if an expectation is missed with the default settings, for which they are made; else 0.

    Raises:
        ValueError: data is missing; the folder cannot be written; or it holds the results of the
            default settings and these are others.
    """
    if hasattr(experiment, "missing") and (reason := experiment.missing(config)):
        raise ValueError(reason)
    default = _without_folders(config) == _without_folders(type(config)())
    folder = _results_folder(experiment, results, default=default)
    start = time.monotonic()
    numbers = {
        "schema": SCHEMA,
        "experiment": name_of(experiment),
        "command": _command(experiment),
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        "environment": environment(EXPERIMENTS),
        **experiment.run(config),
    }
    numbers["seconds"] = round(time.monotonic() - start, 1)
    checks = experiment.expectations(numbers)
    numbers["claims"] = [check.to_json() for check in checks]
    path = numbers_path(folder, name_of(experiment))
    write_json(path, numbers)
    print(path)
    for stem, figure in experiment.plot(numbers).items():
        print(plotting.save(figure, folder / f"{stem}.png"))
    if hasattr(experiment, "report"):
        print(experiment.report(numbers))
    for check in checks:
        print(check)
    if not default:
        print(f"settings are not the default ones: the results are in {folder}, and a MISS is none")
    return int(default and any(not check.met for check in checks))


def _results_folder(experiment: ModuleType, results: Path | None, *, default: bool) -> Path:
    beside = Path(str(experiment.__file__)).parent
    if results is None:
        results = beside if default else Path("runs") / name_of(experiment)
    elif not default and results.resolve() == beside.resolve():
        raise ValueError(
            f"results must be another folder than {results}, which holds the results of the"
            " default settings; leave it out for runs/NAME"
        )
    check_folder("results", results)
    make_folder("results", results)
    return results


def question(experiment: ModuleType) -> str:
    """Returns the first line of an experiment's docstring."""
    return (inspect.getdoc(experiment) or "").partition("\n")[0]


def labelled(experiment: ModuleType, label: str) -> str:
    """Returns a docstring's text after "Source:", "Command:", "Time:" or "Expected:"."""
    pattern = rf"^{label}:\s+(.*?)(?=^\S|\Z)"
    match = re.search(pattern, inspect.getdoc(experiment) or "", re.MULTILINE | re.DOTALL)
    return " ".join(match.group(1).split()) if match else ""


def name_of(experiment: ModuleType) -> str:
    """Returns the name of an experiment's file, without folder and ending."""
    if experiment.__name__ == "__main__":
        return Path(str(experiment.__file__)).stem
    return experiment.__name__.rpartition(".")[2]


def _command(experiment: ModuleType) -> str:
    """The command line, with the path of a program as it was given."""
    if experiment.__name__ == "__main__" and experiment.__spec__ is not None:
        return shlex.join(["python", "-m", experiment.__spec__.name, *sys.argv[1:]])
    return shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def _without_folders(config: Any) -> JSON:
    """The settings that numbers depend on."""

    def kept(settings: JSON) -> JSON:
        return {
            name: kept(value) if isinstance(value, dict) else value
            for name, value in settings.items()
            if not isinstance(value, Path)
        }

    return kept(dataclasses.asdict(config))


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
