"""The Pallas TPU kernels: what they cannot serve, and what JAX lowers for a TPU without one."""

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj

NAME = "mosaic_tpu"


def lower_for_a_tpu(dtype=jnp.float32, **options):
    """The text of the gradient of attention, lowered for a TPU; nothing is compiled."""
    tokens = jnp.ones((2, 128, 8), dtype)

    def loss(tokens):
        return aj.attention(tokens, tokens, tokens, implementation=NAME, **options).sum()

    return jax.jit(jax.grad(loss)).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()


def test_float32_lowers_where_jax_enables_float64():
    # The tests' strict promotion is for programs of one width.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        lower_for_a_tpu(mask=aj.causal_mask())


def test_more_keys_than_fit_are_refused():
    tokens = jax.ShapeDtypeStruct((2**17, 128), jnp.float32)

    def loss(query, key):
        return aj.attention(query, key, key, implementation=NAME).sum()

    with pytest.raises(NotImplementedError, match=r"gradients of all keys.*: 256 MiB, more"):
        jax.jit(jax.grad(loss, argnums=1)).trace(tokens, tokens)


def test_what_one_precision_cannot_lower_is_not_remembered_for_others():
    with jax.default_matmul_precision("high"):
        if jax.__version_info__ < (0, 12):  # which lowers "high", too
            with pytest.raises(NotImplementedError, match="HIGH"):
                lower_for_a_tpu()
        assert "attention_backward" in lower_for_a_tpu(dtype=jnp.bfloat16)
    lower_for_a_tpu()
