"""One suite for every implementation, every score and every mask, against float64 NumPy.

The NumPy side uses no softmax trick and no gradient rule: it loops over the allowed pairs, and
differentiates by the complex step, d f / dx = Im f(x + ih) / h, which is exact to rounding. It
never reads masked entries, which may therefore hold anything.

To add an implementation that runs on every device, name it in
`attention_jax.tiles.PORTABLE`. To add a score or a normaliser, add one entry to
`SCORE_CASES` (score_cases.py) or `NORMALIZER_CASES` (normalizer_cases.py). To add a mask, add its
rule for one pair to `MASK_CASES`, and make it the mask of a score.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from normalizer_cases import NORMALIZER_CASES
from oracles import assert_close, complex_step
from quick_compilation import quick_jit
from score_cases import DK, DQ, SCORE_CASES, OwnCosine  # noqa: F401  some are taken from here

import attention_jax as aj
from attention_jax.tiles import PORTABLE

B, T, S, DV = 2, 5, 7, 13
TILE = aj.BlockSizes(query=2, key=3)  # three tiles each way, the last ones padded


# --- masks, each with its rule for one pair ---


@dataclasses.dataclass(frozen=True)
class MaskCase:
    build: Callable[[], Any]
    allowed: Callable[[int, int, int], bool]  # (example, query, key) -> may attend


QUERY_SEGMENTS = np.array([[0, 0, 1, 2, 9], [5, 5, 5, 1, 0]])  # no key is of segment 9
KEY_SEGMENTS = np.array([[0, 1, 1, 1, 2, 2, 3], [5, 1, 5, 1, 4, 4, 0]])
TABLE = np.random.default_rng(7).random((B, T, S)) < 0.6
TABLE[0, 2, :] = False
TABLE[1, :, 3] = False

MASK_CASES = {
    "none": MaskCase(lambda: None, lambda b, i, j: True),
    "causal": MaskCase(lambda: aj.causal_mask(-1), lambda b, i, j: j <= i - 1),
    "padding": MaskCase(
        lambda: aj.padding_mask(jnp.array([4, 0]), jnp.array([3, 5])),
        lambda b, i, j: j < (4, 0)[b] and i < (3, 5)[b],
    ),
    "local": MaskCase(lambda: aj.local_mask(2, 1), lambda b, i, j: i - 2 <= j <= i + 1),
    "arrays": MaskCase(
        lambda: (
            aj.causal_mask(jnp.array([1, -2])) & aj.local_mask(jnp.array([2, 9], jnp.int8), None)
        ),
        lambda b, i, j: i - (2, 9)[b] <= j <= i + (1, -2)[b],
    ),
    "segment": MaskCase(
        lambda: aj.segment_mask(jnp.asarray(QUERY_SEGMENTS), jnp.asarray(KEY_SEGMENTS)),
        lambda b, i, j: bool(QUERY_SEGMENTS[b, i] == KEY_SEGMENTS[b, j]),
    ),
    "dense": MaskCase(lambda: jnp.asarray(TABLE), lambda b, i, j: bool(TABLE[b, i, j])),
    "dense_shared": MaskCase(lambda: TABLE[0, :1, :], lambda b, i, j: bool(TABLE[0, 0, j])),
    "combination": MaskCase(
        lambda: (
            (aj.causal_mask(2) & aj.padding_mask(jnp.array([6, 4])) & ~aj.local_mask(0, 0))
            | (TABLE & aj.local_mask(None, 1))
        ),
        lambda b, i, j: bool(
            (j <= i + 2 and j < (6, 4)[b] and i != j) or (TABLE[b, i, j] and j <= i + 1)
        ),
    ),
}


def allowed_table(mask_name: str) -> np.ndarray:
    """Returns the mask's table, bool [B, T, S], computed pair by pair."""
    rule = MASK_CASES[mask_name].allowed
    return np.array([[[rule(b, i, j) for j in range(S)] for i in range(T)] for b in range(B)])


