"""Numbers that follow from defaults: steps of optimisers, initial parameters.

`test_defaults.py` pins the defaults themselves.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import nn
from attention_jax.nn import ModelConfig
from attention_jax.scores.literature import Neural
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.task import Translation
from attention_jax.training.task import TrainConfig

TASKS = {  # with the share of its learning rate that step n has by default
    "reversal": (Reversal(), lambda n: (1 + math.cos(math.pi * n / 2500)) / 2),
    "translation": (Translation(Path("a.de"), Path("a.en")), lambda n: (n + 1) / 1000),
    "clipped": (
        Reversal(train=TrainConfig(schedule="constant", clip_norm=2.0, beta2=0.9)),
        lambda n: 1,
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_optimizers(name):
    """Three steps of Adam in NumPy, with b1 = 0.9 and gradients clipped before."""
    task, share = TASKS[name]
    train, b2 = task.train, task.train.beta2
    gradients = np.array([[30.0, -40.0, 1e-6], [0.3, 0.4, 1e-7], [-0.1, 0.2, 3e-8]])
    w, m, v = np.array([5.0, -7.0, 0.1]), np.zeros(3), np.zeros(3)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies floats by an int32
        optimizer = task.optimizer()
        state, update = optimizer.init(jnp.float32(w)), jax.jit(optimizer.update)
        for step, gradient in enumerate(gradients):
            found, state = update(jnp.float32(gradient), state, jnp.float32(w))
            gradient = gradient / max(np.linalg.norm(gradient) / train.clip_norm, 1)
            m, v = 0.9 * m + 0.1 * gradient, b2 * v + (1 - b2) * gradient**2
            root = np.sqrt(v / (1 - b2 ** (step + 1)))
            adam = m / (1 - 0.9 ** (step + 1)) / (root + train.epsilon)
            expected = -train.learning_rate * share(step) * (adam + train.weight_decay * w)
            np.testing.assert_allclose(found, expected, rtol=1e-4)
            w = w + expected


MEAN_SQUARES = {  # of parameters by name, for the sizes below; of a kernel LeCun's 1 / fan-in
    "bias": lambda shape: 0, "scale": lambda shape: 1, "embedding": lambda shape: 1 / 60,
    "table": lambda shape: 1 / 2, "offset": lambda shape: 0, "coverage_kernel": lambda shape: 0,
    "kernel": lambda shape: 1 / (shape[0] * shape[1] if shape[0] == 2 else shape[0]),
    "position_kernel": lambda shape: 1 / 60, "position_v": lambda shape: 0.01 / 900,
}  # fmt: skip
SCORE_MEAN_SQUARES = {  # of queries of size 60, keys of size 90 and 900 hidden features
    "additive": {"query_kernel": 1 / 120, "key_kernel": 1 / 180, "v": 1 / (900 * 0.394294)},
    "concat": {"kernel": 1 / 150, "v": 1 / (900 * 0.394294)},
    "general": {"kernel": 1 / (60 * 90)},
    "cosine": {"log_scale": (math.log(90) / 2) ** 2},
    "dot": {}, "scaled": {}, "distance": {}, "softcap": {},
    "l2": {}, "manhattan": {}, "power": {}, "softplus": {}, "tropical": {}, "yat": {},
    "elliptical": {"log_m": 0}, "hyperbolic": {"log_beta": 0}, "ngpt": {"s": 1},
    "indexer": {
        "query_kernel": 1 / (60 * 90), "key_kernel": 1 / 90, "weight_kernel": 2 / (60 * 4)
    },
    "neural": {
        "query_kernel": 1 / 120, "key_kernel": 1 / 180, "bias": 0, "v": 1 / (900 * 0.394294)
    },
}  # fmt: skip


def test_initial_parameters():
    """Their mean squares, and the dtype float32."""
    config = ModelConfig(positions="learned", encoder_layers=0)
    config = dataclasses.replace(config, dim=60, hidden_dim=84, decoder_self_attention=False)
    modules = {
        "model": lambda rngs: nn.Model(config, 100, rngs=rngs),
        "heads": lambda rngs: nn.MultiHeadAttention(
            "dot", 60, num_heads=2, key_dim=90, use_bias=True, output_gate=True, normalize_qk=True,
            rngs=rngs,
        ),
        "local": lambda rngs: nn.LocalPAttention(
            "dot", 60, 60, radius=2, hidden_dim=900, rngs=rngs
        ),
        "monotonic": lambda rngs: nn.MonotonicAttention("dot", 60, 60, rngs=rngs),
        "coverage": lambda rngs: nn.CoverageAttention("additive", 60, 60, rngs=rngs),
    }  # fmt: skip

    @jax.jit
    def draw():
        made = {name: make(nnx.Rngs(0)) for name, make in modules.items()}
        return {
            f"{name} {'.'.join(map(str, path))}": leaf[...]
            for name, module in made.items()
            for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
            if "params_of_score" not in path  # those of scores
        }

    @jax.jit
    def draw_scores():
        wide = {"additive": aj.Additive(900), "concat": aj.Concat(900), "neural": Neural(900)}
        rng = jax.random.key(0)
        return {name: score.init(rng, 60, 90) for name, score in (aj.SCORES | wide).items()}

    with jax.default_prng_impl("rbg"):  # which compiles in a fraction of the time
        drawn, scores, seen = draw(), draw_scores(), set()
    for path, leaf in drawn.items():
        name = path.rpartition(".")[2].rpartition(" ")[2]
        seen.add(name)
        assert leaf.dtype == jnp.float32, path
        found, expected = np.mean(np.square(leaf)), MEAN_SQUARES[name](leaf.shape)
        np.testing.assert_allclose(found, expected, rtol=0.1, err_msg=path)
    assert seen == {*MEAN_SQUARES}
    found = jax.tree.map(lambda leaf: np.mean(np.square(leaf)), scores)
    assert found == {
        name: pytest.approx(expected, rel=0.1) for name, expected in SCORE_MEAN_SQUARES.items()
    }


def test_sizes_that_are_left_open():
    """Hidden sizes of scores are the key's, those of modules the query's."""

    def shapes(make):
        state = nnx.state(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param)
        return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}

    for score in (aj.Additive(), aj.Concat()):
        made = jax.eval_shape(lambda score=score: score.init(jax.random.key(0), 3, 5))
        assert made["v"].shape == (5,)
    assert shapes(partial(nn.AdditiveAttention, 3, 5))["params_of_score.v"] == (5,)
    local = shapes(partial(nn.LocalPAttention, "general", 3, 5, radius=2))
    assert local["position_kernel"] == (3, 3)
    heads = shapes(partial(nn.MultiHeadAttention, "dot", 6, num_heads=2, key_dim=10))
    kernels = {"query": (6, 2, 3), "key": (10, 2, 3), "value": (10, 2, 3), "output": (2, 3, 6)}
    assert heads == {f"{name}.kernel": shape for name, shape in kernels.items()}
    heads = shapes(partial(nn.MultiHeadAttention, "dot", 6, num_heads=2, qkv_dim=8))
    kernels = {"query": (6, 2, 4), "key": (6, 2, 4), "value": (6, 2, 4), "output": (2, 4, 6)}
    assert heads == {f"{name}.kernel": shape for name, shape in kernels.items()}
    model = shapes(partial(nn.Model, ModelConfig(decoder_self_attention=False), 7))
    assert model["source_embedding.embedding"] == model["target_embedding.embedding"] == (7, 64)
