"""Compiles programs for accelerators that are not there, and prints what the compilers say."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table
from command_line import run_command
from compilation import bundles
from compilation.programs import Program, programs, tile_programs
from compilation.tables import COLUMNS, TILES, against_tiles, kernel_rows, targets, tile_row
from compilation.xla_cycles import estimated_cycles

from attention_jax.core.one_line import one_line
from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import check_output, write_json

SCHEMA = 1
MIB = 2**20
_PIPED_WIDTH = 150  # columns of a table that goes to no terminal


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile our kernels and their peers for TPUs; print memory, instructions and spills.

    It needs libtpu (`pip install -e ".[tpu]"`) and no TPU. Nothing is run: a bundle is what a TPU
    begins in one cycle if nothing stalls.

    Attributes:
        only: compile only programs whose name and target contain this text.
        out: also write everything to this JSON file.
    """

    only: str = ""
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)


def main(arguments: Arguments) -> None:
    rows: list[dict[str, Any]] = []
    tiles: list[dict[str, Any]] = []
    jax.config.update("jax_enable_compilation_cache", False)
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
        content = {
            "schema": SCHEMA,
            "command": shlex.join(["python", "scripts/compile_report.py", *sys.argv[1:]]),
            "environment": _environment(),
            "benchmarks": {
                "compiled-programs": {"rows": rows},
                "compiled-targets": {"rows": targets(rows)},
                "compiled-tiles": {"rows": tiles},
                "compiled-against-tiles": {"rows": against_tiles(rows)},
            },
        }
        write_json(arguments.out, content)


def _error(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {"error": rows[0]["error"]} if "error" in rows[0] else {}


def _environment() -> dict[str, Any]:
    """The environment, with the version of the compiler."""
    found = environment(Path(__file__).parent)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # every row says so
        found["packages"]["libtpu"] = importlib.metadata.version("libtpu")
    return found


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
