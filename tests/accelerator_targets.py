"""TPUs and GPUs that are not here: their compilers run on a CPU, and say what a program would do.

A test that uses them is marked `accelerators`, and skipped where a compiler is not installed.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from benchmarks.compilation import targets


def custom_calls(compiled: Any) -> list[str]:
    """The targets of the custom calls of a compiled program."""
    return re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())


def gradient_on_h100(
    implementation: str, score: aj.Score, tokens: Any, mask: Any, value_dim: int, **options: Any
) -> tuple[Any, tuple[Any, ...], Any]:
    """Attention for an H100: the gradient of a sum, its arguments, and attention alone.

    Args:
        implementation: of `attention`.
        score: the score.
        tokens: the shape and dtype of queries and keys, [*B, T, D].
        mask: lengths, int32 [B, 1, ...] -> a mask.
        value_dim: Dv.
        **options: further ones of `attention`.
    """
    if reason := targets.missing_compiler(targets.H100):
        pytest.skip(reason)
    device = targets.device(targets.H100)
    dim = tokens.shape[-1]
    params = jax.eval_shape(lambda rng: score.init(rng, dim, dim), jax.random.key(0))
    values = jax.ShapeDtypeStruct((*tokens.shape[:-1], value_dim), tokens.dtype)
    batch = tokens.shape[:-2]
    lengths = jax.ShapeDtypeStruct((*batch[:1], *[1] * len(batch[1:])), jnp.int32)
    arguments = jax.tree.map(
        lambda leaf: targets.array(leaf.shape, leaf.dtype, device),
        (params, tokens, tokens, values, lengths),
    )

    def attend(params: Any, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return aj.attention(
            query, key, value, score=score, params=params, mask=mask(lengths),
            implementation=implementation, **options,
        )  # fmt: skip

    def loss(*arguments: Any) -> jax.Array:
        results = jax.tree.leaves(attend(*arguments))
        return sum(leaf.astype(jnp.float32).sum() for leaf in results)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), arguments, jax.jit(attend)
