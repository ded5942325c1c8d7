"""Training for scale_and_dimension.py: one model at many scales, rates and seeds in one program.

Everything random comes from the given seeds; nothing is read or written. The factor on the logits
and the learning rate are arrays, so that one program per score and model size is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.scores import Additive, Dot, General, Params
from attention_jax.tasks.evaluation import decoded
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.loop import TrainState, initial_state, train_steps
from attention_jax.training.metrics import exact_match
from attention_jax.training.task import Task
from experiments.reversal.arms import Arrays, fresh_batch, look_at_cross_attention
from experiments.reversal.multiplied_scores import Times

Array = jax.Array


# --- scores with a factor on their logits, and with equally many parameters ---


@dataclasses.dataclass(frozen=True)
class HalfAdditive(Additive):
    """`Additive` with A = Dk / 2: for tokens of size d, d^2 + d / 2 parameters."""

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return Additive(key_dim // 2).init(rng, query_dim, key_dim)


@dataclasses.dataclass(frozen=True)
class ProjectedDot(Dot):
    """e(q, k) = (q Wq) . (k Wk), with A = Dk / 2: for tokens of size d, d^2 parameters

    Params: {"query_kernel": Wq, [Dq, A]; "key_kernel": Wk, [Dk, A]}, normal with variance 1 / Dq
    and 1 / Dk, so that projected tokens of unit variance have unit variance.
    """

    needs_equal_dims: ClassVar[bool] = False

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {
            name: jax.random.normal(rng, (dim, key_dim // 2)) * dim**-0.5
            for name, rng, dim in zip(
                ("query_kernel", "key_kernel"),
                jax.random.split(rng),
                (query_dim, key_dim),
                strict=True,
            )
        }

    def project_query(self, params: Params, query: Array) -> Array:
        return query @ params["query_kernel"]

    def project_key(self, params: Params, key: Array) -> Array:
        return key @ params["key_kernel"]


ADDITIVE = Times(Additive())
DOT = Times(Dot())
GENERAL = Times(General())
HALF_ADDITIVE = Times(HalfAdditive())
PROJECTED_DOT = Times(ProjectedDot())


def name_of(score: str) -> str:
    """Returns the name of one of the five scores above for a configuration."""
    return f"{__name__}:{score}"


# --- training them ---


class Size(NamedTuple):
    """The size of logits, as a factor or as an initial deviation."""

    factor: float = 1.0  # multiplies the score's logits
    sd: float | None = None  # initial deviation within a row, instead; it determines the factor


def trained(
    config: Reversal,
    runs: Sequence[tuple[Size, float]],
    *,
    every: int,
    strings: int,
    test_strings: int,
    seed: int,
) -> Arrays:
    """Trains all runs, measuring them on fresh strings throughout training and at the end.

    Args:
        config: the model, whose score is a `Times`, and its training, without the rate.
        runs: (size of logits, learning rate) of each run.
        every: steps between two measurements.
        strings: strings for these measurements.
        test_strings: strings for the final measurement.
        seed: seed of both sets of strings.

    Returns:
        {"curves": {"loss", "entropy", "logit_sd", ...: [runs, seeds, looks]}; the final "loss",
        "exact_match" of free-running decoding, "factor": [runs, seeds]; "parameters": the score's
        number of parameters, []}
    """
    task = config
    batch_rng, loss_rng, test_rng = jax.random.split(jax.random.key(seed), 3)
    batch = fresh_batch(config, batch_rng, strings)
    test = fresh_batch(config, test_rng, test_strings)
    look = look_at_cross_attention(task, batch, loss_rng)

    def advance(state: TrainState, rate: Array) -> TrainState:
        return train_steps(AtRate(config, rate), every, state)[0]

    def examine(params: Any) -> dict[str, Array]:
        tokens = decoded(config.bind(params), test)
        return {
            "loss": task.loss(params, test, loss_rng)[0],
            "exact_match": exact_match(tokens, test.targets, test.target_lengths),
        }

    look_at_all = jax.jit(jax.vmap(jax.vmap(look)))
    advance_all = jax.jit(jax.vmap(jax.vmap(advance, in_axes=(0, None))), donate_argnums=0)

    seeds = initial_state(AtRate(config, 1.0))
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(runs)), seeds)
    deviations = np.asarray(look_at_all(state.params)["logit_sd"])
    factors = [
        _factor(size, of_seeds) for (size, _), of_seeds in zip(runs, deviations, strict=True)
    ]
    score_params(state.params)["factor"] = jnp.asarray(factors)
    rates = jnp.array([rate for _, rate in runs], jnp.float32)

    looks = [look_at_all(state.params)]
    for _ in range(config.train.steps // every):
        state = advance_all(state, rates)
        looks.append(look_at_all(state.params))
    learned = score_params(seeds.params).get("score", {})  # Flax omits an empty dict
    return {
        "curves": jax.tree.map(lambda *leaves: np.stack(leaves, axis=-1), *looks),
        **jax.tree.map(np.asarray, jax.jit(jax.vmap(jax.vmap(examine)))(state.params)),
        "factor": np.array(factors),
        "parameters": np.array(sum(leaf[0].size for leaf in jax.tree.leaves(learned))),
    }


class AtRate(Task):
    """A task whose learning rate may be traced."""

    def __init__(self, task: Reversal, rate: Array | float):
        self.train, self.init, self.batch, self.loss = task.train, task.init, task.batch, task.loss  # type: ignore[method-assign]
        self.rate = rate

    def optimizer(self) -> optax.GradientTransformation:
        # Adam's updates are proportional to the rate: computed at rate 1, then scaled.
        at_one = dataclasses.replace(self.train, learning_rate=1.0).optimizer()
        return optax.chain(at_one, optax.scale(self.rate))


def score_params(params: Any) -> Any:
    """Returns the part of a model's parameters that belongs to the cross attention's score."""
    return params["decoder"][0]["cross_attention"]["attention"]["params"]


def _factor(size: Size, deviations: np.ndarray) -> np.ndarray:
    """The factor of each seed; `deviations` are those of its logits at factor 1."""
    if size.sd is None:
        return np.full_like(deviations, size.factor)
    return size.sd / deviations
