"""One training step of each task, compiled for many devices: memory, collectives, cycles.

Every device has the same number of examples, however many devices there are (weak scaling). The
program is the one that `attention_jax.training.loop` runs. To add a step, add a row to `steps`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from attention_jax.core.programs import one_line
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.vocabulary import padded_batch
from attention_jax.training.loop import drawn_program, fed_program, initial_state
from attention_jax.training.sharding import Layout, MeshShape
from attention_jax.training.task import Task
from compilation import targets
from compilation.collectives import collectives, summary
from compilation.xla_cycles import estimated_cycles

MIB = 2**20
_ONE_STEP: dict[str, Any] = {"seeds": 1, "steps": 1, "log_every": 1, "checkpoint_every": 1}
_WIDTH = 18  # subwords of a sentence, on each side: the most frequent shape of captions
_SUBWORD = 4  # any; a program depends on shapes alone


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step for a mesh of devices.

    Attributes:
        task: "reversal" or "translation", with its default settings and one seed.
        target: the device that it is compiled for.
        mesh: the axis along which all devices lie.
        devices: their number.
    """

    task: str
    target: str
    mesh: str
    devices: int

    @property
    def name(self) -> str:
        """The step in a few words."""
        return f"{self.task}, {self.target}, {self.mesh}={self.devices}"

    @property
    def row(self) -> dict[str, Any]:
        """The entries that identify its row."""
        return dataclasses.asdict(self)


def steps() -> list[Step]:
    """All steps of the report."""
    tasks = ("translation", "reversal")
    groups = [("v5e", 8), ("v5e", 1), ("v5e", 256), (targets.H100, 8)]
    return [
        Step(task, target, mesh, count)
        for target, count in groups
        for task in tasks
        for mesh in ("data",)
    ]


def row_of(step: Step) -> tuple[dict[str, Any], str]:
    """(what the compiler says of a step, the compiled text); "error" says why there is nothing."""
    if reason := targets.missing_compiler(step.target):
        return {**step.row, "error": f"not compiled here: {reason}"}, ""
    try:
        compiled, state = compile_step(step)
        text = compiled.as_text() or ""
        return {**step.row, **_numbers(step, compiled.memory_analysis(), text, state)}, text
    except Exception as error:
        return {**step.row, "error": f"{type(error).__name__}: {one_line(error)}"}, ""


def _numbers(step: Step, memory: Any, text: str, state: Any) -> dict[str, Any]:
    sizes = {
        "argument_mib": memory.argument_size_in_bytes,
        "temporary_mib": memory.temp_size_in_bytes,
        # The state is donated: only outputs that take no argument's place need memory.
        "output_mib": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    numbers: dict[str, Any] = {
        "examples_per_device": _examples(step, 1),
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)),
        **{name: round(size / MIB, 3) for name, size in sizes.items()},
        "mib": round(sum(sizes.values()) / MIB, 3),
        "collectives": summary(collectives(text)),
    }
    if step.target != targets.H100:
        numbers["cycles"] = estimated_cycles(text)
    return numbers


def compile_step(step: Step) -> tuple[Any, Any]:
    """(the compiled program, the state that it takes)."""
    shape = MeshShape(**{step.mesh: step.devices})
    layout = Layout(shape, targets.devices(step.target, step.devices))
    make = {"reversal": _reversal, "translation": _translation}[step.task]
    task, batches = make(_examples(step, step.devices))
    state = jax.eval_shape(functools.partial(initial_state, task))
    placed = layout.placed(state)
    # Attention asks for the backend, which would be the CPU that compiles.
    backend = "gpu" if step.target == targets.H100 else "tpu"
    with mock.patch.object(jax, "default_backend", return_value=backend):
        if batches is None:
            lowered = drawn_program(task, layout).lower(1, placed)
        else:
            lowered = fed_program(task, layout).lower(placed, batches)
    return lowered.compile(), state


def _examples(step: Step, devices: int) -> int:
    """The examples of a batch: as many per device as a run on one device has."""
    if step.task == "reversal":
        return devices * (Reversal.train.batch_size or 1)
    return devices * (Translation.batch_tokens // (2 * _WIDTH))


def _reversal(examples: int) -> tuple[Task, None]:
    train = dataclasses.replace(Reversal.train, batch_size=examples, **_ONE_STEP)
    return Reversal(train=train), None


def _translation(examples: int) -> tuple[Task, Any]:
    rows = np.full((examples, _WIDTH), _SUBWORD).tolist()
    batch = padded_batch(rows, rows, examples, _WIDTH, _WIDTH)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), batch)
    train = dataclasses.replace(Translation.train, **_ONE_STEP)
    return Translation(Path("-"), Path("-"), train=train), stacked
