"""Does this library work on this device, and how fast? See --help."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from command_line import check_names, keep_compiled_programs, run_command
from device_checks import report, right, speed
from device_checks.record import Record, attempt

from attention_jax.runs.run_folder import check_folder, make_folder

# The parts in order of value, each with its share of the time that is left when it begins.
PARTS: dict[str, tuple[Callable[[Record], None], float]] = {
    "machine": (speed.ceilings, 0.1),
    "right": (right.check, 0.3),
    "scaled": (speed.scaled, 0.35),
    "additive": (speed.additive, 0.45),
    "tiles": (speed.tiles, 0.4),
}
_SHRINK_ON_A_CPU = 32


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Check and measure this library on the device that JAX finds: a GPU, a TPU or the CPU.

    machine: versions, the rate of a large matrix product, the bandwidth of a copy.
    right: every implementation, with gradients and statistics, against formulas in float64.
    scaled: multi-head attention beside jax.nn and PyTorch.
    additive: additive attention, -|q - k|^2 and a user's -|q - k| beside PyTorch.
    tiles: sizes of tiles, and one query for many keys.

    Each row is written to OUT/device.json as soon as it is measured. The same command measures what
    is missing there. On a CPU all lengths are divided: this is a rehearsal, and its times mean
    nothing. The exit status is 1 if a number is wrong.

    Attributes:
        out: folder of device.json, compiled programs and training runs; made if missing.
        minutes: for all parts. A program that has begun to compile is waited for.
        parts: which parts to measure.
        shrink: what lengths are divided by; if left out, 32 on a CPU and 1 on other devices.
    """

    out: Path
    minutes: float = 8.0
    parts: tuple[str, ...] = tuple(PARTS)
    shrink: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes must be greater than 0 and finite; got {self.minutes}")
        if self.shrink is not None and not 1 <= self.shrink <= 128:
            raise ValueError(f"shrink must be from 1 to 128; got {self.shrink}")
        check_names("parts", self.parts, PARTS)
        check_folder("out", self.out)


def main(arguments: Arguments) -> int:
    make_folder("out", arguments.out)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to PyTorch
    os.environ["ATTENTION_JAX_CACHE"] = str(arguments.out.resolve() / "compiled")
    keep_compiled_programs()
    shrink = arguments.shrink or (_SHRINK_ON_A_CPU if jax.default_backend() == "cpu" else 1)
    record = Record(arguments.out, 60 * arguments.minutes, shrink)
    interrupted = False
    try:
        for part in arguments.parts:
            check, share = PARTS[part]
            record.begin(part, share)
            _, refusal = attempt(check, record)
            if refusal:  # of all of it
                record.add(part, "the whole part", **refusal)
    except KeyboardInterrupt:
        interrupted = True
    record.close()
    status = report.print_report(record)
    print(arguments.out / "device.json")
    if interrupted:
        print("stopped; the same command goes on from here", file=sys.stderr)
    return 130 if interrupted else status


if __name__ == "__main__":
    run_command(Arguments, main)
