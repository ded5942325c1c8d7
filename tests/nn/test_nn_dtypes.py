"""dtype, param_dtype, kernel_init and bias_init, against Flax's own layer and across modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import normal, run_jit, scrambled

from attention_jax.nn import (
    Attention,
    CoverageAttention,
    LocalPAttention,
    MonotonicAttention,
    MultiHeadAttention,
)

B, T, S, D = 2, 5, 7, 12
QUERY, MEMORY = normal(B, T, D), normal(B, S, D, seed=3)
INITS = {"kernel_init": nnx.initializers.normal(0.3), "bias_init": nnx.initializers.normal(0.5)}


@pytest.mark.parametrize(
    "dtypes",
    [
        {},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.float32, "param_dtype": jnp.float16},
        {"dtype": jnp.bfloat16, "param_dtype": jnp.float16},
    ],
    ids=str,
)
def test_scaled_with_these_settings_is_flax(dtypes):
    options = {"use_bias": True, **INITS, **dtypes}
    ours = MultiHeadAttention("scaled", D, num_heads=3, **options, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(3, D, **options, decode=False, rngs=nnx.Rngs(0))
    for name, peer in (("query", "query"), ("key", "key"), ("value", "value"), ("output", "out")):
        one, other = (nnx.state(x) for x in (getattr(ours, name), getattr(theirs, peer)))
        jax.tree.map(np.testing.assert_array_equal, one, other)  # drawn with the same keys
        dtype = dtypes.get("param_dtype", jnp.float32)
        assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype(dtype)}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        output, expected = run_jit(lambda x, y: (ours(x, y), theirs(x, y)), QUERY, MEMORY)
    assert output.dtype == expected.dtype == dtypes.get("dtype", jnp.float32)
    rough = jnp.bfloat16 in dtypes.values()
    wide = (np.asarray(x, np.float32) for x in (output, expected))
    np.testing.assert_allclose(*wide, atol=0.1 if rough else 2e-5)


MODULES = {
    "attention": (functools.partial(Attention, "additive", D, D), (QUERY, MEMORY)),
    "multi-head": (
        functools.partial(MultiHeadAttention, "additive", D, num_heads=2, normalize_qk=True),
        (QUERY, MEMORY),
    ),
    "local-p": (
        functools.partial(LocalPAttention, "general", D, D, radius=2),
        (QUERY, MEMORY),
    ),
    "coverage": (functools.partial(CoverageAttention, "additive", D, D), (QUERY, MEMORY)),
    "monotonic": (functools.partial(MonotonicAttention, "additive", D, D), (QUERY, MEMORY)),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_takes_dtypes(name):
    make, arguments = MODULES[name]
    plain = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    half, wide = scrambled(
        lambda: make(rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.float16), noise=0.1
    )
    params, narrow = (nnx.to_pure_dict(nnx.state(x)) for x in (plain, half))
    for one, other in zip(*map(jax.tree.leaves, (params, narrow)), strict=True):
        assert (one.dtype, other.dtype) == (jnp.float32, jnp.float16)
    wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), wide)
    plain = nnx.merge(nnx.graphdef(plain), wide)

    def first(found):
        return found if isinstance(found, jax.Array) else found[0]

    with jax.numpy_dtype_promotion("standard"):  # in Flax's layer normalisation
        outputs = run_jit(
            lambda *arguments: [first(module(*arguments)) for module in (plain, half)], *arguments
        )
    assert [output.dtype for output in outputs] == [jnp.float32, jnp.bfloat16]
    one, other = (np.asarray(output, np.float32) for output in outputs)
    np.testing.assert_allclose(other, one, atol=0.05 * max(1, np.max(np.abs(one))))
    assert np.any(one != other)


def test_initializers_reach_every_projection():
    """Each kernel and bias, and nothing else, is what the initializers make it."""
    ones = {"kernel_init": nnx.initializers.ones, "bias_init": nnx.initializers.constant(2.0)}
    options = {"num_heads": 2, "use_bias": True, "output_gate": True, "normalize_qk": True, **ones}
    module, expected = MultiHeadAttention("additive", D, **options, rngs=nnx.Rngs(0)), {}
    for path, param in nnx.to_flat_state(nnx.state(module)):
        if path[-1] in ("kernel", "bias"):
            expected.setdefault(path[0], set()).add(path[-1])
            np.testing.assert_array_equal(param[...], {"kernel": 1.0, "bias": 2.0}[path[-1]])
        else:
            assert np.any(np.asarray(param[...]) != 2.0), path
    names = ("query", "key", "value", "output", "gate")
    assert expected == {name: {"kernel", "bias"} for name in names}