# --- inputs: float64, exact in bfloat16, so that all dtypes share one NumPy result ---


@functools.cache
def inputs_of(
    score_name: str, normalizer_name: str = "softmax", offset: float = 0.0
) -> dict[str, Any]:
    """A batch's query, key, value and bias, and the parameters, which all examples share.

    The offset is added to queries and keys.
    """
    case, normalizer = SCORE_CASES[score_name], NORMALIZER_CASES[normalizer_name]
    rng = np.random.default_rng(len(score_name))
    with jax.enable_x64(False):  # the same numbers whichever test asks first
        params = case.score.init(jax.random.key(11), case.query_dim, DK)
    inputs = {
        "query": short(rng.normal(size=(B, T, case.query_dim)) + offset),
        "key": short(rng.normal(size=(B, S, DK)) / (2 if score_name == "dot" else 1) + offset),
        "value": short(rng.normal(size=(B, S, DV))),
        "bias": short(rng.normal(size=(B, T, S))),
        "params": jax.tree.map(short, params),
    }
    if normalizer.params:
        inputs["normalizer_params"] = jax.tree.map(np.asarray, normalizer.params)
    if normalizer.seed:
        inputs["bias"] = short(np.random.default_rng(normalizer.seed).normal(size=(B, T, S)))
    return inputs


@functools.cache
def cotangents() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = {"output": (B, T, DV), "logsumexp": (B, T), "entropy": (B, T), "max_logit": (B, T)}
    return {name: short(rng.normal(size=shape)) for name, shape in shapes.items()}


def short(array: Any) -> np.ndarray:
    """Returns the array rounded to bfloat16, as float64."""
    return np.asarray(array).astype(jnp.bfloat16).astype(np.float64)


def poisoned(inputs: dict[str, Any], allowed: np.ndarray) -> dict[str, Any]:
    """Returns the inputs with NaN and Inf wherever no allowed pair reads them."""
    unused = {
        "query": ~allowed.any(2)[:, :, None],
        "key": ~allowed.any(1)[:, :, None],
        "value": ~allowed.any(1)[:, :, None],
        "bias": ~allowed,
    }
    poison = {"query": np.nan, "key": np.inf, "value": np.nan, "bias": np.nan}
    dirty = {name: np.where(unused[name], poison[name], inputs[name]) for name in unused}
    dirty["bias"][0] = np.where(allowed[0], dirty["bias"][0], np.inf)
    return {**inputs, **dirty}


# --- the NumPy side: arrays have a leading axis, of size 1 or of P perturbations ---


def attend_in_numpy(pair, weights_of_row, inputs, allowed) -> dict[str, np.ndarray]:
    """Output and statistics of one example, query by query, over the allowed keys."""
    value, size = inputs["value"], max(len(leaf) for leaf in jax.tree.leaves(inputs))
    rows = {
        "output": np.zeros((size, len(allowed), value.shape[-1]), complex),
        "logsumexp": np.full((size, len(allowed)), -np.inf, complex),
        "entropy": np.zeros((size, len(allowed)), complex),
        "max_logit": np.full((size, len(allowed)), -np.inf, complex),
    }
    for i, row in enumerate(allowed):
        keys = np.flatnonzero(row)
        if keys.size == 0:
            continue
        query, params = inputs["query"][:, i], inputs["params"]
        logits = [pair(params, query, inputs["key"][:, j]) + inputs["bias"][:, i, j] for j in keys]
        logits = np.stack([np.broadcast_to(logit, size) for logit in logits], axis=1)
        weights = weights_of_row(inputs.get("normalizer_params", {}), logits)
        largest = logits.real.max()
        rows["output"][:, i] = (weights[..., None] * value[:, keys]).sum(1)
        rows["logsumexp"][:, i] = np.log(np.exp(logits - largest).sum(1)) + largest
        rows["entropy"][:, i] = -(weights * np.log(np.where(weights == 0, 1, weights))).sum(1)
        rows["max_logit"][:, i] = largest
    return rows


