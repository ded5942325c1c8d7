"""Checks of test_nn_explicit.py, which run on eight devices.

Batches are sharded over a mesh of `jax.make_mesh`, with `Explicit` axes, under `jax.set_mesh`;
parameters are replicated. The forward pass and the gradient must equal those of one device, and the
outputs must be sharded as the inputs are.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from attention_jax import causal_mask, padding_mask
from attention_jax.nn import (
    CrossAttention,
    Model,
    ModelConfig,
    MultiHeadAttention,
)

B, T, S, D, V = 8, 5, 7, 8, 11
RNGS = {"rngs": nnx.Rngs(0), "keep_rngs": False}  # of multi-head attention


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


def gradient_and_output(module, call, names):
    """Returns (function, params, inputs); the function computes a gradient and `call`'s output."""
    graph, state = nnx.split(module)
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


def check(module, call, *names):
    """Compares `call(module, *arrays)` and its parameter gradient on one device and on eight."""
    with float64_and_mesh() as mesh:
        function, params, inputs = gradient_and_output(module, call, names)
        both = jax.jit(function)
        expected = both(params, *inputs)
        with jax.set_mesh(mesh):
            got = both(*placed(params, inputs, mesh))
        assert_sharded_over_the_batch(got[1])
        for actual, desired in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            scale = max(1, np.max(np.abs(desired)))
            np.testing.assert_allclose(actual, desired, atol=1e-10 * scale)


def check_types(module, call, *names):
    """Checks the types of the same results, which contain their shardings; compiles nothing."""
    with float64_and_mesh() as mesh:
        function, params, inputs = gradient_and_output(module, call, names)
        with jax.set_mesh(mesh):
            gradient, output = jax.eval_shape(function, *placed(params, inputs, mesh))
        assert_sharded_over_the_batch(output)
        for leaf in jax.tree.leaves(gradient):
            assert not any(leaf.sharding.spec), (leaf.shape, leaf.sharding)


def multi_head(check=check):
    module = MultiHeadAttention(
        "general", D, num_heads=4, num_key_heads=2, normalize_qk=True, rotary_wavelength=50.0,
        use_bias=True, dropout_rate=0.5, **RNGS,
    )  # fmt: skip

    def call(module, x, y, lengths, rng):
        own = module(x, mask=causal_mask(), dropout_rng=rng)
        return own, module(x, y, mask=padding_mask(lengths), deterministic=True)

    check(module, call, "x", "y", "lengths")


def cache(check=check):
    module = MultiHeadAttention("scaled", D, num_heads=2, rotary_wavelength=50.0, **RNGS)

    def call(module, x, rng):
        state, outputs = module.empty_cache((B,), T, x.dtype), []
        for step in range(2):
            output, state = module.extend(x[:, step : step + 1], state)
            outputs.append(output)
        return jnp.concatenate(outputs, axis=-2)

    check(module, call, "x")


def cross_attention(check=check):
    for settings in (
        {"normalizer": "log_scaled(start=3)"}, {"attention": "local-m"}, {"attention": "local-p"},
        {"attention": "coverage"}, {"attention": "monotonic"},
    ):  # fmt: skip
        module = CrossAttention(ModelConfig(score="additive", dim=D, **settings), rngs=nnx.Rngs(0))

        def call(module, x, y, lengths, rng):
            options = {"lengths": lengths, "mask": padding_mask(lengths)}
            return module(x, y, **options, rng=rng, return_weights=True)

        check(module, call, "x", "y", "lengths")


def model(check=check):
    for settings in (
        {
            "dropout_rate": 0.3,
            "positions": "learned",
            "position_anchor": "both",
            "position_limit": 9,
        },
        {"architecture": "decoder", "positions": "rotary"},
    ):
        config = ModelConfig(score="general", dim=D, hidden_dim=7, **settings)

        def call(model, source, lengths, target, rng):
            return model(source, lengths, target, rng=rng)

        check(Model(config, V, rngs=nnx.Rngs(0)), call, "source", "lengths", "target")


def decoding(check=check):
    model = Model(ModelConfig(dim=D, hidden_dim=7), V, rngs=nnx.Rngs(0))
    ends = {"max_length": 4, "sos": 1, "eos": 2, "pad": 0}

    def call(model, source, lengths, rng):
        greedy = model.greedy_decode(source, lengths, **ends, return_weights=True)
        beams = model.beam_decode(source, lengths, beams=2, **ends)
        return greedy.tokens, greedy.weights, beams.tokens

    check(model, call, "source", "lengths")


SLOW = {check.__name__: check for check in (multi_head, cache, cross_attention, model, decoding)}
CHECKS = {f"types_of_{name}": functools.partial(check, check_types) for name, check in SLOW.items()}

if __name__ == "__main__":
    eight_devices.run({**CHECKS, **SLOW}, sys.argv[1:])
