"""Runs the experiments, and puts all that they found on one page; see --help."""

from __future__ import annotations

import dataclasses
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

from attention_jax.core.names import did_you_mean
from attention_jax.runs.run_folder import make_folder, write_text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from experiments import catalogue, readme  # noqa: E402
from experiments.experiment import conduct, numbers_path  # noqa: E402
from experiments.results_page import results_page  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Run experiments, and write a page with every figure and every number beside its source's.

    An experiment whose numbers are there is not run again. If one fails, the others run, and the
    failure is reported at the end. Ctrl-C stops; the page is written all the same, and the same
    command goes on. The numbers in the READMEs are written anew from the results.

    The exit status is 1 if an experiment fails, or if a claim of an experiment that is named or
    that ran is a MISS. Known MISSes of results that were there before do not change it; the last
    line says how many of them the page shows.

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
            if name not in catalogue.SUBJECT_OF:
                expected = ", ".join(catalogue.SUBJECT_OF)
                hint = did_you_mean(name, catalogue.SUBJECT_OF)
                raise ValueError(f"names must be of {expected}; got {name!r}{hint}")

    @property
    def page(self) -> Path:
        """The file of the page."""
        return ROOT / ("runs/quick" if self.quick else "experiments") / "index.html"

    def results(self, name: str) -> Path:
        """The folder for the numbers and figures of an experiment."""
        return self.page.parent if self.quick else catalogue.folder_of(name)

    def config(self, experiment: ModuleType) -> Any:
        """The settings to run it with."""
        config = experiment.QUICK if self.quick else experiment.Config()
        if not hasattr(config, "workdir"):
            return config
        kind = "quick/runs" if self.quick else ""
        return dataclasses.replace(config, workdir=ROOT / "runs" / kind / config.workdir.name)


def main(arguments: Arguments) -> int:
    make_folder("results", arguments.page.parent)
    if arguments.quick:  # most of its time is compiling, and nothing in it runs for long
        jax.config.update("jax_disable_most_optimizations", True)
    console = rich.console.Console(stderr=True)
    everything = tuple(catalogue.SUBJECT_OF)
    names = [name for name in everything if name in (arguments.names or everything)]
    judged = set(arguments.names)  # experiments whose MISSes decide about the exit status
    failed: list[str] = []
    status = 0
    for index, name in enumerate(names):
        title = f"{name} ({index + 1} of {len(names)})"
        if numbers_path(arguments.results(name), name).exists() and not arguments.force:
            console.print(f"{title}: there already; --force runs it again", highlight=False)
            continue
        console.rule(title)
        start = time.perf_counter()
        try:
            if reason := _missing(name, arguments):
                console.print(f"{title}: left out, {reason}", highlight=False)
                continue
            judged.add(name)
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
    if not arguments.quick:
        readme.write()
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    new = [(name, claim) for name, claim in missed if name in judged]
    for name, claim in new:
        print(f"MISS: {name}: {claim}", file=sys.stderr)
    known = len(missed) - len(new)
    if known:
        plural = "es" if known > 1 else ""
        print(f"the page shows {known} known MISS{plural}, of results that were there before")
    return status or int(bool(failed or (new and not arguments.quick)))


def _missing(name: str, arguments: Arguments) -> str:
    """What an experiment needs that only its user can bring, and is not there; "" for nothing."""
    experiment = catalogue.load(name)
    if not hasattr(experiment, "missing"):
        return ""
    return str(experiment.missing(arguments.config(experiment)))


def _run(name: str, arguments: Arguments) -> None:
    experiment = catalogue.load(name)
    conduct(experiment, arguments.config(experiment), arguments.results(name))


def _write_page(arguments: Arguments) -> tuple[Path, list[tuple[str, str]]]:
    """The page of all results, and the experiments and claims that are a MISS."""
    paths = {name: numbers_path(arguments.results(name), name) for name in catalogue.SUBJECT_OF}
    found = {name: _read(path) for name, path in paths.items() if path.exists()}
    experiments = {name: catalogue.load(name) for name in found}
    expected = {name: experiments[name].expectations(numbers) for name, numbers in found.items()}
    missed = [
        (name, expectation.claim)
        for name, expectations in expected.items()
        for expectation in expectations
        if not expectation.met
    ]
    folders = {name: path.parent for name, path in paths.items()}
    page = results_page(experiments, found, expected, folders, quick=arguments.quick)
    write_text(arguments.page, page)
    return arguments.page, missed


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; {path.stem} --force makes it anew"
        ) from error


if __name__ == "__main__":
    run_command(Arguments, main)
