"""Exports a trained model as a safetensors file; see --help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from command_line import run_command

from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.progress import printable, say
from attention_jax.runs.run_folder import check_output
from attention_jax.training.export import export
from attention_jax.training.run import load_run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write the parameters of a trained model to a safetensors file, and config.json beside it.

    attention_jax.load_model reads them back; safetensors.numpy.load_file reads the file alone.

    Attributes:
        workdir: a run folder made by scripts/train.py, of any task.
        out: the file, NAME.safetensors, in a folder that exists and holds no other config.json.
        score: what the score of the run is called now, "module:Name", if its file or its class was
            renamed; it must give the same numbers. scripts/train.py --resume records the new name.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), a step
            that is kept, or 0 for the model before training.
        seed_index: which of the run's seeds, from 0.
    """

    workdir: Path
    out: Path
    score: str | None = None
    step: StepName = "newest"
    seed_index: int = 0

    def __post_init__(self) -> None:
        check_output(self.out, ".safetensors")


def main(arguments: Arguments) -> None:
    run = load_run(arguments.workdir, arguments.step, score=arguments.score)
    export(run, arguments.out, arguments.seed_index)
    say(printable(f"{arguments.out}: {run.describe(arguments.seed_index)}"))


if __name__ == "__main__":
    run_command(Arguments, main)
