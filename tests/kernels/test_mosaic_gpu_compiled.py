"""The Mosaic GPU kernels, compiled for an H100 that is not there: spills and special functions."""

import jax
import jax.numpy as jnp
import pytest
from accelerator_targets import h100_devices, on_device
from compilation import h100

import attention_jax as aj

pytestmark = [pytest.mark.accelerators, pytest.mark.filterwarnings("default")]

B, T, D, A = 2, 512, 64, 128
MOST_SPECIAL = 0.6  # operations of the special function unit per pair and feature
NAMES = ["attention_forward", "attention_gradient_of_keys", "attention_gradient_of_queries"]


# JAX compiles equal kernels once: those of 16-bit inputs, without statistics, equal the first ones.
# The second has the most features and values that fit into the memory of a program.
@pytest.mark.parametrize(
    ("dtype", "statistics", "value_dim"),
    [("float32", False, 64), ("bfloat16", True, 163)],
)
def test_no_spills_and_half_a_reciprocal_for_each_pair_and_feature(dtype, statistics, value_dim):
    (device,) = h100_devices()
    score = aj.Additive(hidden_dim=A)
    shapes = jax.eval_shape(lambda rng: score.init(rng, D, D), jax.random.key(0))
    params = jax.tree.map(lambda leaf: on_device(leaf.shape, leaf.dtype, device), shapes)
    tokens = on_device((B, T, D), jnp.dtype(dtype), device)
    values = on_device((B, T, value_dim), jnp.dtype(dtype), device)

    def loss(params, query, key, value):
        results = aj.attention(
            query,
            key,
            value,
            score=score,
            params=params,
            mask=aj.causal_mask(),
            return_statistics=statistics,
            implementation="mosaic_gpu",
        )
        return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(results))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    kernels = h100.kernels_of(gradient, params, tokens, tokens, values)
    assert sorted(kernels) == NAMES
    for name, kernel in kernels.items():
        assert kernel.spills == 0, name
        assert kernel.registers <= 255, name
    if not any(kernel.loops for kernel in kernels.values()):
        pytest.skip(
            "registers and spills are right; the instructions need nvdisasm: install triton"
        )
    for name, kernel in kernels.items():
        assert len(kernel.loops) == (1 if name == "attention_forward" else 2), name
        for loop in kernel.loops:
            assert loop.special_per_feature <= MOST_SPECIAL, name


def test_memory_is_linear():
    (device,) = h100_devices()
    score = aj.Additive(hidden_dim=A)
    shapes = jax.eval_shape(lambda rng: score.init(rng, D, D), jax.random.key(0))
    params = jax.tree.map(lambda leaf: on_device(leaf.shape, leaf.dtype, device), shapes)

    def temporary(length):
        def loss(params, tokens):
            return aj.attention(
                tokens, tokens, tokens, score=score, params=params, implementation="mosaic_gpu"
            ).sum()

        tokens = on_device((length, D), jnp.float32, device)
        compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8192) <= 2.5 * temporary(4096)
