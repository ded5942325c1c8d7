"""The leaderboard of tasks: how a setting is chosen, and what is read off the curves."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from attention_jax.training.task import Result, TrainConfig
from experiments.bench import learning, training


class State(NamedTuple):
    params: Any


@dataclasses.dataclass(frozen=True)
class Stub:
    """A task whose loss is the distance to factor 8 and rate 0.01."""

    name = "stub"
    train: TrainConfig = TrainConfig(steps=20, seeds=2)

    def evaluate(self, params):
        return {"accuracy (%)": Result(params["score"]["params"]["factor"], True)}


def test_the_factor_and_the_rate_with_the_smallest_loss_are_chosen(monkeypatch):
    def initial_state(task):
        return State({"score": {"params": {"factor": jnp.zeros(task.train.seeds)}}})

    def train_steps(task, steps, state):
        factor = state.params["score"]["params"]["factor"]
        loss = jnp.abs(jnp.log(factor / 8)) + jnp.abs(jnp.log(task.rate / 0.01))
        return state, {"loss": loss}

    monkeypatch.setattr(training, "initial_state", initial_state)
    monkeypatch.setattr(training, "train_steps", train_steps)
    monkeypatch.setattr(training, "AtRate", lambda task, rate: SimpleNamespace(
        train=task.train, rate=rate))  # fmt: skip
    row = training.learned(Stub(), (1 / 8, 1, 8), (1e-3, 1e-2, 1e-1))
    assert (row["factor"], row["rate"]) == (8, 1e-2)
    assert [trial[:2] for trial in row["trials"]] == [
        [1 / 8, 1e-2], [1, 1e-2], [8, 1e-2], [8, 1e-3], [8, 1e-1],
    ]  # fmt: skip
    assert row["by_seed"] == [8, 8]
    assert np.shape(row["curve"]) == (training.LOOKS, 2)


def row_of(curve, by_seed):
    return {
        "curve_of": "accuracy", "curve": curve, "every": 50, "by_seed": by_seed,
        "larger_is_better": True,
    }  # fmt: skip


def test_steps_until_a_share_of_the_best_score():
    rows = {
        "fast": row_of([[0.5, 0.1], [0.9, 0.8], [1.0, 1.0]], [99, 100]),
        "slow": row_of([[0.1, 0.1], [0.2, 0.2], [0.9, 0.3]], [89, 31]),
    }
    assert learning.steps_until(rows, "fast", 0.9) == [100, 150]
    assert learning.steps_until(rows, "slow", 0.9) == [150, np.inf]


def test_intervals_that_touch_are_not_apart():
    low, middle, high = (row_of([], by_seed) for by_seed in ([1, 3], [3, 5], [88, 90]))
    assert not learning.apart(low, middle)
    assert learning.apart(low, high)
    assert learning.separates({"a": low, "b": high})
    assert not learning.separates({"a": low, "b": middle})
