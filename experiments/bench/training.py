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
TRIAL_SEED = 1000
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
    factor at each rate. The best has the smallest loss over the last tenth of the steps. All seeds
    learn with the best.
    """
    advance = jax.jit(
        jax.vmap(
            lambda state, rate: train_steps(AtRate(task, rate), task.train.steps // LOOKS, state)
        ),
        donate_argnums=0,
    )
    trials: dict[Setting, float] = {}  # the loss of each

    def best_of(settings: list[Setting]) -> Setting:
        if len(settings) == 1:
            return settings[0]
        new = [setting for setting in settings if setting not in trials]
        trials.update(zip(new, losses(task, advance, new), strict=True))
        return min(settings, key=lambda setting: trials[setting])

    factor, _ = best_of([(factor, rates[(len(rates) - 1) // 2]) for factor in factors])
    factor, rate = best_of([(factor, rate) for rate in rates])
    params, curve = trained(task, advance, [(factor, rate)] * task.train.seeds)
    metric, result = next(iter(task.evaluate(params).items()))
    kind = "accuracy" if "accuracy" in curve and result.larger_is_better else "loss"
    return {
        "task": task.name,
        "metric": metric,
        "larger_is_better": result.larger_is_better,
        "by_seed": significant(result.by_seed),
        "factor": factor,
        "rate": rate,
        "trials": [[*setting, loss] for setting, loss in trials.items()],
        "steps": task.train.steps,
        "every": task.train.steps // LOOKS,
        "curve_of": kind,
        "curve": np.round(curve[kind].astype(np.float64), 3).tolist(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)) // task.train.seeds,
        "commit": environment(lab.FOLDER)["git_commit"],
    }


def losses(task: Any, advance: Any, settings: list[Setting]) -> list[float]:
    """The loss over the last tenth of the steps with each setting, of one seed."""
    train = dataclasses.replace(task.train, first_seed=TRIAL_SEED, seeds=1)
    _, metrics = trained(dataclasses.replace(task, train=train), advance, settings)
    last = metrics["loss"][-LOOKS // 10 :].mean(axis=0)
    return [significant(loss) if np.isfinite(loss) else np.inf for loss in last]


def trained(task: Any, advance: Any, settings: list[Setting]) -> tuple[Any, dict[str, np.ndarray]]:
    """Parameters and metrics [looks, runs] after training with each setting."""
    factors, rates = jnp.asarray(settings, jnp.float32).T
    state, looks = initial_state(AtRate(task, 1.0)), []
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(rates) // len(leaf), axis=0), state)
    state = state._replace(params=with_factors(state.params, factors))
    for _ in range(LOOKS):
        state, metrics = advance(state, rates)
        looks.append(jax.device_get(metrics))
    return state.params, {key: np.stack([each[key] for each in looks]) for key in looks[0]}


def known_by(task: Any, factors: Sequence[float], rates: Sequence[float]) -> list[Any]:
    """What the row of a task is known by, for it to be kept: settings, data and the score."""
    feed = task.feed(Path())
    settings = [repr(task), [*factors], [*rates], dict(feed.digests) if feed else {}]
    return [*settings, lab.program_of(task.model.score)]


def with_factors(params: Any, factors: jax.Array) -> Any:
    """Parameters in which the factor of each score is one of `factors`, a number for each run."""

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        names = [getattr(entry, "key", None) for entry in path[-2:]]
        if names != ["params", "factor"]:  # of the score's own parameters, none stands there
            return leaf
        return jnp.broadcast_to(factors.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)

    return jax.tree_util.tree_map_with_path(changed, params)
