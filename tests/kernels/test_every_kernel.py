"""What all kernels have in common: shared keys, further derivatives, and what they refuse."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import assert_within, draw, in_float64, results, runnable

import attention_jax as aj


class Case(NamedTuple):
    """A call of an implementation."""

    score: Any
    lengths: tuple[int, int]
    dims: tuple[int, int, int]
    dtype: Any
    bounds: tuple[float, float]
    mask: Any


MASK = aj.padding_mask(jnp.array([4, 0]), jnp.array([3, 5])) & aj.causal_mask()
CASES = {
    "cudnn": Case(aj.General(), (5, 7), (11, 11, 13), jnp.bfloat16, (2**-6, 2**-6), MASK),
    "mosaic_tpu": Case(aj.ScaledDot(), (130, 140), (11, 11, 3), jnp.float32, (2e-5, 1e-4), MASK),
    "mosaic_gpu": Case(aj.Additive(6), (67, 71), (5, 7, 2), jnp.float32, (2e-5, 1e-4), MASK),
}
every_kernel = pytest.mark.parametrize(
    "name", ["cudnn", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[1:])]
)


@functools.cache
def arrays_of(name):
    """(the case, ((query, key, value, params), cotangent of the output))"""
    case = CASES[name]
    return case, draw(case.score, case.lengths, case.dims, case.dtype)


@every_kernel
def test_examples_share_keys(name):
    case, ((query, key, value, params), doutput) = arrays_of(name)
    shared = query, key[:1], value[0], params
    of = functools.partial(results, score=case.score, mask=None, statistics=False)

    def expected(arrays, doutput):
        return of("reference", arrays=arrays, doutput=doutput)

    with runnable(name):
        got = of(name, arrays=shared, doutput=doutput)
    assert_within(got, in_float64(expected, shared, doutput), case.bounds)


@every_kernel
def test_forward_mode_and_second_derivatives(name):
    case, (arrays, doutput) = arrays_of(name)
    tangents = jax.tree.map(jnp.cos, arrays)

    def derivatives(implementation, arrays, tangents, doutput):
        def both(*arrays):
            return results(implementation, case.score, case.mask, arrays, doutput, False)

        return jax.jvp(both, arrays, tangents)[1]  # its first entry is forward mode

    expected = in_float64(functools.partial(derivatives, "reference"), arrays, tangents, doutput)
    with runnable(name):
        got = jax.jit(functools.partial(derivatives, name))(arrays, tangents, doutput)
    assert_within(got, expected, case.bounds)


@pytest.mark.parametrize("name", CASES)
def test_no_pairs(name):
    case, ((query, key, value, params), _) = arrays_of(name)
    arguments = {"score": case.score, "params": params, "implementation": name}
    with runnable(name):
        output = aj.attention(query, key[:, :0], value[:, :0], **arguments)
        if name != "cudnn":  # which takes values with features
            aj.attention(query, key, value[..., :0], return_statistics=True, **arguments)
    np.testing.assert_array_equal(output, jnp.zeros((*query.shape[:2], value.shape[-1])))


REFUSED = {
    "softmax without a sink, not Entmax": {"normalizer": "sparsemax"},
    "softmax without a sink, not Softmax": {
        "normalizer": "softmax(sink=True)", "normalizer_params": {"sink": jnp.ones(())}},
    "dropout_rate 0.5": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
    "has no bias": {"bias": aj.alibi_bias(jnp.array(0.5))},
    "conjunctions; got DenseMask": {"mask": jnp.ones((1, 1), bool)},
    "conjunctions; got OrMask": {"mask": aj.causal_mask() | aj.local_mask(1, 1)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("words", REFUSED)
def test_what_no_kernel_serves_is_refused(name, words):
    case, ((query, key, value, params), _) = arrays_of(name)
    line = f"^implementation '{name}' .*{words}.*: use 'tiled'"
    arguments = {"score": case.score, "params": params, "implementation": name, **REFUSED[words]}
    with pytest.raises(NotImplementedError, match=line):
        aj.attention(query, key, value, **arguments)


@pytest.mark.parametrize("name", CASES)
def test_symbolic_lengths_are_refused(name):
    case, ((query, key, value, params), _) = arrays_of(name)
    (length,) = jax.export.symbolic_shape("n")
    query = jax.ShapeDtypeStruct((2, length, query.shape[-1]), query.dtype)
    attend = jax.jit(
        lambda query: aj.attention(
            query, key, value, score=case.score, params=params, implementation=name
        )
    )
    with pytest.raises(NotImplementedError, match=f"'{name}' needs known lengths; got T = n"):
        attend.trace(query)


def test_gradients_lower_inside_shard_map():
    """`jax.shard_map` asks over which axes of the mesh a result varies."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = jax.sharding.PartitionSpec("data")

    def lowered(name, platform, check):
        case, ((*tokens, params), _) = arrays_of(name)
        attend = functools.partial(
            aj.attention, score=case.score, params=params, implementation=name
        )
        sharded = jax.shard_map(attend, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=check)
        gradient = jax.jit(jax.grad(lambda *tokens: sharded(*tokens).sum(), (0, 1, 2)))
        return gradient.trace(*tokens).lower(lowering_platforms=(platform,)).as_text()

    assert "attention_backward" in lowered("mosaic_tpu", "tpu", True)
    assert "attention_gradient" in lowered("mosaic_gpu", "cuda", False)
    with pytest.raises(NotImplementedError, match="needs check_vma=False"):
        lowered("mosaic_gpu", "cuda", True)
