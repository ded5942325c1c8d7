"""Exports a trained model as a safetensors file; see --help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from attention_jax.commands.command_line import OfARun, run_command
from attention_jax.runs.progress import printable, say
from attention_jax.runs.run_folder import check_output
from attention_jax.training.saved import export


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(OfARun):
    """Write the parameters of a trained model to a safetensors file, and config.json beside it.

    attention_jax.load_model reads them back; safetensors.numpy.load_file reads the file alone.

    Attributes:
        out: the file, NAME.safetensors, in a folder that exists and holds neither runs nor the
            config.json of another model.
        seed_index: which of the run's seeds, from 0.
    """

    out: Path
    seed_index: int = 0

    def __post_init__(self) -> None:
        check_output(self.out, ".safetensors")


def main(arguments: Arguments) -> None:
    run = arguments.run()
    export(run, arguments.out, arguments.seed_index)
    say(printable(f"{arguments.out}: {run.describe(arguments.seed_index)}"))


if __name__ == "__main__":
    run_command(Arguments, main)
