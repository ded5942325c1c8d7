"""Weights on request: outside of `jit`, nothing of size T S is made that was not asked for.

What a call makes without `jit` is what its jaxpr names: dead code is eliminated later, if at all.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from numpy_model import scrambled
from products import equations

from attention_jax.nn import CrossAttention, LocalMAttention, LocalPAttention, Model, ModelConfig

# Primes, longer than tiles are: no product of other sizes is a multiple of T S. Where a module does
# not name the implementation, these sizes choose tiles.
T, S, D, V = 1031, 1033, 4, 3


def largest(function, *arguments):
    """The largest shape, of all arrays in a function, with T or S twice among its factors."""
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    shapes = [leaf.aval.shape for equation in equations(program) for leaf in equation.outvars]
    return max(filter(quadratic, shapes), key=math.prod, default=None)


def quadratic(shape):
    size = math.prod(shape)
    return size > 0 and any(size % (one * other) == 0 for one in (T, S) for other in (T, S))


QUERY, MEMORY = jnp.ones((1, T, D)), jnp.ones((1, S, D))
TILED = {"implementation": "tiled"}
SENTENCES = (jnp.ones((1, S), int), jnp.array([S - 2]), jnp.ones((1, T), int))


def made(module_class, *arguments, **options):
    return scrambled(lambda: module_class(*arguments, **options, rngs=nnx.Rngs(0)))[0]


def config(architecture="encoder-decoder", **settings):
    return ModelConfig(architecture, score="dot", dim=D, hidden_dim=5, **settings)


MODELS = {name: made(Model, config(name), V) for name in ("encoder-decoder", "decoder")}
CROSS = made(CrossAttention, config(num_heads=2))
MODULES = {
    "local-m": (made(LocalMAttention, "dot", D, D, radius=2, **TILED), (QUERY, MEMORY)),
    "local-p": (made(LocalPAttention, "dot", D, D, radius=2, **TILED), (QUERY, MEMORY)),
    "cross, heads": (CROSS, (QUERY, MEMORY)),
    # Multi-head attention to itself, then attention with one head.
    **{name: (model, SENTENCES) for name, model in MODELS.items()},
    "packed": (
        functools.partial(MODELS["encoder-decoder"], segments=[SENTENCES[0], SENTENCES[2]]),
        (SENTENCES[0], None, SENTENCES[2]),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_weights_only_on_request(name):
    module, arguments = MODULES[name]
    assert largest(module, *arguments) is None
    assert largest(functools.partial(module, return_weights=True), *arguments) is not None


def test_greedy_decoding_makes_no_weights_either():
    ends = {"max_length": T, "sos": 1, "eos": 2, "pad": 0}
    decode = functools.partial(MODELS["encoder-decoder"].greedy_decode, **ends)
    assert largest(decode, *SENTENCES[:2]) is None
    assert largest(MODELS["encoder-decoder"].encode, *SENTENCES[:2]) is None
    short = functools.partial(decode, max_length=3)
    assert jax.eval_shape(short, SENTENCES[0][:, :5], jnp.array([4])).weights is None
