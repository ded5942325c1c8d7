"""Compiles kernels for accelerators, none of which it needs; see --help."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Literal

import jax

from attention_jax.commands.command_line import run_command
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import check_output
from benchmarks.compilation import gpu_kernels, tpu_kernels
from benchmarks.tables import write_report


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile the kernels for TPUs or an H100, and print what the compilers report, a row per line.

    Only the compilers are needed: libtpu (`pip install -e ".[tpu]"`), or for an H100 the CUDA
    plugin (`pip install -e ".[cuda13]"`). Nothing is run. A bundle is what a TPU begins in one
    cycle if nothing stalls.

    Attributes:
        part: "kernels": attention for TPUs, with memory, bundles, fills and spills; "h100":
            attention for an H100, with registers, spills and special functions.
        only: compile only the programs whose name (and target, for TPUs) contain this text.
        out: also write everything to this JSON file.
    """

    part: Literal["kernels", "h100"] = "kernels"
    only: str = ""
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)
        if self.only and self.out is not None:
            raise ValueError("out must be left out with only: the file holds all programs")


def main(arguments: Arguments) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # or the plugin needs a GPU
    kernels = tpu_kernels if arguments.part == "kernels" else gpu_kernels
    reports = kernels.reports(arguments.only)
    for row in (row for rows in reports.values() for row in rows):
        say(json.dumps({name: value for name, value in row.items() if name != "loops"}))
    if arguments.out is not None:
        compilers = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
        write_report(arguments.out, 1, {}, reports, compilers)


if __name__ == "__main__":
    run_command(Arguments, main)
