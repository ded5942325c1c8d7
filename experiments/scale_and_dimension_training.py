"""What `scale_and_dimension.py` trains: one model at many scales, rates and seeds in one program.

Everything is drawn from given seeds; nothing is read or written. The factor on the logits and the
learning rate are arrays, so that a program is compiled once for each score and model size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.analysis import learning_statistics
from attention_jax.scores import Additive, Dot, General, Params, Score, WrappedScore
from attention_jax.tasks.reversal.evaluation import decode
from attention_jax.tasks.reversal.task import ReversalConfig, bind, optimizer, reversal_task
from attention_jax.training.loop import TrainState, initial_state, train_steps
from attention_jax.training.metrics import exact_match

Array = jax.Array
Arrays = dict[str, Any]  # of NumPy arrays, or of more such

CROSS = "decoder_0/cross_attention"


# --- scores whose logits can be set to a size, and that have as many parameters ---


@dataclasses.dataclass(frozen=True)
class Times(WrappedScore):
    """e(q, k) = factor score(q, k), the factor a constant that is given among the parameters

    Params: {"factor": [], 1 at first; "score": those of `score`}. No gradient comes to the factor.

    Attributes:
        score: the `Score` that is multiplied.
    """

    param_shapes = Score.param_shapes

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {"factor": jnp.ones(()), "score": self.score.init(rng, query_dim, key_dim)}

    def project_query(self, params: Params, query: Array) -> Any:
        return self.score.project_query(params["score"], query)

    def project_key(self, params: Params, key: Array) -> Any:
        return self.score.project_key(params["score"], key)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        logits = self.score.pair(params["score"], q_features, k_features)
        return jax.lax.stop_gradient(params["factor"]).astype(logits.dtype) * logits


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
    """One of the five above as configurations name it."""
    return f"{__name__}:{score}"


# --- training them ---


class Size(NamedTuple):
    """How large logits are made, by one of two."""

    factor: float = 1.0  # what the score's logits are multiplied by,
    sd: float | None = None  # or what deviation they begin with: the factor is then measured


def trained(
    config: ReversalConfig,
    runs: Sequence[tuple[Size, float]],
    *,
    every: int,
    strings: int,
    test_strings: int,
    seed: int,
) -> Arrays:
    """Looks at every run while it learns, and how well it reverses in the end; on fresh strings.

    Args:
        config: the model, whose score is a `Times`, and its training; but for the rate.
        runs: the size of logits and the learning rate of each.
        every: steps between two looks.
        strings: that every look is at.
        test_strings: for the end.
        seed: of these strings.

    Returns:
        {"curves": {"loss", "entropy", "logit_sd", ...: [runs, seeds, looks]}; "loss" in the end,
        "exact_match" of free-running decoding, "factor": [runs, seeds]; "parameters": the score's,
        []}
    """
    task = reversal_task(config)
    batch_rng, loss_rng, test_rng = jax.random.split(jax.random.key(seed), 3)
    batch, test = (
        reversal_task(dataclasses.replace(config, batch_size=count)).batch(rng)
        for rng, count in ((batch_rng, strings), (test_rng, test_strings))
    )

    def look(params: Any) -> dict[str, Array]:
        found = learning_statistics(task.loss, params, batch, loss_rng, depth=0)
        return {
            "loss": found["loss"],
            **{
                name.removeprefix(f"{CROSS}/"): value
                for name, value in found.items()
                if name.startswith(f"{CROSS}/")
            },
        }

    def advance(state: TrainState, rate: Array) -> TrainState:
        return train_steps(task, optimizer_at(config, rate), every, state)[0]

    def examine(params: Any) -> dict[str, Array]:
        found = decode(bind(config.model, params), test).tokens
        return {
            "loss": task.loss(params, test, loss_rng)[0],
            "exact_match": exact_match(found, test.targets, test.target_lengths),
        }

    look_at_all = jax.jit(jax.vmap(jax.vmap(look)))
    advance_all = jax.jit(jax.vmap(jax.vmap(advance, in_axes=(0, None))), donate_argnums=0)

    seeds = initial_state(task, optimizer_at(config, 1.0), config.loop)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(runs)), seeds)
    deviations = np.asarray(look_at_all(state.params)["logit_sd"])
    factors = [
        _factor(size, of_seeds) for (size, _), of_seeds in zip(runs, deviations, strict=True)
    ]
    score_params(state.params)["factor"] = jnp.asarray(factors)
    rates = jnp.array([rate for _, rate in runs], jnp.float32)

    looks = [look_at_all(state.params)]
    for _ in range(config.loop.steps // every):
        state = advance_all(state, rates)
        looks.append(look_at_all(state.params))
    learned = score_params(seeds.params).get("score", {})  # Flax leaves what is empty out
    return {
        "curves": jax.tree.map(lambda *leaves: np.stack(leaves, axis=-1), *looks),
        **jax.tree.map(np.asarray, jax.jit(jax.vmap(jax.vmap(examine)))(state.params)),
        "factor": np.array(factors),
        "parameters": np.array(sum(leaf[0].size for leaf in jax.tree.leaves(learned))),
    }


def optimizer_at(config: ReversalConfig, rate: Array | float) -> optax.GradientTransformation:
    """The task's optimiser at a rate that may be traced: not the configuration's."""
    # Adam's updates are proportional to the rate: they are made at rate 1, and scaled.
    at_one = optimizer(dataclasses.replace(config, learning_rate=1.0))
    return optax.chain(at_one, optax.scale(rate))


def score_params(params: Any) -> Any:
    """Where a model's parameters hold those of the score under study."""
    return params["decoder"][0]["cross_attention"]["attention"]["params"]


def _factor(size: Size, deviations: np.ndarray) -> np.ndarray:
    """Of each seed, whose logits have these deviations without one."""
    if size.sd is None:
        return np.full_like(deviations, size.factor)
    return size.sd / deviations
