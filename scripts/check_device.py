"""Does this library work on this device, and how fast? See --help."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from attention_jax.commands.command_line import check_names, keep_compiled_programs, run_command
from attention_jax.runs.progress import end_of_output, say
from attention_jax.runs.run_folder import make_folder

sys.path.insert(0, str(Path(__file__).parent.parent))

from device_checks import report, right, speed, training
from device_checks.record import OutOfTimeError, Record

# The parts in order of value, each with its share of the time that is left when it begins.
PARTS: dict[str, tuple[Callable[[Record], None], float]] = {
    "machine": (functools.partial(speed.check, "machine"), 0.05),
    "right": (right.check, 0.3),
    "scaled": (functools.partial(speed.check, "scaled"), 0.25),
    "additive": (functools.partial(speed.check, "additive"), 0.37),
    "tiles": (functools.partial(speed.check, "tiles"), 0.27),
    "training": (training.check, 0.88),
    "tasks": (training.tasks, 1.0),
}
_SHRINK_ON_A_CPU = 32


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Check and measure this library on the device that JAX finds: a GPU, a TPU or the CPU.

    machine: versions, the rate of a large matrix product, the bandwidth of a copy.
    right: every implementation, with gradients and statistics, against the reference in float64.
    scaled: multi-head attention beside jax.nn and PyTorch.
    additive: additive attention, -|q - k|^2 and a user's -|q - k| beside PyTorch.
    tiles: sizes of tiles, and one query for many keys.
    training: string reversal with four scores; a run that is stopped and resumed.
    tasks: the tasks of the leaderboard, with all sizes of the logits and seeds at once.

    Each row is written to OUT/device.json as soon as it is measured. The same command measures
    what is missing. The exit status is 1 if a number is wrong. On a CPU this is a rehearsal:
    lengths are divided by 32, programs are compiled with few optimisations, and the times mean
    nothing.

    Attributes:
        out: folder of device.json, compiled programs and training runs; made if missing.
        minutes: for all parts. A part waits for its programs that have begun to compile, until all
            minutes are over.
        parts: which parts to measure.
    """

    out: Path
    minutes: float = 8.0
    parts: tuple[str, ...] = tuple(PARTS)

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes must be greater than 0 and finite; got {self.minutes}")
        check_names("parts", self.parts, PARTS)
        if not self.parts:
            raise ValueError(f"parts must name at least one of {', '.join(PARTS)}; got none")


def main(arguments: Arguments) -> int:
    make_folder("out", arguments.out)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to PyTorch
    os.environ["ATTENTION_JAX_CACHE"] = str(arguments.out.resolve() / "compiled")
    keep_compiled_programs()
    rehearsal = jax.default_backend() == "cpu"
    if rehearsal:  # compile in half the time, in other processes too
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    record = Record(arguments.out, 60 * arguments.minutes, _SHRINK_ON_A_CPU if rehearsal else 1)
    if rehearsal:
        record.note("JAX finds no GPU or TPU: this is a rehearsal on the CPU")
    status, left = 0, [*arguments.parts]
    try:
        while left:
            check, share = PARTS[left[0]]
            record.begin(left[0], share)
            try:
                check(record)
            except OutOfTimeError:
                break
            except Exception:  # a bug; the other parts go on
                traceback.print_exc()
                status = 1
            del left[0]
    except (KeyboardInterrupt, SystemExit):  # a training that Ctrl-C stops exits
        status = 130
    record.close()
    wrong = report.print_report(record)
    if left:
        reason = "stopped" if status == 130 else "no time is left"
        say(f"{reason}, not finished: {', '.join(left)}; the same command goes on from there")
    say(str(arguments.out / "device.json"))
    status = status or wrong
    if record.leaves_threads:  # Python would wait until their programs are compiled
        end_of_output()
        os._exit(status)
    return status


if __name__ == "__main__":
    run_command(Arguments, main)
