"""Kernels against the reference in float64: output, statistics and gradients.

What a mask hides is poisoned: hidden tokens are NaN and infinite, and so are the cotangents of rows
without keys.
"""

import contextlib
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from oracles import assert_close
from quick_compilation import quick_jit

import attention_jax as aj
from attention_jax.kernels import cudnn

# Bounds of the numerics contract, forward and backward, and of 16 bits: some roundings to 2^-8.
FLOAT32, BFLOAT16 = (2e-6, 2e-5), (2**-6, 2**-5)


@contextlib.contextmanager
def runnable(name: str):
    """An implementation computes on this CPU: interpreted by JAX; for cuDNN, XLA stands in."""
    if name == "cudnn":
        # XLA's attention promotes dtypes.
        with mock.patch.object(cudnn, "LIBRARY", "xla"), jax.numpy_dtype_promotion("standard"):
            yield
    elif name == "mosaic_tpu":
        with pltpu.force_tpu_interpret_mode(True):  # which `jax.jit` compiles
            yield
    else:  # JAX's interpreter of these kernels is not public yet
        params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
        with params.force_gpu_interpret_mode(params.InterpretGPUParams(uninitialized_memory="nan")):
            yield


def draw(score: Any, lengths: tuple[int, int], dims: tuple[int, int, int], dtype=jnp.float32):
    """((query, key, value, params), cotangent of the output) of two examples, as `dtype` has them.

    Args:
        score: a `Score`.
        lengths: (T, S).
        dims: (Dq, Dk, Dv).
        dtype: of all arrays.
    """
    rng = np.random.default_rng(3)
    shapes = zip((lengths[0], lengths[1], lengths[1], lengths[0]), (*dims, dims[2]), strict=True)
    arrays = [rng.normal(size=(2, *shape)) for shape in shapes]
    if score.translation_invariant:
        arrays[:2] = (array + 50 for array in arrays[:2])
    arrays.insert(3, score.init(jax.random.key(3), *dims[:2]))
    *arrays, doutput = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), arrays)
    return tuple(arrays), doutput


def results(implementation, score, mask, arrays, doutput, statistics=True):
    """The output, the statistics, and the gradients of the arrays, which depend on both."""

    def attend(query, key, value, params):
        got = aj.attention(
            query, key, value, score=score, params=params, mask=mask,
            return_statistics=statistics, implementation=implementation,
        )  # fmt: skip
        return got if statistics else (got, None)

    (output, of_rows), pull_back = jax.vjp(attend, *arrays)
    drows = jax.tree.map(lambda row: jnp.where(jnp.isfinite(row), jnp.sin(row), 0), of_rows)
    return output, of_rows, pull_back((doutput, drows))


def in_float64(function, *arguments):
    def wide(tree):
        return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), tree)

    with jax.enable_x64(True):
        return wide(quick_jit(function)(*jax.tree.map(jnp.asarray, wide(arguments))))


def assert_within(got, expected, bounds):
    """Within (forward, backward), relative to the largest entry of each array."""
    forward, backward = bounds
    assert_close("output", got[0], expected[0], forward)
    # Rows that are one-hot in float32 have entropies of 1e-8 nats.
    assert_close("statistics", got[1], expected[1], forward, terms=1e-6)
    assert_close("gradients", got[2], expected[2], backward)


def check(implementation, score, mask, arrays, doutput, bounds=FLOAT32, statistics=True):
    """Asserts the bounds, and that what the mask hides reaches nothing and gets gradient 0."""
    query, key, value, params = arrays
    shape = (*doutput.shape[:-1], key.shape[-2])
    table = np.ones(shape, bool)
    if mask is not None:
        table = np.broadcast_to(mask.materialize(*shape[-2:]), shape)
    no_keys = ~table.any(-1)[..., None]
    no_queries = _seen_by_none(~table.any(-2)[..., None], key.shape[:-2])
    no_queries_of_value = _seen_by_none(~table.any(-2)[..., None], value.shape[:-2])
    reference = functools.partial(results, "reference", score, mask, statistics=statistics)
    expected = in_float64(reference, arrays, jnp.where(no_keys, 0, doutput))
    if mask is not None:
        query = jnp.where(no_keys, jnp.nan, query)
        key = jnp.where(no_queries, jnp.inf, key)
        value = jnp.where(no_queries_of_value, jnp.nan, value)
    attend = functools.partial(results, implementation, score, mask, statistics=statistics)
    doutput = jnp.where(no_keys, jnp.nan, doutput)
    got = quick_jit(attend)((query, key, value, params), doutput)
    assert_within(got, expected, bounds)
    output, _, (dquery, dkey, dvalue, _) = got
    assert output.dtype == query.dtype
    of_tokens = [(no_keys, output), (no_keys, dquery)]
    for hidden, array in (*of_tokens, (no_queries, dkey), (no_queries_of_value, dvalue)):
        assert not np.any(np.where(hidden, array, 0))


def _seen_by_none(hidden, batch_shape):
    """Whether all examples that share a key hide it: bool [*B, S, 1] -> [*batch_shape, S, 1]."""
    hidden = hidden.all(tuple(range(hidden.ndim - 2 - len(batch_shape))))
    shared = tuple(axis for axis, size in enumerate(batch_shape) if size == 1)
    return hidden.all(shared, keepdims=True)
