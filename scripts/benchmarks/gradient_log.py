"""The cost of `--log-gradients` at its default interval, as a share of the training time.

Both contestants take the steps between two lines of gradients.jsonl in one compiled call, all seeds
under vmap; the second also computes the line.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import jax

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.loop import TrainState, gradient_statistics, initial_state, train_steps
from attention_jax.training.task import TrainConfig
from benchmarks.measure import (
    JSON,
    Options,
    Report,
    compile_cold,
    interleaved_seconds,
    print_progress,
)
from benchmarks.targets import Target

_EVERY = 100  # the default of --log-gradients
_LARGEST_SHARE = 0.1

_PLAIN, _LOGGED = "plain", "logged"
_COLUMNS = {
    "score": ("score", ""),
    "seeds": ("seeds", "d"),
    "100 steps, ms": ("plain_milliseconds", ",.1f"),
    "and a line, ms": ("milliseconds", ",.1f"),
    "cost, share": ("share", ".3f"),
    "target": ("target", ""),
    "met": ("met", ""),
}


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> list[Report]:
    """Times training with and without the log, for the cheapest score and the most expensive."""
    steps = max(2, _EVERY // options.shrink)
    rows = [_race(score, steps, options.repeats) for score in ("scaled", "additive")]
    report = Report(
        name="gradient-log",
        title=f"Cost of logging gradients every {steps} steps: median of {options.repeats} repeats",
        columns=_COLUMNS,
        rows=rows,
        settings={"repeats": options.repeats, "shrink": options.shrink, "steps": steps},
        notes=["steps were divided, so these numbers are only a trial"] * (options.shrink > 1),
        section=(),
    )
    return [report]


def _race(score: str, steps: int, repeats: int) -> JSON:
    task = Reversal(ModelConfig(score=score), TrainConfig(), source_start=False)
    state = initial_state(task)
    compiled = {
        _PLAIN: compile_cold(functools.partial(_steps, task, steps), state),
        _LOGGED: compile_cold(functools.partial(_steps_and_line, task, steps), state),
    }
    seconds = interleaved_seconds(
        {name: functools.partial(_call, program.call, state) for name, program in compiled.items()},
        repeats,
    )
    plain, logged = (1000 * statistics.median(seconds[name]) for name in (_PLAIN, _LOGGED))
    print_progress(f"gradient-log, {score}: {plain:,.1f} ms, with a line {logged:,.1f} ms")
    row: JSON = {
        "score": score,
        "seeds": task.train.seeds,
        "device": jax.default_backend(),
        "plain_milliseconds": plain,
        "milliseconds": logged,
        "share": logged / plain - 1,
        "repeat_seconds": seconds[_LOGGED],
        "plain_repeat_seconds": seconds[_PLAIN],
        "compile_seconds": compiled[_LOGGED].compile_seconds,
        "plain_compile_seconds": compiled[_PLAIN].compile_seconds,
    }
    target = Target(
        claim=f"logging gradients, {score}",
        what="its share of the steps' time",
        quantity=lambda rows: rows[0]["share"],
        bound="at most",
        limit=_LARGEST_SHARE,
    ).row([row])
    return {**row, "target": target["target"], "met": target["met"]}


def _steps(task: Reversal, count: int, state: TrainState) -> Any:
    return jax.vmap(functools.partial(train_steps, task, count))(state)


def _steps_and_line(task: Reversal, count: int, state: TrainState) -> Any:
    state, metrics = _steps(task, count, state)
    return state, metrics, gradient_statistics(task, state)


def _call(program: Any, state: TrainState) -> None:
    jax.block_until_ready(program(state))
