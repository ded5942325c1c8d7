"""Properties of random calls: the result is that of NumPy in float64, whatever the arrays hold.

The profile `fast` draws the same few examples each time; `nightly` draws fifty times as many.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies as drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from normalizer_cases import NORMALIZER_CASES
from quick_compilation import quick_jit

import attention_jax as aj

TILE = aj.BlockSizes(query=2, key=2)
implementations = st.sampled_from(["tiled", "reference", None])
# Infinite slopes, of alpha > 2, make the weights themselves imprecise.
NORMALIZERS = [name for name in NORMALIZER_CASES if name not in ("softmax", "entmax_3")]


@pytest.fixture(autouse=True)
def _forget_compiled_programs():
    """Clears the thousands of programs of a nightly run, which fill gigabytes."""
    yield
    if settings().max_examples > 100:
        jax.clear_caches()


@dataclasses.dataclass(frozen=True)
class Expected:
    """What NumPy makes of a call, and which rows of it are certain."""

    table: np.ndarray
    logits: np.ndarray
    weights: np.ndarray
    statistics: dict
    sure: np.ndarray  # bool [*B, T], and of the output
    sure_output: np.ndarray
    bound: float


def expected_of(call, also=True) -> Expected:
    table = call.mask[1] & also
    logits = drawn.logits_of(call, call.kept, call.bias[1], call.params)
    sure, sure_output = drawn.certain_rows(call, table)
    bound = drawn.tolerance(call, logits, sure, table)
    return Expected(table, logits, *drawn.softmax(logits, table), sure, sure_output, bound)


def check_output(call, got, weights, right, factor=1.0, terms=0.0):
    """Asserts the dtype of the output, its certain rows, and zeros in rows without keys."""
    assert got.dtype == call.output_dtype
    value = call.kept["value"]
    output, where = drawn.averaged(weights, value, right.table), right.sure_output[..., None]
    if got.dtype.itemsize == 2:  # weights of 16 bits: their roundings are as large as the values
        terms = np.max(np.abs(value), where=drawn.moderate(value), initial=terms)
    drawn.assert_near("output", got, output, right.bound * factor, where=where, terms=terms)
    assert not np.asarray(got, float)[~right.table.any(-1)].any(), "a row without keys"


@drawn.examples(4)
@given(drawn.calls(), implementations)
def test_attention_is_right_in_each_row_that_reads_moderate_numbers(call, implementation):
    right = expected_of(call)
    options = {"implementation": implementation, "block_sizes": TILE, "return_statistics": True}
    with jax.enable_x64(call.x64):
        output, statistics = aj.attention(**call.keywords(), **options)
        weights = aj.attention_weights(**call.keywords("value"))
    check_output(call, output, right.weights, right)
    for name, array in statistics._asdict().items():
        assert array.dtype == (np.float64 if call.x64 else np.float32)
        drawn.assert_near(
            name, array, right.statistics[name], right.bound, where=right.sure, terms=1.0
        )
    assert weights.dtype == call.output_dtype
    drawn.assert_near("weights", weights, right.weights, right.bound, where=right.sure[..., None])
    masked = np.asarray(weights, float)[~right.table]
    assert not np.nan_to_num(masked).any(), "a masked pair has a weight"


def normalized(name, logits, table):
    """Returns the weights [*B, T, S] of a normaliser, row by row; logits may be complex."""
    case, weights = NORMALIZER_CASES[name], np.zeros(logits.shape, complex)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, float)[None], case.params)
    for row in np.ndindex(table.shape[:-1]):
        keys = table[row]
        if keys.any():
            weights[row][keys] = case.weights(params, logits[row][keys][None].astype(complex))[0]
    return weights


def with_normalizer(name):
    params = jax.tree.map(jnp.float32, NORMALIZER_CASES[name].params)
    return {"normalizer": NORMALIZER_CASES[name].normalizer, "normalizer_params": params}


@pytest.mark.slow
@drawn.examples(2)
@given(drawn.calls(sizes=drawn.SIZES[:6]), st.sampled_from(NORMALIZERS), implementations)
def test_attention_is_right_with_any_normalizer(call, name, implementation):
    nothing = None, np.zeros_like(call.bias[1])
    call = dataclasses.replace(
        call, bias=call.bias if drawn.moderate(call.bias[1]).all() else nothing
    )
    right = expected_of(call)
    options = {"implementation": implementation, "block_sizes": TILE}
    with jax.enable_x64(call.x64):
        got = aj.attention(**call.keywords(), **with_normalizer(name), **options)
    readable = np.where(right.sure[..., None], right.logits, 0)
    weights = normalized(name, readable, right.table).real
    value = np.where(drawn.moderate(call.kept["value"]), call.kept["value"], 0)
    largest = max(1.0, np.max(weights, initial=0))
    check_output(call, got, weights, right, 4 * largest, np.max(np.abs(value), initial=0))


@drawn.examples(2)
@given(
    drawn.calls(sizes=drawn.SIZES[:5], dtypes=(drawn.F4, drawn.F8), extreme=False),
    st.sampled_from(["softmax", "softmax", *NORMALIZERS]),
    st.sampled_from(["tiled", "reference"]),
    drawn.seeds,
)
def test_gradients_are_those_of_the_complex_step(call, name, implementation, seed):
    """<gradient, direction> of each argument is Im f(x + ih direction) / h."""
    rng, step = np.random.default_rng(seed), 1e-30
    table, length = call.mask[1], call.size[1]
    inputs = {**call.kept, "bias": drawn.filled(rng, table.shape), "params": call.params}
    doutput = drawn.filled(rng, (*call.size[0], length, call.size[5]))

    def forward(arrays):
        arrays = {**arrays, "mask": call.mask[0], "score": call.keywords()["score"]}
        options = {"implementation": implementation, "block_sizes": TILE}
        return aj.attention(**arrays, **options, **with_normalizer(name))

    with jax.enable_x64(call.x64):
        arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, call.dtype), inputs)
        pulled_back = quick_jit(lambda arrays, doutput: jax.vjp(forward, arrays)[1](doutput)[0])
        gradients = pulled_back(arrays, jnp.asarray(doutput, call.dtype))
    for tokens, unread in drawn.unread_tokens(table).items():
        assert not np.asarray(gradients[tokens])[unread].any(), f"gradient of unread {tokens}"
    assert not np.asarray(gradients["bias"])[~table].any(), "gradient of a masked bias"
    for argument, leaves in inputs.items():
        direction = jax.tree.map(lambda leaf: drawn.filled(rng, leaf.shape), leaves)
        moved = jax.tree.map(lambda x, d: x + 1j * step * d, leaves, direction)
        at = {**inputs, argument: moved}
        logits = np.where(table, drawn.logits_of(call, at, at["bias"], at["params"]), 0)
        weights = (
            drawn.softmax(logits, table)[0]
            if name == "softmax"
            else normalized(name, logits, table)
        )
        terms = doutput * drawn.averaged(weights, at["value"], table).imag / step
        products = jax.tree.leaves(
            jax.tree.map(lambda g, d: np.asarray(g, float) * d, gradients[argument], direction)
        )
        got, size = (sum(np.sum(f(x)) for x in products) for f in (np.asarray, np.abs))
        bound = (1e-9 if call.x64 else 1e-4) * (1 + size + np.abs(terms).sum())
        assert abs(got - terms.sum()) <= bound, f"{argument}: {got}, not {terms.sum()}"


@pytest.mark.slow
@drawn.examples(6)
@given(st.data(), drawn.fillings, st.sampled_from([1, 8, 1e4]), st.sampled_from([-1, -2, 0]))
def test_masked_softmax_is_right(data, filling, size, axis):
    batch, length, keys, *_ = data.draw(st.sampled_from(drawn.SIZES))
    mask, table = data.draw(drawn.masks(batch, length, keys))
    rng = np.random.default_rng(data.draw(drawn.seeds))
    logits = (drawn.filled(rng, table.shape, filling) * size).clip(-3e38, 3e38).astype("f4")
    got = np.asarray(aj.masked_softmax(logits, mask, axis))
    rows = [np.moveaxis(x, axis, -1) for x in (logits.astype(float), table)]
    sure = (np.isfinite(rows[0]) | (rows[0] == -np.inf) | ~rows[1]).all(-1, keepdims=True)
    assert got.dtype == np.float32
    drawn.assert_near(
        "weights", np.moveaxis(got, axis, -1), drawn.softmax(*rows)[0], 4e-6, where=sure
    )
    assert not np.nan_to_num(got[~table]).any(), "a masked entry has a weight"
