"""The tiles of additive attention in kernels for a TPU, interpreted, at every kind of tile size."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from oracles import normal
from score_cases import slow_unless

from attention_jax.experimental.mosaic_tpu.tanh_tiles import tanh_tile, tanh_tile_vjp


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
    slow_unless([(128, 256, 6)], [(128, 256, 6), (256, 384, 1), (128, 128, 130)]),
)
def test_against_float64(t, s, features):
    arrays = [normal(*shape) for shape in ((features,), (t, features), (s, features), (t, s))]
    v, a, b, d = map(np.float64, arrays)
    h = np.tanh(a[:, None] + b[None])  # [t, s, A]
    slopes = v * (1 - h**2) * d[..., None]
    (logits,) = in_kernel(tanh_tile, *arrays[:3])
    np.testing.assert_allclose(logits, h @ v, rtol=2e-6, atol=1e-5)
    expected = np.einsum("ij,ijf->f", d, h), slopes.sum(1), slopes.sum(0)
    for got, wanted in zip(in_kernel(tanh_tile_vjp, *arrays), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-4)
