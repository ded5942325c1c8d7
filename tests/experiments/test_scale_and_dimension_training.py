"""scale_and_dimension_training.py: its scores, and many runs in one program."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.nn.config import ModelConfig
from attention_jax.scores import ScaledDot
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.task import TrainConfig
from experiments.reversal import scale_and_dimension_training as training

T, S, D = 5, 7, 12
RNG = jax.random.key(0)


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(T, D)), rng.normal(size=(S, D))


def with_factor(score, factor):
    params = score.init(jax.random.key(3), D, D)
    return {**params, "factor": jnp.float32(factor)}


def in_float32(*arrays):
    return [np.asarray(array, np.float32) for array in arrays]


# --- scores ---

FORMULAS = {
    "ADDITIVE": lambda p, q, k: (
        np.tanh((q @ p["query_kernel"])[:, None] + (k @ p["key_kernel"])[None]) @ p["v"]
    ),
    "DOT": lambda p, q, k: q @ k.T,
    "GENERAL": lambda p, q, k: q @ p["kernel"] @ k.T,
    "PROJECTED_DOT": lambda p, q, k: (q @ p["query_kernel"]) @ (k @ p["key_kernel"]).T,
}
FORMULAS["HALF_ADDITIVE"] = FORMULAS["ADDITIVE"]


@pytest.fixture(scope="module")
def logits():
    """{score: (params, logits)} of one program."""

    @jax.jit
    def all_logits(query, key):
        by_score = {}
        for name in FORMULAS:
            score = getattr(training, name)
            params = with_factor(score, -2.5)
            by_score[name] = params, score(params, query, key)
        return by_score

    return all_logits(*in_float32(*tokens()))


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_are_their_formulas_times_the_factor(logits, name):
    (params, found), (query, key) = logits[name], tokens()
    arrays = {part: np.asarray(leaf, np.float64) for part, leaf in params["score"].items()}
    expected = -2.5 * FORMULAS[name](arrays, query, key)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_no_gradient_comes_to_the_factor():
    score = training.PROJECTED_DOT
    query, key = tokens()

    @jax.jit
    def gradients(query, key):
        def loss(params, query):
            return jnp.sum(score(params, query, key) ** 2)

        params = with_factor(score, 1.5)
        return params, jax.grad(loss, argnums=(0, 1))(params, query)

    params, (dparams, dquery) = gradients(*in_float32(query, key))
    assert float(dparams["factor"]) == 0
    kernels = {name: np.asarray(leaf, np.float64) for name, leaf in params["score"].items()}
    bilinear = 1.5 * kernels["query_kernel"] @ kernels["key_kernel"].T
    dlogits = 2 * query @ bilinear @ key.T
    np.testing.assert_allclose(dquery, dlogits @ key @ bilinear.T, rtol=1e-4, atol=1e-3)
    dkernel = 1.5 * query.T @ dlogits @ key @ kernels["key_kernel"]
    np.testing.assert_allclose(dparams["score"]["query_kernel"], dkernel, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("ADDITIVE", 2 * D * D + D),
        ("DOT", 0),
        ("GENERAL", D * D),
        ("HALF_ADDITIVE", D * D + D // 2),
        ("PROJECTED_DOT", D * D),
    ],
)
def test_numbers_of_parameters(name, count):
    params = jax.eval_shape(lambda rng: getattr(training, name).init(rng, D, D), RNG)["score"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


def test_dot_and_scaled_dot_are_one_function_of_equal_logits():
    @jax.jit
    def both(query, key):
        scaled = training.Times(ScaledDot())
        return (
            scaled(with_factor(scaled, 3.0), query, key),
            training.DOT(with_factor(training.DOT, 3.0 / math.sqrt(D)), query, key),
        )

    found, dot = both(*in_float32(*tokens()))
    np.testing.assert_allclose(dot, found, rtol=1e-5, atol=1e-6)


def test_projections_keep_unit_variance():
    query_dim, key_dim = 48, 64
    init = jax.jit(training.PROJECTED_DOT.init, static_argnums=(1, 2))
    kernels = jax.device_get(init(RNG, query_dim, key_dim)["score"])
    for name, dim in (("query_kernel", query_dim), ("key_kernel", key_dim)):
        assert kernels[name].shape == (dim, key_dim // 2)
        variance = float(np.var(kernels[name], ddof=1)) * dim
        assert abs(variance - 1) < 4 * math.sqrt(2 / kernels[name].size)
    assert not np.allclose(kernels["query_kernel"], kernels["key_kernel"][:query_dim])


# --- training ---


def test_a_rate_that_is_traced_is_the_rate_of_the_configuration():
    config = Reversal(train=TrainConfig(learning_rate=3e-3, steps=7, weight_decay=0.3))
    params = {"x": jnp.array([1.0, -2.0, 0.5])}
    gradient = np.array([0.3, -4.0, 2.0], np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def steps(optimizer_at, rate):
        of_rate = optimizer_at(rate)
        moved, state = params, of_rate.init(params)
        for step in range(3):
            gradients = {"x": gradient * np.float32(step - 1.5)}
            updates, state = of_rate.update(gradients, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved

    with jax.numpy_dtype_promotion("standard"):
        expected = steps(lambda _: config.optimizer(), 1.0)
        found = steps(lambda rate: training.AtRate(config, rate).optimizer(), 3e-3)
    assert not np.allclose(expected["x"], params["x"], atol=1e-3)
    np.testing.assert_allclose(found["x"], expected["x"], rtol=1e-6)


@pytest.mark.slow  # it compiles for 10 s; what `run` makes of its numbers is tested below
def test_runs_of_one_program_have_their_own_size_and_rate():
    config = Reversal(
        model=ModelConfig(
            score=training.name_of("PROJECTED_DOT"),
            dim=8,
            hidden_dim=3,
            encoder_layers=0,
        ),
        train=TrainConfig(seeds=2, steps=2, batch_size=5),
        max_length=3,
    )
    runs = [(training.Size(sd=2.0), 1e-30), (training.Size(factor=3.0), 1e-2)]
    found = training.trained(config, runs, every=1, strings=7, test_strings=3, seed=0)
    deviations, losses = found["curves"]["logit_sd"], found["curves"]["loss"]
    assert losses.shape == (2, 2, 3)
    np.testing.assert_allclose(deviations[0, :, 0], 2, rtol=1e-5)
    np.testing.assert_allclose(deviations[0, :, 0] / found["factor"][0], deviations[1, :, 0] / 3,
                               rtol=1e-5)  # fmt: skip
    assert found["factor"][0, 0] != found["factor"][0, 1]
    np.testing.assert_allclose(losses[0], losses[0, :, :1] * np.ones(3), rtol=1e-5)
    assert np.all(losses[1, :, 0] > losses[1, :, 1])
    assert found["exact_match"].shape == found["loss"].shape == (2, 2)
    assert found["parameters"] == 8 * 8
