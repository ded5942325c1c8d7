"""Training throughput on the reversal task: our model, all seeds at once, and a GRU in PyTorch.

Our model trains by the compiled call of `training.loop.train`, and its metrics come to the host
after each call. The peer trains by the usual loop, one step at a time. Both have the same batch
size, string lengths, optimiser and number of steps. Our model has an encoder and a decoder with
self attention (the defaults of `ModelConfig`, not those of the task). The models differ (ours has
no recurrence), and so do their numbers of parameters, which the table shows: the comparison is of
the time to run the experiment, not of two kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.loop import initial_state, train_steps
from attention_jax.training.task import TrainConfig
from benchmarks.measure import (
    INSTALL,
    JSON,
    Options,
    Report,
    interleaved_seconds,
    print_progress,
)

PEER = "PyTorch GRU"
_OURS: dict[str, Callable[[Callable], Callable]] = {
    "ours": jax.vmap,  # as in `training.loop`
    "ours, a seed after another": lambda train_seed: functools.partial(jax.lax.map, train_seed),
}
_CONFIG = Reversal(ModelConfig(), TrainConfig(), source_start=False)
_TRIAL_STEPS = 5  # of the peer, in each of six trials with each number of threads

_COLUMNS = {
    "score": ("score", ""),
    "model": ("model", ""),
    "params": ("parameters", ",d"),
    "steps/s": ("steps_per_second", ",.0f"),
    "all, s": ("seconds", ",.1f"),
    "peer / it": ("times_peer", ".2f"),
    "compile, s": ("compile_seconds", ",.1f"),
    "all + compile, s": ("seconds_with_compile", ",.1f"),
    "peer / it + compile": ("times_peer_with_compile", ".2f"),
}


class _Contestant(NamedTuple):
    name: str
    about: JSON  # further entries of its row
    parameters: int  # per seed
    seeds: int  # trained at once
    advance: Callable[[], object]  # takes `call_steps` steps for every seed
    compile_seconds: float | None = None  # including initialisation


def check(options: Options) -> None:
    """Raises ValueError if `steps` exceeds one compiled call without being a multiple of it."""
    call_steps = min(_CONFIG.train.log_every, options.steps)
    if options.steps % call_steps:
        raise ValueError(
            f"steps must be less than {call_steps}, the steps of one compiled call, or a multiple"
            f" of it; got {options.steps}"
        )


def run(options: Options) -> list[Report]:
    """Measures every score, with the default sizes and the same training for both models."""
    config = _CONFIG
    call_steps = min(config.train.log_every, options.steps)
    train = dataclasses.replace(config.train, seeds=options.seeds)
    config = dataclasses.replace(config, train=train)
    rows: list[JSON] = []
    absent = {}
    for score in options.scores:
        ours = [_ours(score, name, config, call_steps) for name in _OURS]
        try:
            peer = _peer(score, config, call_steps)
        except LookupError as error:
            peer, absent[score] = None, str(error)
        print_progress(f"reversal, {score}: measuring")
        rows += _race(score, ours, peer, options, config, call_steps)
        if peer is None:
            rows.append({"score": score, "model": f"{PEER}: absent", "absent": absent[score]})
    report = Report(
        name="reversal",
        title=f"Training on reversal: median of {options.repeats} repeats of {options.steps} steps",
        columns=_COLUMNS,
        rows=rows,
        settings={
            **dataclasses.asdict(options),
            "call_steps": call_steps,
            "config": dataclasses.asdict(config),
        },
        notes=[
            "steps/s: of all seeds together; the peer trains one seed after another",
            f"all: {options.seeds} seeds of {config.train.steps:,} steps, extrapolated",
            "peer / it: the peer's time for all, divided by the row's",
            *(f"{PEER} is absent: {reason}" for reason in dict.fromkeys(absent.values())),
        ],
    )
    return [report]


def _ours(score: str, name: str, config: Reversal, call_steps: int) -> _Contestant:
    print_progress(f"reversal, {score}: compiling {name}")
    model = dataclasses.replace(config.model, score=score)
    task = dataclasses.replace(config, model=model)

    start = time.perf_counter()
    state = jax.block_until_ready(initial_state(task))
    train_seed = functools.partial(train_steps, task, call_steps)
    compiled = jax.jit(_OURS[name](train_seed), donate_argnums=0).lower(state).compile()
    compile_seconds = time.perf_counter() - start

    def advance() -> None:
        nonlocal state
        state, metrics = compiled(state)
        jax.device_get(metrics)

    return _Contestant(
        name=name,
        about={"device": jax.default_backend()},
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)) // config.train.seeds,
        seeds=config.train.seeds,
        advance=advance,
        compile_seconds=compile_seconds,
    )


def _peer(score: str, config: Reversal, call_steps: int) -> _Contestant:
    """The peer; a LookupError gives the reason if it is absent."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise LookupError(f"{error}; {INSTALL}") from error
    from benchmarks import pytorch_gru_reverser

    if score not in pytorch_gru_reverser.SCORES:
        raise LookupError(f"it has no score {score}")
    training = pytorch_gru_reverser.training_like_ours(score, config)
    training.choose_threads(_TRIAL_STEPS)
    threads = training.threads
    return _Contestant(
        name=f"{PEER}, {threads} thread" + ("s" if threads > 1 else ""),
        about={"device": "cpu", "torch": torch.__version__, "threads": threads},
        parameters=training.parameters,
        seeds=1,
        advance=lambda: training.steps(call_steps),
    )


def _race(
    score: str,
    ours: list[_Contestant],
    peer: _Contestant | None,
    options: Options,
    config: Reversal,
    call_steps: int,
) -> list[JSON]:
    """One row per contestant."""
    contestants = [*ours, peer] if peer else ours
    for contestant in contestants:
        contestant.advance()  # warm-up

    def repeat(contestant: _Contestant) -> None:
        for _ in range(options.steps // call_steps):
            contestant.advance()

    seconds = interleaved_seconds(
        {c.name: functools.partial(repeat, c) for c in contestants}, options.repeats
    )
    all_steps = options.seeds * config.train.steps
    rates = {
        c.name: c.seeds * options.steps / statistics.median(seconds[c.name]) for c in contestants
    }
    rows = []
    for contestant in contestants:
        all_seconds = all_steps / rates[contestant.name]
        with_compile = all_seconds + (contestant.compile_seconds or 0.0)
        peer_seconds = all_steps / rates[peer.name] if peer else None
        rows.append(
            {
                "score": score,
                "model": contestant.name,
                **contestant.about,
                "parameters": contestant.parameters,
                "seeds": contestant.seeds,
                "repeat_seconds": seconds[contestant.name],
                "steps_per_second": rates[contestant.name],
                "seconds": all_seconds,
                "times_peer": peer_seconds and peer_seconds / all_seconds,
                "compile_seconds": contestant.compile_seconds,
                "seconds_with_compile": with_compile,
                "times_peer_with_compile": peer_seconds and peer_seconds / with_compile,
            }
        )
    return rows
