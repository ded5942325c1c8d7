"""A small model learns a task with a score; the factor of the logits and the rate are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.runs.environment import environment
from attention_jax.training.loop import initial_state, train_steps
from experiments import lab
from experiments.lab import Row, significant
from experiments.reversal.scale_and_dimension import AtRate

LOOKS = 20  # points of a learning curve
TIMES = "experiments.reversal.multiplied_scores:Times(score={})"
Setting = tuple[float, float]  # factor, rate


def with_score(task: Any, score: str, seeds: int, budget: float) -> Any:
    """The task with this score, times a factor, in all attentions of its model.

    Its steps are multiplied by `budget`, and are a multiple of `LOOKS`.
    """
    attends: Any = {"score": TIMES.format(score), "self_attention_score": None}  # the same
    steps = LOOKS * max(1, round(budget * task.train.steps / LOOKS))
    train = dataclasses.replace(task.train, steps=steps, seeds=seeds)
    return dataclasses.replace(task, model=dataclasses.replace(task.model, **attends), train=train)


def learned(task: Any, factors: Sequence[float], rates: Sequence[float]) -> Row:
    """What a task `with_score` learns with the best factor and rate: results and curves.

    One seed learns with each factor at the middle rate (of four, the second), then with the best
    factor at each rate. The best has the smallest loss over the last tenth of the steps. All other
    seeds learn with the best.
    """
    seeds = task.train.seeds
    train = dataclasses.replace(task.train, seeds=seeds + 1)  # the last one chooses
    states = initial_state(AtRate(dataclasses.replace(task, train=train), 1.0))
    steps = task.train.steps // LOOKS
    advance = jax.jit(lambda state, rate: train_steps(AtRate(task, rate), steps, state))
    trials: dict[Setting, float] = {}  # the loss of each

    def trained(seed: int, setting: Setting) -> tuple[Any, dict[str, np.ndarray]]:
        """Parameters, and metrics of each look."""
        factor, rate = setting
        state, looks = jax.tree.map(lambda leaf: leaf[seed], states), []
        state = state._replace(params=with_factor(state.params, factor))
        for _ in range(LOOKS):
            state, metrics = advance(state, jnp.float32(rate))
            looks.append(jax.device_get(metrics))
        return state.params, {key: np.stack([each[key] for each in looks]) for key in looks[0]}

    def best_of(settings: list[Setting]) -> Setting:
        if len(settings) == 1:
            return settings[0]
        for setting in settings:
            if setting not in trials:
                loss = trained(seeds, setting)[1]["loss"][-LOOKS // 10 :].mean()
                trials[setting] = significant(loss) if np.isfinite(loss) else np.inf
        return min(settings, key=lambda setting: trials[setting])

    factor, _ = best_of([(factor, rates[(len(rates) - 1) // 2]) for factor in factors])
    factor, rate = best_of([(factor, rate) for rate in rates])
    runs = [trained(seed, (factor, rate)) for seed in range(seeds)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for params, _ in runs))
    metric, result = next(iter(task.evaluate(params).items()))
    kind = "accuracy" if "accuracy" in runs[0][1] and result.larger_is_better else "loss"
    curve = np.stack([metrics[kind] for _, metrics in runs], axis=1).astype(np.float64)
    return {
        "task": task.name,
        "metric": metric,
        "larger_is_better": result.larger_is_better,
        "by_seed": significant(result.by_seed),
        "factor": factor,
        "rate": rate,
        "trials": [[*setting, loss] for setting, loss in trials.items()],
        "steps": task.train.steps,
        "every": steps,
        "curve_of": kind,
        "curve": np.round(curve, 3).tolist(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)) // seeds,
        "commit": environment(lab.FOLDER)["git_commit"],
    }


def kept(path: Path, task: Any, factors: Sequence[float], rates: Sequence[float]) -> list[Row]:
    """The row of a task `with_score`, which is learned unless the file has it."""
    settings: Any = task, factors, rates
    return lab.kept_rows(path, known_by(*settings), lambda: [learned(*settings)])


def known_by(task: Any, factors: Sequence[float], rates: Sequence[float]) -> list[Any]:
    """What the row of a task is known by, for it to be kept: settings, data and the score."""
    feed = task.feed(Path())
    settings = [repr(task), [*factors], [*rates], dict(feed.digests) if feed else {}]
    return [*settings, task.model.known().digest]  # that of the score, init included


def with_factor(params: Any, factor: float) -> Any:
    """Parameters in which the factor of each score is `factor`."""

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        names = [getattr(entry, "key", None) for entry in path[-2:]]
        # Among a score's own parameters none has this path.
        return jnp.full_like(leaf, factor) if names == ["params", "factor"] else leaf

    return jax.tree_util.tree_map_with_path(changed, params)
