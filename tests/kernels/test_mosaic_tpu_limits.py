"""The Pallas TPU kernels: what they cannot serve, and what JAX lowers for a TPU without one."""

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj

NAME = "mosaic_tpu"


def attend(score="scaled", dtype=jnp.float32, length=128, **options):
    tokens = jnp.ones((length, 8), dtype)
    return aj.attention(tokens, tokens, tokens, score=score, implementation=NAME, **options)


def by_sorting(q, k):
    return jnp.sort(q)[:, :1] + jnp.sort(k)[:, :1].T


MATRIX = jnp.ones((8, 8))


def by_a_matrix(q, k):
    return q @ MATRIX @ k.T


REFUSED = {
    # Other arguments of `force_tpu_interpret_mode` fail where a gradient is taken.
    r"runs on a TPU, not on cpu: use 'tiled', or .*force_tpu_interpret_mode\(True\)": {},
    "cannot run by_sorting in its kernels: .*: sort": {"score": by_sorting},
    "by_sorting, which may have an infinite slope": {
        "score": by_sorting, "mask": aj.causal_mask()},
    r"\(a length that is no multiple of the tile counts as one\)": {
        "score": by_sorting, "length": 130},
    r"by_a_matrix, which reads arrays \[8, 8\] that .*pass them as params": {"score": by_a_matrix},
    "float32 or bfloat16.* got float16": {"dtype": jnp.float16},
    "float32 or bfloat16.* got float64": {"dtype": jnp.float64},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_call_that_it_cannot_serve_says_why(words):
    line = f"^implementation 'mosaic_tpu' .*{words}"
    with jax.enable_x64("float64" in words), pytest.raises(NotImplementedError, match=line):
        attend(**REFUSED[words])


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

    gradient = jax.jit(jax.grad(loss, argnums=1)).trace(tokens, tokens)
    with pytest.raises(NotImplementedError, match=r"gradients of all keys.*: 256 MiB, more"):
        gradient.lower(lowering_platforms=("tpu",))


def test_what_one_precision_cannot_lower_is_not_remembered_for_others():
    with jax.default_matmul_precision("high"):
        if jax.__version_info__ < (0, 12):  # which lowers "high", too
            with pytest.raises(NotImplementedError, match="HIGH"):
                lower_for_a_tpu()
        assert "attention_backward" in lower_for_a_tpu(dtype=jnp.bfloat16)
    lower_for_a_tpu()
