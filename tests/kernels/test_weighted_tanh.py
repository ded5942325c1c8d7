"""The tiles of additive attention in kernels for a TPU, interpreted, at every kind of tile size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention_jax.kernels.mosaic_tpu.weighted_tanh import weighted_tanh, weighted_tanh_vjp


def in_kernel(function, *args):
    """The function in a kernel that reads all arguments at once."""
    shapes = jax.eval_shape(function, *args)

    def kernel(*refs):
        results = function(*(ref[...] for ref in refs[: len(args)]))
        for ref, result in zip(refs[len(args) :], jax.tree.leaves(results), strict=True):
            ref[...] = result

    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    leaves = jax.tree.leaves(shapes)
    return pl.pallas_call(kernel, out_shape=leaves, interpret=interpret)(*args)


@pytest.mark.parametrize(
    ("t", "s", "features"),
    [(128, 512, 3), (256, 384, 18), (128, 128, 16), (128, 256, 1), (128, 128, 130)],
)
def test_against_float64(t, s, features):
    rng = np.random.default_rng(0)
    v, a, b, d = (
        rng.normal(size=shape) for shape in (features, (t, features), (s, features), (t, s))
    )
    h = np.tanh(a[:, None] + b[None])  # [t, s, A]
    slopes = v * (1 - h**2) * d[..., None]
    narrow = [jnp.asarray(x, jnp.float32) for x in (v, a, b, d)]
    (logits,) = in_kernel(weighted_tanh, *narrow[:3])
    np.testing.assert_allclose(logits, h @ v, rtol=2e-6, atol=1e-5)
    dv, da, db = in_kernel(weighted_tanh_vjp, *narrow)
    np.testing.assert_allclose(dv, np.einsum("ij,ijf->f", d, h), atol=3e-4)
    np.testing.assert_allclose(da, slopes.sum(1), atol=1e-4)
    np.testing.assert_allclose(db, slopes.sum(0), atol=1e-4)
