"""Runs the experiments, and writes their results into the pages; see --help."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from attention_jax.commands.command_line import check_names, run_command
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import make_folder, write_text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from experiments import lab, pages  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Run experiments, and write every table, figure and claim into the READMEs of experiments/.

    An experiment that has rows is not run again; if it is named, its figures are drawn again. If an
    experiment fails, or is left out because its data or a package is missing, the others still run.
    Ctrl-C stops, and the same command goes on. The READMEs are written from the rows of all
    experiments. The exit status is 1 if an experiment fails, if one that is named is left out, or
    if a claim of one that is named or that ran is a MISS.

    Attributes:
        names: which experiments; none for all.
        quick: small settings: minutes instead of hours. Everything is written to runs/quick, where
            README.md is the page.
        force: also run the experiments that have rows.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    quick: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        check_names("names", self.names, lab.SUBJECT_OF)

    def folder(self, name: str) -> Path:
        """The folder for the rows and figures of an experiment."""
        return ROOT / "runs/quick" if self.quick else lab.FOLDER / lab.SUBJECT_OF[name]


def main(arguments: Arguments) -> int:
    if arguments.quick:  # most of its time is compiling, and nothing in it runs for long
        jax.config.update("jax_disable_most_optimizations", True)
    chosen = [name for name in lab.SUBJECT_OF if name in (arguments.names or lab.SUBJECT_OF)]
    judged, status = set(arguments.names), 0
    failed: list[str] = []
    left_out: dict[str, str] = {}  # the reasons
    for index, name in enumerate(chosen):
        title, folder = f"{name} ({index + 1} of {len(chosen)})", arguments.folder(name)
        if (folder / f"{name}.json").exists() and not arguments.force:
            say(f"{title}: there already; --force runs it again", error=True)
            if name in arguments.names and (content := lab.content_of(name, folder)):
                lab.draw(lab.load(name), content["rows"], folder)
            continue
        say(f"--- {title}", error=True)
        start, experiment = time.perf_counter(), lab.load(name)
        config = _config(experiment, quick=arguments.quick)
        if reason := experiment.missing(config) if hasattr(experiment, "missing") else "":
            left_out[name] = reason
            continue
        try:
            lab.conduct(experiment, config, folder)
        except (KeyboardInterrupt, SystemExit) as stop:
            status = int(stop.code or 1) if isinstance(stop, SystemExit) else 130
            say("stopped; the same command goes on from here", error=True)
            break
        except Exception:  # any error is shown, and the other experiments run
            traceback.print_exc()
            failed.append(name)
        judged.add(name)
        say(f"{name}: {time.perf_counter() - start:.0f} s", error=True)
        jax.clear_caches()
    folders = {name: arguments.folder(name) for name in lab.SUBJECT_OF}
    contents = {name: lab.content_of(name, folder) for name, folder in folders.items()}
    found = {name: content for name, content in contents.items() if content is not None}
    missed = pages.missed(found)
    for name, claim in missed:
        say(f"MISS: {name}: {claim.text}", error=True)
    for name in failed:
        say(f"failed: {name}", error=True)
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}", error=True)
    incomplete = bool(failed or left_out.keys() & {*arguments.names})
    if arguments.quick:  # claims are made for the default settings
        _write_page(ROOT / "runs/quick", found)
        return status or int(incomplete)
    pages.write_pages()
    say(str(lab.FOLDER / "README.md"))
    return status or int(incomplete or any(name in judged for name, _ in missed))


def _config(experiment: Any, *, quick: bool) -> Any:
    """The settings to run it with; trainings lie in runs/, or in runs/quick/runs."""
    config = experiment.QUICK if quick else experiment.Config()
    if not hasattr(config, "workdir"):
        return config
    runs = ROOT / ("runs/quick/runs" if quick else "runs")
    return dataclasses.replace(config, workdir=runs / config.workdir.name)


def _write_page(folder: Path, found: dict[str, lab.Row]) -> None:
    """Writes README.md: the section of each experiment that has rows there."""
    answers = "Answers are those of the full settings; tables and figures are not."
    parts = ["# Experiments with small settings", f"**{lab.NO_FINDINGS}.** {answers}"]
    for name, content in found.items():
        parts += [f"## {name}", *pages.section(lab.load(name), content)]
    make_folder("results", folder)
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")
    say(f"{lab.NO_FINDINGS}\n{folder / 'README.md'}")


if __name__ == "__main__":
    run_command(Arguments, main)