def numpy_example(pair, inputs: dict, allowed: np.ndarray, cotangent=None, weights_of_row=None):
    """Returns forward {name: array} and gradients {name: array} of <cotangent, forward>.

    The cotangents of a fully masked row's logsumexp (-inf, a constant) and of max_logit (no
    gradient, by contract) are ignored.
    """
    weights_of_row = weights_of_row or NORMALIZER_CASES["softmax"].weights

    def forward(inputs):
        return attend_in_numpy(pair, weights_of_row, inputs, allowed)

    result = forward(jax.tree.map(lambda leaf: leaf[None], inputs))
    result = {name: out[0].real for name, out in result.items()}
    if cotangent is None:
        return result, None

    def total(inputs):
        rows, names = forward(inputs), ("output", "logsumexp", "entropy")
        products = [cotangent[name] * rows[name].imag for name in names if name in cotangent]
        return sum(product.reshape(len(product), -1).sum(1) for product in products)

    return result, complex_step(total, inputs)


@functools.cache
def numpy_side(
    score_name: str,
    mask_name: str,
    normalizer_name: str = "softmax",
    shared: bool = True,
    offset: float = 0.0,
) -> tuple[dict, dict]:
    """Returns forward and gradients of a batch.

    With normalisers other than softmax, and without `shared`, they are those of the output alone.
    Gradients of parameters are summed, or, without `shared`, those of each example.
    """
    inputs, allowed = inputs_of(score_name, normalizer_name, offset), allowed_table(mask_name)
    names = cotangents() if normalizer_name == "softmax" and shared else ("output",)
    examples = []
    for b in range(B):
        example = inputs | {name: inputs[name][b] for name in ("query", "key", "value", "bias")}
        cotangent = {name: cotangents()[name][b] for name in names}
        examples.append(
            numpy_example(
                SCORE_CASES[score_name].pair, example, allowed[b], cotangent,
                NORMALIZER_CASES[normalizer_name].weights,
            )
        )  # fmt: skip
    forward, gradients = jax.tree.map(lambda *leaves: np.stack(leaves), *examples)
    if shared:
        for name in gradients.keys() & {"params", "normalizer_params"}:
            gradients[name] = jax.tree.map(lambda leaf: leaf.sum(0), gradients[name])
    return {name: forward[name] for name in names}, gradients


# --- the library side, and the comparison ---


def library_side(
    implementation: str,
    score_name: str,
    mask: Any,
    inputs: dict,
    dtype: Any,
    jit: Callable | None = None,
    normalizer_name: str = "softmax",
) -> tuple[dict, dict]:
    """Returns the same as `numpy_side`, by `attention` and its vector-Jacobian product.

    `jit` compiles the function: `quick_jit` by default, or `fully_optimized_jit`.
    """
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), inputs)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    cotangent = {
        name: jnp.asarray(array, dtype if name == "output" else wide)
        for name, array in cotangents().items()
    }
    both = _forward_and_gradients(implementation, score_name, normalizer_name, jit or quick_jit)
    return both(arrays, mask, cotangent)


@functools.cache  # so that calls with arrays of the same shapes share one compiled program
def _forward_and_gradients(implementation, score_name, normalizer_name, jit) -> Callable:
    statistics = normalizer_name == "softmax"

    def forward(arrays, mask):
        results = aj.attention(
            **arrays, mask=mask, score=SCORE_CASES[score_name].score, block_sizes=TILE,
            normalizer=NORMALIZER_CASES[normalizer_name].normalizer,
            implementation=implementation, return_statistics=statistics,
        )  # fmt: skip
        return {"output": results[0], **results[1]._asdict()} if statistics else {"output": results}

    def both(arrays, mask, cotangent):
        result, pull_back = jax.vjp(lambda arrays: forward(arrays, mask), arrays)
        return result, pull_back({name: cotangent[name] for name in result})[0]

    return jit(both)


