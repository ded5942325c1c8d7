"""Runs the experiments, and puts all that they found on one page; see --help."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import rich.console
import tyro
from command_line import run_command

from attention_jax.runs.run_folder import make_folder, write_text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

from experiment import conduct, numbers_path  # noqa: E402
from results_page import results_page  # noqa: E402

# In the order of the page: from one score by hand to whole models.
EXPERIMENTS = (
    "worked_example",
    "score_variance",
    "softmax_saturation",
    "entropy_vs_dimension",
    "attention_masks",
    "geometry",
    "qkv_walkthrough",
    "complexity_ledger",
    "reversal_comparison",
    "scale_and_dimension",
    "attention_family",
    "local_attention",
    "coverage_and_repetition",
    "rollout",
    "length_generalization",
    "length_ablations",
    "gradient_analysis",
    "translation_comparison",
    "weak_scaling",
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Run experiments, and write a page with every figure and every number beside its source's.

    An experiment whose numbers are there is not run again; one that fails does not keep the others
    from running, and is reported at the end. Ctrl-C stops; the page is written all the same, and
    the same command goes on.

    Attributes:
        names: which experiments; none for all.
        quick: small settings, for a look: minutes in place of hours. Numbers go to
            runs/quick, and those of the default settings stay as they are.
        force: run also what is there.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    quick: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in EXPERIMENTS:
                raise ValueError(f"names must be of {', '.join(EXPERIMENTS)}; got {name!r}")

    @property
    def results(self) -> Path:
        """Where numbers, figures and the page go."""
        return ROOT / ("runs/quick" if self.quick else "experiments/results")

    def config(self, experiment: ModuleType) -> Any:
        """The settings to run it with."""
        config = experiment.QUICK if self.quick else experiment.Config()
        folders = {"results": self.results}
        if hasattr(config, "workdir"):
            kind = "quick/runs" if self.quick else ""
            folders["workdir"] = ROOT / "runs" / kind / config.workdir.name
        return dataclasses.replace(config, **folders)


def main(arguments: Arguments) -> int:
    make_folder("results", arguments.results)
    if arguments.quick:  # most of its time is compiling, and nothing in it runs for long
        jax.config.update("jax_disable_most_optimizations", True)
    console = rich.console.Console(stderr=True)
    names = [name for name in EXPERIMENTS if name in (arguments.names or EXPERIMENTS)]
    failed: list[str] = []
    status = 0
    for index, name in enumerate(names):
        title = f"{name} ({index + 1} of {len(names)})"
        if numbers_path(arguments.results, name).exists() and not arguments.force:
            console.print(f"{title}: there already; --force runs it again", highlight=False)
            continue
        console.rule(title)
        start = time.perf_counter()
        try:
            if reason := _missing(name, arguments):
                console.print(f"{title}: left out, {reason}", highlight=False)
                continue
            _run(name, arguments)
        except (KeyboardInterrupt, SystemExit) as stop:
            status = int(stop.code or 1) if isinstance(stop, SystemExit) else 130
            console.print("stopped; the same command goes on from here", highlight=False)
            break
        except Exception:  # whatever it is, the others run, and it is shown
            traceback.print_exc()
            failed.append(name)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s", highlight=False)
        jax.clear_caches()
    page, missed = _write_page(arguments)
    print(page)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    for claim in missed:
        print(f"not as expected: {claim}", file=sys.stderr)
    return status or int(bool(failed or (missed and not arguments.quick)))


def _missing(name: str, arguments: Arguments) -> str:
    """What an experiment needs that only its user can bring, and is not there; "" for nothing."""
    experiment = importlib.import_module(name)
    if not hasattr(experiment, "missing"):
        return ""
    return str(experiment.missing(arguments.config(experiment)))


def _run(name: str, arguments: Arguments) -> None:
    experiment = importlib.import_module(name)
    conduct(experiment, arguments.config(experiment))


def _write_page(arguments: Arguments) -> tuple[Path, list[str]]:
    """The page of all that is there, and what on it is not as expected."""
    results = arguments.results
    found = {
        name: _read(numbers_path(results, name))
        for name in EXPERIMENTS
        if numbers_path(results, name).exists()
    }
    experiments = {name: importlib.import_module(name) for name in found}
    expected = {name: experiments[name].expectations(numbers) for name, numbers in found.items()}
    missed = [
        f"{name}: {expectation.claim}"
        for name, expectations in expected.items()
        for expectation in expectations
        if not expectation.met
    ]
    path = results / "index.html"
    write_text(path, results_page(experiments, found, expected, results, quick=arguments.quick))
    return path, missed


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; {path.stem} --force makes it anew"
        ) from error


if __name__ == "__main__":
    run_command(Arguments, main)
