"""dtype, param_dtype, kernel_init and bias_init, against Flax's own layer and across modules."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit
from oracles import normal

from attention_jax import nn

B, T, S, D = 2, 5, 7, 12
QUERY, MEMORY = normal(B, T, D), normal(B, S, D, seed=3)
INITS = {"kernel_init": nnx.initializers.normal(0.3), "bias_init": nnx.initializers.normal(0.5)}


@pytest.mark.parametrize(
    "dtypes",
    [
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "param_dtype": jnp.float16},
    ],
    ids=str,
)
def test_scaled_with_these_settings_is_flax(dtypes):
    options = {"use_bias": True, **INITS, **dtypes}
    ours = nn.MultiHeadAttention("scaled", D, num_heads=3, **options, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(3, D, **options, decode=False, rngs=nnx.Rngs(0))
    for name, peer in (("query", "query"), ("key", "key"), ("value", "value"), ("output", "out")):
        one, other = (nnx.state(x) for x in (getattr(ours, name), getattr(theirs, peer)))
        chex.assert_trees_all_equal(one, other)  # drawn with the same keys
        dtype = dtypes.get("param_dtype", jnp.float32)
        assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype(dtype)}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        output, expected = run_jit(lambda x, y: (ours(x, y), theirs(x, y)), QUERY, MEMORY)
    assert output.dtype == expected.dtype == dtypes.get("dtype", jnp.float32)
    rough = jnp.bfloat16 in dtypes.values()
    wide = (np.asarray(x, np.float32) for x in (output, expected))
    np.testing.assert_allclose(*wide, atol=0.1 if rough else 2e-5)


MODULES = {
    "attention": functools.partial(nn.Attention, "additive", D, D),
    "local-p": functools.partial(nn.LocalPAttention, "general", D, D, radius=2),
    "coverage": functools.partial(nn.CoverageAttention, "additive", D, D),
    "monotonic": functools.partial(nn.MonotonicAttention, "additive", D, D),
}


def test_every_module_takes_dtypes():
    """And casts each of its parameters: JAX is strict about promotion in the tests."""
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.float16}
    for name, make in MODULES.items():

        def made(make=make):
            module = make(rngs=nnx.Rngs(0), **dtypes)
            return module, module(QUERY, MEMORY)

        module, output = nnx.eval_shape(made)
        found = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module))}
        assert found == {jnp.dtype(jnp.float16)}, name
        assert output.dtype == jnp.bfloat16, name


def test_initializers_reach_every_projection():
    """Each kernel and bias, and nothing else, is what the initializers make it."""
    ones = {"kernel_init": nnx.initializers.ones, "bias_init": nnx.initializers.constant(2.0)}
    options = {"num_heads": 2, "use_bias": True, "output_gate": True, "normalize_qk": True, **ones}
    module = run_jit(
        lambda: nnx.to_pure_dict(
            nnx.state(nn.MultiHeadAttention("additive", D, **options, rngs=nnx.Rngs(0)))
        )
    )
    expected = {"kernel": 1.0, "bias": 2.0}
    for name, params in module.items():
        if name in ("query", "key", "value", "output", "gate"):
            assert params.keys() == expected.keys()
            for kind, leaf in params.items():
                np.testing.assert_array_equal(leaf, expected[kind])
        else:
            assert np.all([np.any(leaf != 2.0) for leaf in jax.tree.leaves(params)]), name
    assert {*module} > {"query", "key", "value", "output", "gate"}


def layer_norms():
    """Every layer normalisation: of a model as it is now and as it was, and of a layer."""
    for architecture, fast in (("encoder-decoder", False), ("decoder", False), ("decoder", True)):
        config = nn.ModelConfig(architecture, dim=8, normalize_qk=True, fast_variance=fast)
        yield nn.Model(config, 11, rngs=nnx.Rngs(0)), fast
    yield nn.MultiHeadAttention("dot", 8, num_heads=2, normalize_qk=True, rngs=nnx.Rngs(0)), False


def test_layer_norms_keep_the_digits_beside_a_large_mean():
    """A deviation of 1 around 10,000; models of before go on as they began."""
    x = np.float32(1e4) + normal(3, 8)
    wide = np.asarray(x, np.float64)
    for module, fast in layer_norms():
        norms = [norm for _, norm in nnx.iter_modules(module) if isinstance(norm, nnx.LayerNorm)]
        assert norms
        for norm in norms:
            part = wide[:, : norm.num_features]
            expected = (part - part.mean(-1, keepdims=True)) / part.std(-1, keepdims=True)
            error = np.max(np.abs(norm(x[:, : norm.num_features]) - expected))
            assert (error > 1) == fast, error
            assert (error < 3e-3) != fast, error
