"""Compiles programs for accelerators that are not there, and prints what the compilers say."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import rich.console
import rich.table
from command_line import run_command
from compilation import bundles, gpu_kernels
from compilation.programs import Program, programs, tile_programs
from compilation.tables import COLUMNS, TILES, against_tiles, kernel_rows, targets, tile_row
from compilation.training_steps import row_of, steps
from compilation.xla_cycles import estimated_cycles

from attention_jax.core.programs import one_line
from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import check_output, write_json

SCHEMA = 1
MIB = 2**20
_PIPED_WIDTH = 150  # columns of a table that goes to no terminal


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile kernels and training steps for TPUs and an H100; print what the compilers say.

    It needs libtpu (`pip install -e ".[tpu]"`) and no TPU, or for an H100 the CUDA plugin
    (`pip install -e ".[cuda12]"`) and no GPU. Nothing is run: a bundle is what a TPU begins in one
    cycle if nothing stalls.

    Attributes:
        part: "kernels": attention, with memory, instructions and spills; "steps": a training step
            of each task on 1, 8 and 256 devices, with memory, collectives and cycles; "h100":
            attention for an H100, with registers, spills and special functions.
        only: compile only programs whose name and target contain this text; not of "h100".
        out: also write everything to this JSON file. Of steps it is written after each, and those
            that the file holds from the same sources are not compiled again.
        texts: write the compiled text of each step into this folder.
    """

    part: Literal["kernels", "steps", "h100"] = "kernels"
    only: str = ""
    out: Path | None = None
    texts: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)
        if self.only and self.part == "kernels" and self.out is not None and self.out.exists():
            raise ValueError(
                f"out must be a new file with only={self.only!r}: {self.out} may hold all programs"
            )


def main(arguments: Arguments) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # or the plugin needs a GPU
    if arguments.part == "steps":
        compile_steps(arguments)
    elif arguments.part == "h100":
        compile_gpu_kernels(arguments)
    else:
        compile_kernels(arguments)


def compile_gpu_kernels(arguments: Arguments) -> None:
    """Compiles attention for an H100; prints its rows and targets."""
    rows = gpu_kernels.rows()
    checks = gpu_kernels.targets_of(rows)
    for row in (*rows, *checks):
        print(json.dumps(row))
    if arguments.out is not None:
        benchmarks = {"compiled-h100": {"rows": rows}, "compiled-h100-targets": {"rows": checks}}
        sources = environment(Path(__file__).parent)
        add_compilers(sources)
        _write(arguments.out, sources, benchmarks)


def compile_steps(arguments: Arguments) -> None:
    """Compiles the training steps; prints and writes each as soon as it is compiled."""
    sources = environment(Path(__file__).parent / "compilation")
    add_compilers(sources)
    known, compilers = _known_from(arguments.out, sources["sources"])
    sources["packages"] = compilers | sources["packages"]
    rows: list[dict[str, Any]] = []
    for step in steps():
        row = known.get(step.name)
        if row is None and arguments.only in step.name:
            row, text = row_of(step)
            print(json.dumps(row), flush=True)
            if arguments.texts is not None and text:
                arguments.texts.mkdir(parents=True, exist_ok=True)
                (arguments.texts / f"{step.name}.hlo").write_text(text)
        if row is not None:
            rows.append(row)
        if arguments.out is not None:
            _write(arguments.out, sources, {"compiled-steps": {"rows": rows}})


def _known_from(
    file: Path | None, sources: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The rows of a file by name that these sources compiled without an error, and the packages."""
    if file is None or not file.exists():
        return {}, {}
    content = json.loads(file.read_text())
    if content["environment"]["sources"] != sources:
        return {}, {}
    rows = {
        f"{row['task']}, {row['target']}, {row['mesh']}={row['devices']}": row
        for row in content["benchmarks"]["compiled-steps"]["rows"]
        if "error" not in row
    }
    return rows, content["environment"]["packages"]


def compile_kernels(arguments: Arguments) -> None:
    """Compiles the kernels, and prints a table of them and of their targets."""
    rows: list[dict[str, Any]] = []
    tiles: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        # libtpu reads this when it is loaded.
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}".strip()

        def compiled(program: Program) -> list[dict[str, Any]]:
            if arguments.only not in f"{program.name}, {program.target}":
                return []
            found = rows_of(program, Path(folder))
            print(f"{program.name}, {program.target}: compiled", file=sys.stderr, flush=True)
            return found

        for program in programs():
            rows += compiled(program)
        for score, tile, program in tile_programs():
            found = compiled(program)
            kernels = [row for row in found if "loops" in row]
            if found:
                tiles.append(tile_row(score, tile, kernels) | _error(found))
    table = rich.table.Table(*COLUMNS)
    for row in rows:
        table.add_row(*(str(row.get(entry, row.get("error", "-"))) for entry in COLUMNS.values()))
    console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(table)
    for target in targets(rows):
        console.print(
            *(str(target[entry]) for entry in ("claim", "what", "target", "found", "met"))
        )
    if arguments.out is not None:
        sources = environment(Path(__file__).parent)
        add_compilers(sources)
        benchmarks = {
            "compiled-programs": {"rows": rows},
            "compiled-targets": {"rows": targets(rows)},
            "compiled-tiles": {"rows": tiles},
            "compiled-against-tiles": {"rows": against_tiles(rows)},
        }
        _write(arguments.out, sources, benchmarks)


def _write(out: Path, sources: dict[str, Any], benchmarks: dict[str, Any]) -> None:
    content = {
        "schema": SCHEMA,
        "command": shlex.join(["python", "scripts/compile_report.py", *sys.argv[1:]]),
        "environment": sources,
        "benchmarks": benchmarks,
    }
    write_json(out, content)


def _error(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {"error": rows[0]["error"]} if "error" in rows[0] else {}


def add_compilers(found: dict[str, Any]) -> None:
    """Adds the versions of the compilers that are installed to an environment."""
    for name in ("libtpu", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # every row says so
            found["packages"][name] = importlib.metadata.version(name)


def rows_of(program: Program, folder: Path) -> list[dict[str, Any]]:
    """What the compiler says of the kernels of a program; "error" if it refuses the program."""
    for file in folder.iterdir():  # those of the program before
        file.unlink()
    row: dict[str, Any] = {"program": program.name, "target": program.target}
    try:
        function, args = program.make(program.target)
        compiled = jax.jit(function).lower(*args).compile()
    except Exception as error:
        return [{**row, "error": f"{type(error).__name__}: {one_line(error)}"}]
    memory: Any = compiled.memory_analysis()
    row["temporary_mib"] = round(memory.temp_size_in_bytes / MIB, 3)
    row["argument_mib"] = round(memory.argument_size_in_bytes / MIB, 3)
    row["output_mib"] = round(memory.output_size_in_bytes / MIB, 3)
    if program.name == TILES:
        row["xla_cycles"] = estimated_cycles(compiled.as_text() or "")
    found = [kernel for name in program.kernels for kernel in bundles.kernels(folder, name)]
    return kernel_rows(row, found)


if __name__ == "__main__":
    run_command(Arguments, main)
