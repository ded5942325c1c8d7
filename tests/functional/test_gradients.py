"""Attention's gradient, station by station: against the complex step in NumPy, and `jax.vjp`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    ALL_MASKS,
    ALL_SCORES,
    DV,
    MASK_CASES,
    MASK_OF_SCORE,
    SCORE_CASES,
    TILE,
    B,
    S,
    T,
    allowed_table,
    assert_close,
    cotangents,
    inputs_of,
    named,
    numpy_example,
    poisoned,
    quick_jit,
)
from jax.test_util import check_grads, check_vjp

import attention_jax as aj
from attention_jax.analysis import attention_gradients, gradient_through_top_keys, softmax_vjp
from attention_jax.pairwise.biases import ShiftedBias
from attention_jax.pairwise.position_functions import Shifts

DOUTPUT = cotangents()["output"]  # [B, T, DV]


@functools.cache
def numpy_gradients(score_name, mask_name):
    """Of <DOUTPUT, output>, each with B in front, parameters too; a bias [B, T, S] gets dlogits."""
    inputs, allowed = inputs_of(score_name), allowed_table(mask_name)
    examples = []
    for b in range(B):
        example = {name: inputs[name][b] for name in ("query", "key", "value", "bias")}
        example["params"] = inputs["params"]
        cotangent = {name: np.zeros_like(array[b]) for name, array in cotangents().items()}
        cotangent["output"] = DOUTPUT[b]
        pair = SCORE_CASES[score_name].pair
        examples.append(numpy_example(pair, example, allowed[b], cotangent)[1])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


def library_gradients(score_name, mask, inputs, doutput, dtype):
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), inputs)
    return attention_gradients(
        **arrays,
        doutput=jnp.asarray(doutput, dtype),
        score=SCORE_CASES[score_name].score,
        mask=mask,
    )


def check(score_name, mask_name, dtype, tolerance, as_table=False):
    inputs, allowed = inputs_of(score_name), allowed_table(mask_name)
    inputs = poisoned(inputs, allowed)
    doutput = np.where(allowed.any(-1)[..., None], DOUTPUT, np.nan)
    expected = numpy_gradients(score_name, mask_name)
    mask = jnp.asarray(allowed) if as_table else MASK_CASES[mask_name].build()
    got = jax.device_get(library_gradients(score_name, mask, inputs, doutput, dtype))
    for name in ("query", "key", "value", "bias", "params"):
        of_name = named(getattr(got, f"d{name}"))
        assert of_name.keys() == named(expected[name]).keys()
        for path, array in of_name.items():
            assert array.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
            assert_close(f"d{name}{path}", array, named(expected[name])[path], tolerance)
    # A bias of the full shape gets the gradient of the logits as it is.
    assert_close("dlogits", got.dlogits, expected["bias"], tolerance)
    value = np.where(allowed.any(1)[..., None], inputs["value"], 0)
    dweights = np.einsum("btv,bsv->bts", DOUTPUT, value) * allowed
    assert_close("dweights", got.dweights, dweights, tolerance)
    for name in ("dweights", "dlogits"):
        assert not np.any(np.asarray(getattr(got, name))[~allowed]), name


@pytest.mark.parametrize("score_name", ALL_SCORES)
def test_every_score_with_nan_padding(score_name):
    with jax.enable_x64(True):
        check(score_name, MASK_OF_SCORE[score_name], jnp.float64, 1e-12)


def test_every_mask():
    with jax.enable_x64(True):
        for mask_name in ALL_MASKS:
            check("general", mask_name, jnp.float64, 1e-12, as_table=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrower_floats_come_back_in_float32(dtype):
    """The inputs are exact in bfloat16, and nothing on the way is rounded to it."""
    check("general", "dense", dtype, 2e-5)


@pytest.mark.parametrize(
    ("score_name", "implementation"),
    [
        pytest.param(score_name, implementation, marks=[] if quick else pytest.mark.slow)
        for implementation in ALL_IMPLEMENTATIONS
        for score_name in aj.SCORES
        for quick in [implementation == "reference" or score_name == "additive"]
    ],
)
def test_equals_vjp_of_attention(implementation, score_name):
    """The scores as they are in the registry, for inputs shared over axes of the batch."""
    score, rng = aj.SCORES[score_name], np.random.default_rng(3)
    with jax.enable_x64(True):
        point = {
            "query": rng.normal(size=(2, 3, 5, 4)),
            "key": rng.normal(size=(3, 7, 4)),
            "value": rng.normal(size=(2, 1, 7, 2)),
            "bias": rng.normal(size=(3, 1, 7)),
            "params": jax.tree.map(np.float64, score.init(jax.random.key(0), 4, 4)),
        }
        doutput = rng.normal(size=(2, 3, 5, 2))
        mask = aj.causal_mask(1) & aj.padding_mask(jnp.array([[7, 3, 0]]))

        @quick_jit
        def both(point):
            def attend(point):
                return aj.attention(
                    **point, score=score, mask=mask, implementation=implementation,
                    block_sizes=TILE,
                )  # fmt: skip

            got = attention_gradients(**point, doutput=doutput, score=score, mask=mask)
            return got, jax.vjp(attend, point)[1](doutput)[0]

        got, expected = both(point)
        for name, gradient in expected.items():
            summed = jax.tree.map(of_shape, getattr(got, f"d{name}"), point[name])
            gradient, summed = named(gradient), named(summed)
            for path, array in gradient.items():
                assert_close(f"d{name}{path}", summed[path], array, 1e-12)


def of_shape(gradient, array):
    """Summed over the axes that the array was shared over."""
    gradient = np.asarray(gradient)
    gradient = gradient.sum(tuple(range(gradient.ndim - array.ndim)))
    shared = tuple(axis for axis, size in enumerate(array.shape) if size == 1)
    return gradient.sum(shared, keepdims=True).reshape(array.shape)


def test_finite_differences_of_logits_and_of_everything():
    rng = np.random.default_rng(4)
    with jax.enable_x64(True):
        query, key, value = (rng.normal(size=(n, 2)) for n in (3, 5, 5))
        doutput, allowed = rng.normal(size=(3, 2)), rng.random((3, 5)) < 0.7
        allowed[1] = False
        bias = rng.normal(size=(3, 5))

        def loss(bias):
            """Attention and its loss in NumPy."""
            weights = np.exp(query @ key.T / np.sqrt(2) + bias) * allowed
            totals = weights.sum(1, keepdims=True)
            return np.sum(doutput * (weights / np.where(totals == 0, 1, totals) @ value))

        got = attention_gradients(query, key, value, doutput, mask=allowed, bias=bias)
        step = 1e-6
        for i, j in np.ndindex(3, 5):
            change = np.zeros((3, 5))
            change[i, j] = step
            slope = (loss(bias + change) - loss(bias - change)) / (2 * step)
            np.testing.assert_allclose(got.dlogits[i, j], slope, atol=1e-8)

        attend = functools.partial(aj.attention, score="general", mask=allowed)

        def pulled_back(query, key, value, params):
            def pull_back(doutput):
                gradients = attention_gradients(
                    query, key, value, doutput, score="general", mask=allowed, params=params
                )
                return gradients.dquery, gradients.dkey, gradients.dvalue, gradients.dparams

            return attend(query, key, value, params=params), pull_back

        check_vjp(
            lambda query, key, value, params: attend(query, key, value, params=params),
            pulled_back,
            (query, key, value, {"kernel": rng.normal(size=(2, 2))}),
            atol=1e-7,
            rtol=1e-7,
        )


def test_two_keys_by_hand():
    # q = 1, keys 0 and ln 3: weights 1/4 and 3/4. dweights = (2, 6), their mean 5, so dlogits =
    # (1/4 * -3, 3/4 * 1); dq = 3/4 ln 3; dk = dlogits q; dv = weights * 2.
    key = jnp.log(jnp.array([[1.0], [3.0]]))
    got = attention_gradients(
        jnp.ones((1, 1)), key, jnp.array([[1.0], [3.0]]), jnp.array([[2.0]]), score="dot"
    )
    expected = {
        "dvalue": [[0.5], [1.5]],
        "dweights": [[2.0, 6.0]],
        "dlogits": [[-0.75, 0.75]],
        "dquery": [[0.75 * np.log(3)]],
        "dkey": [[-0.75], [0.75]],
    }
    for name, array in expected.items():
        np.testing.assert_allclose(getattr(got, name), array, rtol=1e-6, err_msg=name)
    assert got.dparams == {}
    assert got.dbias is None


def test_parts_fit_together():
    """What the docstrings say of `dweights`, `dlogits` and their rows."""
    inputs = jax.tree.map(lambda leaf: leaf.astype(np.float32), inputs_of("general"))
    bias, value = inputs["bias"], inputs.pop("value")
    got = attention_gradients(
        **inputs, value=value, doutput=DOUTPUT.astype(np.float32), score="general",
        mask=MASK_CASES["dense"].build(),
    )  # fmt: skip
    weights = aj.attention_weights(**inputs, score="general", mask=MASK_CASES["dense"].build())
    np.testing.assert_allclose(softmax_vjp(weights, got.dweights), got.dlogits, atol=1e-6)
    np.testing.assert_allclose(got.dlogits.sum(-1), np.zeros((B, T)), atol=1e-5)
    assert got.dbias.shape == bias.shape
    share = gradient_through_top_keys(weights, got.dlogits, 2)
    assert np.all((share > 0) == np.any(got.dlogits, -1))


# --- biases ---


def test_biases_as_functions_of_position():
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        query, key, value = (rng.normal(size=(2, n, 4)) for n in (5, 7, 7))
        doutput = rng.normal(size=(2, 5, 4))
        parts = rng.random(2), rng.normal(size=5), rng.normal(size=(1, 7))

        def bias_of(slopes, table, dense):
            # Integers, the shifts, among the leaves.
            shifts = Shifts(queries=jnp.array([1]), keys=jnp.array([0]))
            shifted = ShiftedBias(aj.relative_bias(table), shifts)
            return aj.alibi_bias(slopes) + shifted + dense

        def attend(*parts):
            return aj.attention(query, key, value, bias=bias_of(*parts), implementation="reference")

        expected = jax.jit(lambda *parts: jax.vjp(attend, *parts)[1](doutput))(*parts)
        got = attention_gradients(query, key, value, doutput, bias=bias_of(*parts)).dbias
        assert got.left.right.shifts.queries is None
        assert_close("slopes", got.left.left.slopes, expected[0], 1e-13)  # one for each example
        assert_close("table", got.left.right.bias.table.sum(0), expected[1], 1e-13)
        assert_close("dense", got.right.table.sum(0), expected[2], 1e-13)


@pytest.mark.parametrize("shape", [(), (7,), (1, 7), (5, 1), (2, 1, 1), (2, 5, 7)])
def test_broadcast_biases(shape):
    rng = np.random.default_rng(6)
    with jax.enable_x64(True):
        query, key, value = (rng.normal(size=(2, n, 4)) for n in (5, 7, 7))
        doutput, bias = rng.normal(size=(2, 5, 4)), rng.normal(size=shape)
        got = attention_gradients(query, key, value, doutput, bias=bias)
        two = (1,) * (2 - len(shape)) + shape
        assert got.dbias.shape == (2, *two[-2:])
        expected = got.dlogits  # verified above
        for axis in (-1, -2):
            if two[axis] == 1:
                expected = expected.sum(axis, keepdims=True)
        # Not relative: rows of dlogits sum to 0, so that some of these are nothing but rounding.
        np.testing.assert_allclose(got.dbias, expected, atol=1e-14)


# --- extremes ---


def test_extreme_logits():
    """Saturated rows send little, and never anything but numbers."""
    query = jnp.array([[1e4], [-1e4], [0.0]])
    key, value = jnp.array([[1.0], [-1.0], [0.5]]), jnp.array([[1.0], [2.0], [4.0]])
    got = attention_gradients(query, key, value, jnp.ones((3, 1)), score="dot")
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))
    assert not np.any(got.dlogits[:2])  # one key has it all
    np.testing.assert_allclose(got.dlogits[2], (np.array([1, 2, 4]) - 7 / 3) / 3, rtol=1e-5)


@pytest.mark.parametrize(("target", "source"), [(0, 3), (2, 0)])
def test_no_queries_or_no_keys(target, source):
    tokens = (jnp.ones((target, 4)), jnp.ones((source, 4)), jnp.ones((source, 2)))
    params = {"kernel": jnp.ones((4, 4))}
    got = attention_gradients(*tokens, jnp.ones((target, 2)), score="general", params=params)
    assert [got.dquery.shape, got.dkey.shape, got.dvalue.shape] == [x.shape for x in tokens]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got))


# --- transformations, errors ---


def test_jit_vmap_and_derivatives():
    inputs = jax.tree.map(lambda leaf: leaf.astype(np.float32), inputs_of("additive"))
    params, doutput = inputs.pop("params"), DOUTPUT.astype(np.float32)

    def gradients(arrays, doutput):
        score = SCORE_CASES["additive"].score
        return attention_gradients(**arrays, doutput=doutput, params=params, score=score)

    together = jax.device_get(gradients(inputs, doutput))
    mapped = jax.jit(jax.vmap(gradients))(inputs, doutput)
    looped = jax.device_get(
        [gradients({n: x[b] for n, x in inputs.items()}, doutput[b]) for b in range(B)]
    )
    looped = jax.tree.map(lambda *leaves: np.stack(leaves), *looped)
    for others in (mapped, looped):
        for path, array in named(others).items():
            assert_close(path, array, named(together)[path], 1e-5)
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        point = tuple(rng.normal(size=(n, 2)) for n in (2, 3, 3, 2))
        check_grads(
            jax.jit(lambda *point: attention_gradients(*point)[:5]), point, order=1, atol=1e-6,
            rtol=1e-6,
        )  # fmt: skip


GOOD = (np.ones((2, 5, 4)), np.ones((2, 7, 4)), np.ones((7, 3)))


@pytest.mark.parametrize(
    ("doutput", "options", "message"),
    [
        (np.ones((2, 5, 4)), {}, r"doutput must be \[2, 5, 3\], as the output.*got \[2, 5, 4\]"),
        (np.ones((5, 3)), {}, r"doutput must be \[2, 5, 3\]"),
        (np.ones((2, 5, 3), int), {}, "doutput must be floating-point"),
        (np.ones((2, 5, 3)), {"score": "doot"}, "did you mean 'dot'"),
        (np.ones((2, 5, 3)), {"score": "general"}, "params must be"),
        (np.ones((2, 5, 3)), {"mask": np.ones((5, 5), bool)}, "mask must broadcast"),
        (np.ones((2, 5, 3)), {"bias": np.ones((3, 5, 7))}, "bias must broadcast"),
    ],
)
def test_bad_input(doutput, options, message):
    with pytest.raises(ValueError, match=message):
        attention_gradients(*GOOD, doutput, **options)


def test_shapes_of_the_suite():
    """The sizes above are all different, so that no transposed axis passes by luck."""
    got = library_gradients("general", None, inputs_of("general"), DOUTPUT, jnp.float32)
    assert got.dweights.shape == got.dlogits.shape == (B, T, S)
    assert got.dvalue.shape == (B, S, DV)
    assert got.dparams["kernel"].shape == (B, *inputs_of("general")["params"]["kernel"].shape)
