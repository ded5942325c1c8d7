"""What all kernels have in common: shared keys, further derivatives, and what they refuse."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import assert_within, draw, in_float64, results, runnable
from products import product_dtypes
from score_cases import numpy_params, slow_unless

import attention_jax as aj
from attention_jax.experimental.mosaic_gpu import sum_of_tanh
from attention_jax.experimental.mosaic_tpu.scores import AdditiveOnTpu, DotOnTpu, on_tpu
from attention_jax.experimental.score_forms import form_of
from attention_jax.kernels import preparation
from attention_jax.parts import known_score
from attention_jax.scores import Concat
from attention_jax.scores.literature import Neural
from attention_jax.tiles import Inputs, Options


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
every_kernel = pytest.mark.parametrize("name", slow_unless(["cudnn"], CASES))


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
def test_forward_mode_second_derivatives_and_the_transpose_in_values(name):
    case, (arrays, doutput) = arrays_of(name)
    tangents = jax.tree.map(jnp.cos, arrays)

    def derivatives(implementation, arrays, tangents, doutput):
        def both(*arrays):
            return results(implementation, case.score, case.mask, arrays, doutput, False)

        def of_values(value):
            return aj.attention(
                *arrays[:2], value, score=case.score, params=arrays[3], mask=case.mask,
                implementation=implementation,
            )  # fmt: skip

        pushed = jax.jvp(both, arrays, tangents)[1]  # its first entry is forward mode
        return *pushed[:2], (pushed[2], jax.linear_transpose(of_values, arrays[2])(doutput))

    expected = in_float64(functools.partial(derivatives, "reference"), arrays, tangents, doutput)
    with runnable(name):
        got = jax.jit(functools.partial(derivatives, name))(arrays, tangents, doutput)
    assert_within(got, expected, case.bounds)


def test_other_derivatives_have_no_products_in_16_bits():
    """Whose errors would add up; the bounds for bfloat16 are too wide to see it."""
    options = Options(aj.ScaledDot(), aj.BlockSizes(2, 3))

    def output(tokens):
        return preparation.twin(options, Inputs(tokens, tokens, tokens, {}, None, None, None))[0]

    assert product_dtypes(output, jnp.ones((4, 8), jnp.bfloat16)) == {("float32", "float32")}


@pytest.mark.parametrize("name", CASES)
def test_no_pairs(name):
    case, ((query, key, value, params), _) = arrays_of(name)
    arguments = {"score": case.score, "params": params, "implementation": name}
    with runnable(name):
        output = aj.attention(query, key[:, :0], value[:, :0], **arguments)
        if name != "cudnn":  # which takes values with features
            aj.attention(query, key, value[..., :0], return_statistics=True, **arguments)
    np.testing.assert_array_equal(output, jnp.zeros((*query.shape[:2], value.shape[-1])))


def by_sorting(q, k):
    return jnp.sort(q)[:, :1] + jnp.sort(k)[:, :1].T


MATRIX = jnp.ones((8, 8))


def by_a_matrix(q, k):
    return q @ MATRIX @ k.T


def alike(length, dtype, dim=8):
    """Query, key and value of one array."""
    return dict.fromkeys(("query", "key", "value"), np.ones((2, length, dim), dtype))


WHOLE, RAGGED = ({**alike(n, "f4"), "params": None} for n in (128, 130))  # of a TPU's tiles
OF_ALL = {
    "softmax without a sink, not Entmax": {"normalizer": "sparsemax"},
    "softmax without a sink, not Softmax": {
        "normalizer": "softmax(sink=True)", "normalizer_params": {"sink": jnp.ones(())}},
    "dropout_rate 0.5": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
    "has no bias": {"bias": aj.alibi_bias(jnp.array(0.5))},
    "conjunctions; got DenseMask": {"mask": jnp.ones((1, 1), bool)},
    "conjunctions; got OrMask": {"mask": aj.causal_mask() | aj.local_mask(1, 1)},
}  # fmt: skip
OF_ONE = {
    "cudnn": {
        "dot product of features; got Additive": {
            "score": "additive", "params": numpy_params(aj.Additive(), 11, 11)},
        "dot product of features; got SoftCap": {"score": "softcap", "params": None},
        "got bfloat16, float32": {"query": jnp.ones((2, 5, 11))},
        "max_logit": {"return_statistics": True},
        "features in 16 bits": {**alike(5, "f2"), "score": "distance", "params": None},
        "left 2, right 1": {"mask": aj.local_mask(2, 1)},
        "left 2, right None": {"mask": aj.local_mask(2, None)},
        "left None, right -1": {"mask": aj.causal_mask(-1)},
        "of integers; got one of arrays": {"mask": aj.causal_mask(jnp.array(0))},
        "no padding": {"mask": aj.local_mask(2, 0) & aj.padding_mask(jnp.array([4, 0]))},
        "at most 7": {"query": jnp.ones((2, 9, 11), jnp.bfloat16), "mask": aj.local_mask(1, 0)},
        "at most 10": {**alike(8, "f2"), "query": np.ones((2, 11, 8), "f2"), "score": "dot",
                       "params": None, "mask": aj.local_mask(3, 0)},
        r"got \(11, 257\)": {"value": jnp.ones((2, 7, 257), jnp.bfloat16)},
    },
    "mosaic_tpu": {
        # Other arguments of `force_tpu_interpret_mode` fail where a gradient is taken.
        r"runs on a TPU, not on cpu: use 'tiled', or .*force_tpu_interpret_mode\(True\)": {},
        "cannot run by_sorting in its kernels: .*: sort": {"score": by_sorting, **WHOLE},
        "by_sorting, which may have an infinite slope": {
            "score": by_sorting, "mask": aj.causal_mask(), **WHOLE},
        r"\(a length that is no multiple of the tile counts as one\)": {
            "score": by_sorting, **RAGGED},
        r"by_a_matrix, which reads arrays \[8, 8\] that .*pass them as params": {
            "score": by_a_matrix, **WHOLE},
        "float32 or bfloat16.* got float16": alike(128, "f2"),
        "float32 or bfloat16.* got float64": alike(128, "f8"),
    },
    "mosaic_gpu": {
        "additive attention, not Dot": {"score": "dot", **WHOLE},
        "KiB of shared memory, more than 227": {"value": jnp.ones((2, 71, 1000))},
        "Hopper generation, not on cpu": {},
        "not in float64": {"value": np.ones((2, 71, 2))},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name in CASES for words in (*OF_ALL, *OF_ONE[name])]
)
def test_what_a_kernel_cannot_serve_is_refused(name, words):
    case, ((query, key, value, params), _) = arrays_of(name)
    arguments = {"query": query, "key": key, "value": value, "score": case.score, "params": params}
    arguments |= OF_ALL.get(words) or OF_ONE[name][words]
    line = f"^implementation '{name}'.*{words}"
    with jax.enable_x64("float64" in words), pytest.raises(NotImplementedError, match=line):
        aj.attention(**arguments, implementation=name)


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


# --- what kernels compute in place of the pair of a score ---


class Squared(aj.Additive):
    tile_params = aj.Additive.tile_params
    finite_slopes = aj.Additive.finite_slopes

    def pair(self, params, q_features, k_features):
        return super().pair(params, q_features, k_features) ** 2


class Renamed(aj.Additive):
    """Its pair is that of `Additive`."""


@pytest.mark.parametrize("score", [aj.Additive(), Concat(), Renamed()])
def test_the_pair_of_additive_has_a_form_of_its_own(score):
    params = {"v": jnp.ones(3)}
    assert form_of(sum_of_tanh, score, params) is params["v"]
    assert form_of(on_tpu, score) == AdditiveOnTpu()
    score = dataclasses.replace(score, key_part=False)
    assert form_of(sum_of_tanh, score, params) is None
    assert form_of(on_tpu, score) == AdditiveOnTpu(key_part=False)


def test_a_user_s_pair_keeps_to_itself():
    for score in (Squared(), Neural(), aj.Score()):
        assert form_of(sum_of_tanh, score, {"v": jnp.ones(3)}) is None
        assert form_of(on_tpu, score) is score
    params = numpy_params(Squared(3), 2, 2)
    known = known_score(Squared(3), params, 2, 2)
    assert form_of(on_tpu, known) == Squared(3)


def test_products_and_wrapped_scores():
    for score in (aj.Dot(), aj.ScaledDot(), aj.General(), aj.Cosine()):
        assert form_of(on_tpu, score) == DotOnTpu(score)
    assert form_of(on_tpu, aj.SoftCap(aj.Additive(), 3.0)) == aj.SoftCap(AdditiveOnTpu(), 3.0)
    assert form_of(on_tpu, aj.SoftCap(Squared())) == aj.SoftCap(Squared())
