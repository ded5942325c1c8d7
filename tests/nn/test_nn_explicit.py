"""Modules on a mesh with Explicit axes, the kind that `jax.make_mesh` makes, of eight devices.

Batches are sharded over it, under `jax.set_mesh`; parameters are replicated. The forward pass and
the gradient must equal those of one device, and the outputs must be sharded as the inputs are.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from numpy_model import scrambled
from oracles import assert_close

from attention_jax import padding_mask
from attention_jax.nn import CrossAttention, Model, ModelConfig

B, T, S, D, V = 8, 5, 7, 8, 11


def arrays():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(B, T, D)),
        "y": rng.normal(size=(B, S, D)),
        "lengths": np.array([1, 2, 3, 4, 5, 6, 7, 7], np.int32),
        "source": rng.integers(3, V, (B, S), np.int32),
        "target": rng.integers(3, V, (B, T), np.int32),
    }


@contextlib.contextmanager
def float64_and_mesh():
    # Flax's layer normalisation promotes float64 and float32.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield jax.make_mesh((8,), ("data",))


def gradient_and_output(make, call, names):
    """Returns (function, params, inputs); the function computes a gradient and `call`'s output."""
    graph, state = nnx.split(scrambled(lambda: make(rngs=nnx.Rngs(0)))[0])
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), nnx.to_pure_dict(state))
    rng = jax.random.key(3)

    def loss(params, *inputs):
        output = call(nnx.merge(graph, params), *inputs, rng)
        floats = [leaf for leaf in jax.tree.leaves(output) if leaf.dtype == jnp.float64]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in floats), output

    inputs = [jnp.asarray(arrays()[name]) for name in names]
    return jax.grad(loss, has_aux=True), params, inputs


def placed(params, inputs, mesh):
    """Returns the parameters replicated and the inputs sharded over the batch."""
    shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",))]
    return jax.device_put(params, shardings[0]), *jax.device_put(inputs, shardings[1])


def assert_sharded_over_the_batch(output):
    for leaf in jax.tree.leaves(output):
        axis = leaf.shape.index(B)  # weights have a layer's axis before the batch's
        assert leaf.sharding.spec[axis] == "data", (leaf.shape, leaf.sharding)


def check(make, call, *names):
    """Compares `call(module, *arrays)` and its parameter gradient on one device and on eight."""
    with float64_and_mesh() as mesh:
        function, params, inputs = gradient_and_output(make, call, names)
        both = jax.jit(function)
        expected = both(params, *inputs)
        with jax.set_mesh(mesh):
            got = both(*placed(params, inputs, mesh))
        assert_sharded_over_the_batch(got[1])
        assert_close("", got, expected, 1e-10, terms=1.0)


def check_types(make, call, *names):
    """Checks the types of the same results, which contain their shardings; compiles nothing."""
    with float64_and_mesh() as mesh:
        function, params, inputs = gradient_and_output(make, call, names)
        with jax.set_mesh(mesh):
            gradient, output = jax.eval_shape(function, *placed(params, inputs, mesh))
        assert_sharded_over_the_batch(output)
        for leaf in jax.tree.leaves(gradient):
            assert not any(leaf.sharding.spec), (leaf.shape, leaf.sharding)


def cross_attention(check):
    for settings in (
        {"normalizer": "log_scaled(start=3)"}, {"attention": "local-m"}, {"attention": "local-p"},
        {"attention": "coverage"}, {"attention": "monotonic"},
    ):  # fmt: skip
        config = ModelConfig(score="additive", dim=D, **settings)

        def call(module, x, y, lengths, rng):
            options = {"lengths": lengths, "mask": padding_mask(lengths)}
            return module(x, y, **options, rng=rng, return_weights=True)

        check(functools.partial(CrossAttention, config), call, "x", "y", "lengths")


def model(check):
    for settings in (
        {"dropout_rate": 0.3, "positions": "learned", "position_anchor": "both",
         "position_limit": 9, "decoder_self_attention": False},
        {"architecture": "decoder", "positions": "rotary", "num_heads": 4, "num_key_heads": 2,
         "normalize_qk": True},
    ):  # fmt: skip
        config = ModelConfig(score="general", dim=D, hidden_dim=7, **settings)

        def call(model, source, lengths, target, rng):
            return model(source, lengths, target, rng=rng)

        check(functools.partial(Model, config, V), call, "source", "lengths", "target")


def decoding(check):
    config = ModelConfig(dim=D, hidden_dim=7, encoder_layers=0)
    ends = {"max_length": 4, "sos": 1, "eos": 2, "pad": 0}

    def call(model, source, lengths, rng):
        greedy = model.greedy_decode(source, lengths, **ends, return_weights=True)
        beams = model.beam_decode(source, lengths, beams=2, **ends)
        return greedy.tokens, greedy.weights, beams.tokens

    check(functools.partial(Model, config, V), call, "source", "lengths")


@pytest.mark.parametrize("of", [cross_attention, model, decoding])
@pytest.mark.parametrize("compare", [check_types, pytest.param(check, marks=pytest.mark.slow)])
def test_on_eight_devices(of, compare):
    of(compare)