def fully_optimized_jit(function: Callable) -> Callable:
    """`jax.jit` with all optimisations, as on users' machines."""
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    return jax.jit(function, compiler_options=options)


def check_conformance(
    implementation: str,
    score_name: str,
    mask_name: str,
    dtype: Any = jnp.float32,
    *,
    normalizer_name: str = "softmax",
    jit: Callable | None = None,
    poison: bool = False,
    as_table: bool = False,
    bits: bool = False,
    offset: float = 0.0,
) -> None:
    """Asserts the contract's bounds for output, statistics and the gradient of every input.

    `as_table` gives the mask as its bool table. All masks then share one compiled program. `bits`
    also asserts that what the mask hides changes no bit, and the exact zeros of hidden tokens,
    which a tolerance does not see.
    """
    inputs, table = inputs_of(score_name, normalizer_name, offset), allowed_table(mask_name)
    expected, expected_gradients = numpy_side(score_name, mask_name, normalizer_name, offset=offset)
    with jax.enable_x64(dtype == jnp.float64):
        mask = jnp.asarray(table) if as_table else MASK_CASES[mask_name].build()

        def of(inputs):
            return library_side(
                implementation, score_name, mask, inputs, dtype, jit, normalizer_name
            )

        got, gradients = of(poisoned(inputs, table) if poison else inputs)
        if bits:
            _check_bits((got, gradients), of(inputs), table)
    # 16-bit inputs are multiplied in their own dtype: features, weights and gradients of logits are
    # rounded to it, and so are the results. The bounds count these roundings.
    rounding = {jnp.bfloat16: 2**-8, jnp.float16: 2**-10}.get(dtype, 0.0)
    exact = dtype == jnp.float64
    search = 1 if normalizer_name == "softmax" else 10  # others search for a threshold
    for name, array in got.items():
        tolerance = 1e-13 * search if exact else 2e-6 + (2 if name == "output" else 1) * rounding
        assert_close(f"{mask_name}: {name}", array, expected[name], tolerance)
        assert array.dtype == (dtype if name == "output" or exact else jnp.float32), name
    assert gradients.keys() == expected_gradients.keys()
    tolerance = 1e-12 * search if exact else 2e-5 + 4 * rounding
    for name, tree in gradients.items():
        # Of a parameter of a normaliser: a sum over all pairs, whose terms may nearly cancel.
        terms = 1.0 if name == "normalizer_params" else 0.0
        what = f"{mask_name}: gradient of {name}"
        assert_close(what, tree, expected_gradients[name], tolerance, terms)
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} <= {jnp.dtype(dtype)}, name


def _check_bits(got: Any, clean: Any, allowed: np.ndarray) -> None:
    got = jax.device_get(got)
    chex.assert_trees_all_equal(got, clean)
    for name, array in named(got).items():
        assert np.any(array), f"{name} is zero everywhere: this test shows nothing"
    (outputs, gradients), rows, keys = got, allowed.any(2), allowed.any(1)
    np.testing.assert_array_equal(outputs["logsumexp"] == -np.inf, ~rows)
    hidden = {"query": ~rows, "key": ~keys, "value": ~keys, "bias": ~allowed}
    for name, where in hidden.items():
        assert not np.any(gradients[name][where]), name
    for name in ("output", "entropy"):
        assert not np.any(outputs[name][~rows]), name


def named(tree: Any) -> dict[str, Any]:
    """A tree's leaves by their paths, so that a failure says which."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


ALL_IMPLEMENTATIONS = list(PORTABLE)
ALL_MASKS = list(MASK_CASES)
# Every score meets the tables of all masks, in one compiled program, and its own mask as it is.
MASK_OF_SCORE = {name: case.mask for name, case in SCORE_CASES.items()}
