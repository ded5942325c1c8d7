"""The Mosaic GPU kernels, compiled for an H100 that is not there: spills and special functions."""

import jax
import jax.numpy as jnp
import pytest
from accelerator_targets import gradient_on_h100

import attention_jax as aj
from benchmarks.compilation import gpu_kernels

pytestmark = [pytest.mark.accelerators, pytest.mark.filterwarnings("default")]

B, T, D = 2, 512, 64
SCORE = aj.Additive(hidden_dim=128)
MOST_SPECIAL = 0.6  # operations of the special function unit per pair and feature
NAMES = ["attention_forward", "attention_gradient_of_keys", "attention_gradient_of_queries"]


# JAX compiles equal kernels once: those of 16-bit inputs, without statistics, equal the first ones.
# The second has the most features and values that fit into the memory of a program.
@pytest.mark.parametrize(
    ("dtype", "statistics", "value_dim"),
    [("float32", False, 64), ("bfloat16", True, 163)],
)
def test_no_spills_and_half_a_reciprocal_for_each_pair_and_feature(dtype, statistics, value_dim):
    tokens = jax.ShapeDtypeStruct((B, T, D), jnp.dtype(dtype))
    gradient, arguments, _ = gradient_on_h100(
        "mosaic_gpu", SCORE, tokens, lambda lengths: aj.causal_mask(), value_dim,
        return_statistics=statistics,
    )  # fmt: skip
    kernels = gpu_kernels.kernels_of(gradient, *arguments)
    assert sorted(kernels) == NAMES
    for name, kernel in kernels.items():
        assert kernel["spills"] == 0, name
        assert kernel["registers"] <= 255, name
    if not any(kernel["special"] for kernel in kernels.values()):
        pytest.skip(
            "registers and spills are right; the instructions need nvdisasm: install triton"
        )
    for name, kernel in kernels.items():
        assert len(kernel["special"]) == (1 if name == "attention_forward" else 2), name
        assert max(kernel["special"]) <= MOST_SPECIAL, name


def test_memory_is_linear():
    def temporary(length):
        tokens = jax.ShapeDtypeStruct((length, D), jnp.float32)
        gradient, arguments, _ = gradient_on_h100(
            "mosaic_gpu", SCORE, tokens, lambda lengths: None, D
        )
        return gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) <= 2.5 * temporary(4096)
