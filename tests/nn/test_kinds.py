"""The kinds of attention that are not global: modules against the functions below them.

test_model.py compares the kinds in a model with float64 NumPy.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit, scrambled
from oracles import normal

from attention_jax import nn, padding_mask
from attention_jax.functional.centers import predicted_centers
from attention_jax.functional.coverage import coverage_attention
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.functional.monotonic import monotonic_attention

B, T, S, DV = 2, 5, 7, 13
LENGTHS = jnp.array([7, 4])
MASK = padding_mask(LENGTHS)


def windowed(*, query, lengths, position_kernel=None, position_v=None, **arguments):
    """Of local-m, or of local-p, which has parameters for its centers."""
    arguments |= {"query": query, "centers": jnp.arange(T), "radius": 2}
    if position_v is not None:
        params = {"kernel": position_kernel, "v": position_v}
        arguments |= {"centers": predicted_centers(query, params, lengths), "sigma": 1.0}
    output = local_attention(**arguments)
    del arguments["value"]
    return output, local_attention_weights(**arguments), None


def coverage(*, lengths, **arguments):
    result = coverage_attention(**arguments)
    return result.output, result.weights, result.coverage


def monotonic(*, lengths, **arguments):
    output, weights = monotonic_attention(**arguments)
    return output, weights, weights[:, -1]


KINDS = {  # the class, its options, and the function with the module's own parameters
    "local-m": (nn.LocalMAttention, {"radius": 2}, windowed),
    "local-p": (nn.LocalPAttention, {"radius": 2, "hidden_dim": 4}, windowed),
    "coverage": (nn.CoverageAttention, {}, coverage),
    "monotonic": (nn.MonotonicAttention, {}, monotonic),
}


def make(kind, **options):
    """A module with random parameters, these, and (query, key, value)."""
    made, own, _ = KINDS[kind]
    module, params = scrambled(lambda: made("additive", 3, 11, **own, **options, rngs=nnx.Rngs(2)))
    tokens = normal(B, T, 3), normal(B, S, 11, seed=3), normal(B, S, DV, seed=4)
    return module, jax.tree.map(jnp.float32, params), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_its_function_with_its_parameters(kind):
    """Also with a memory; without weights; and, with a PRNG key, with dropout or noise."""
    rate = {"dropout_rate": 0.5} if kind.startswith("local") else {}
    module, params, tokens = make(kind, **rate)
    bias = normal(T, S, seed=5)
    arguments = {"mask": MASK, "bias": bias, "lengths": LENGTHS}

    def calls(query, key, value):
        names = {"query": query, "key": key, "value": value}
        own = {**params, "params": params.get("params_of_score", {})}
        own.pop("params_of_score", None)
        memory = module.remember(key, value)
        return (
            nn.Attended(*KINDS[kind][2](score="additive", **own, **names, **arguments)),
            module.attend(query, memory, **arguments, return_weights=True),
            module.attend(query, key, value, **arguments),
            jax.vmap(lambda rng: module(query, key, value, **arguments, rng=rng))(
                jax.random.split(jax.random.key(0))
            ),
        )

    expected, of_memory, alone, random = run_jit(calls, *tokens)
    chex.assert_trees_all_close(of_memory, expected, rtol=1e-7, atol=2e-6)
    assert alone.weights is None
    np.testing.assert_allclose(alone.output, expected.output, atol=1e-6)
    if kind != "coverage":
        assert np.all([np.any(np.abs(random[0] - x) > 1e-3) for x in (random[1], expected.output)])


# --- in a decoder ---


@pytest.mark.parametrize("attention", ["coverage", "monotonic"])
def test_the_carry_keeps_its_dtype(attention):
    """It is at least float32, whatever the dtypes of parameters and tokens; so loops need it."""
    config = nn.ModelConfig(score="additive", dim=12, attention=attention)
    graph, state = nnx.split(nnx.eval_shape(lambda: nn.CrossAttention(config, rngs=nnx.Rngs(0))))
    params = nnx.to_pure_dict(state)

    def steps(params, query, memory):
        module = nnx.merge(graph, params)

        def step(carry, token):
            output, _, carry = module(token[:, None], memory, carry=carry)
            return carry, output

        return jax.lax.scan(step, module.first_carry(memory), jnp.swapaxes(query, 0, 1))

    tokens = normal(B, T, 12), normal(B, S, 12, seed=3)
    with jax.enable_x64(True):  # float32 stays float32 there, too
        for dtype, wide in ((jnp.bfloat16, jnp.float32), (jnp.float64, jnp.float64)):
            narrow = jax.tree.map(
                lambda leaf, dtype=dtype: jax.ShapeDtypeStruct(leaf.shape, dtype), (params, *tokens)
            )
            carry, outputs = jax.eval_shape(steps, *narrow)
            assert (carry.dtype, outputs.dtype) == (wide, dtype)
