"""The kinds of attention that are not global: modules against the functions below them.

test_model.py compares the kinds in a model with float64 NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import normal, run_jit, scrambled

from attention_jax import get_score, padding_mask
from attention_jax.functional.centers import predicted_centers
from attention_jax.functional.coverage import coverage_attention
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.nn import (
    Attention,
    CoverageAttention,
    CrossAttention,
    LocalMAttention,
    LocalPAttention,
    ModelConfig,
    MonotonicAttention,
)

B, T, S, DV = 2, 5, 7, 13
LENGTHS = jnp.array([7, 4])
MASK = padding_mask(LENGTHS)


def local_m(*, query, lengths, **arguments):
    centers = lengths[:, None] - 1 - jnp.arange(T)[None, :]
    arguments = {"query": query, "centers": centers, "radius": 2, **arguments}
    output = local_attention(**arguments)
    del arguments["value"]
    return output, local_attention_weights(**arguments), None


def local_p(*, query, lengths, position_kernel, position_v, **arguments):
    centers = predicted_centers(query, {"kernel": position_kernel, "v": position_v}, lengths)
    arguments = {"query": query, "centers": centers, "radius": 2, "sigma": 1.0, **arguments}
    output = local_attention(**arguments)
    del arguments["value"]
    return output, local_attention_weights(**arguments), None


def coverage(*, lengths, **arguments):
    result = coverage_attention(**arguments)
    return result.output, result.weights, result.coverage


def monotonic(*, lengths, **arguments):
    output, weights = monotonic_attention(**arguments)
    return output, weights, weights[:, -1]


KINDS = {  # the class, its options, and the function with the module's own parameters
    "local-m": (LocalMAttention, {"radius": 2, "alignment": "reversed"}, local_m),
    "local-p": (LocalPAttention, {"radius": 2, "hidden_dim": 4}, local_p),
    "coverage": (CoverageAttention, {}, coverage),
    "monotonic": (MonotonicAttention, {}, monotonic),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, score="additive", **options):
    """A module with random parameters, these, and (query, key, value)."""
    made, own, _ = KINDS[kind]
    dim = 11 if get_score(score).needs_equal_dims else 3
    module, params = scrambled(lambda: made(score, dim, 11, **own, **options, rngs=nnx.Rngs(2)))
    tokens = normal(B, T, dim), normal(B, S, 11, seed=3), normal(B, S, DV, seed=4)
    return module, jax.tree.map(jnp.float32, params), tokens


@pytest.mark.parametrize("score", ["additive", pytest.param("scaled", marks=pytest.mark.slow)])
@every_kind
def test_a_kind_is_its_function_with_its_parameters(kind, score):
    if kind == "coverage" and score == "scaled":
        score = "general"
    module, params, tokens = make(kind, score)
    assert (kind != "monotonic") or nnx.state(module)["offset"].shape == ()
    bias = normal(T, S, seed=5)
    arguments = {"mask": MASK, "bias": bias, "lengths": LENGTHS}

    def calls(query, key, value):
        names = dict(zip(("query", "key", "value"), (query, key, value), strict=True))
        own = {"params": {}, **params}
        expected = KINDS[kind][2](score=score, **own, **names, **arguments)
        found = module.attend(query, key, value, **arguments, return_weights=True)
        memory = module.remember(key, value)
        return (
            expected,
            found,
            module.attend(query, memory, **arguments, return_weights=True),
            module.attend(query, key, value, **arguments),
            module(query, key, value, **arguments, return_weights=True),
            module(query, key, mask=MASK, return_weights=True),
        )

    expected, found, of_memory, alone, called, of_keys = run_jit(calls, *tokens)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), of_memory, found)
    assert alone.weights is None
    np.testing.assert_allclose(alone.output, found.output, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, called, found[:2])
    np.testing.assert_allclose(of_keys[0], of_keys[1] @ tokens[1], atol=1e-5)


@pytest.mark.parametrize("kind", ["local-m", "local-p", "monotonic"])
def test_dropout_and_noise_come_with_a_rng(kind):
    rate = {} if kind == "monotonic" else {"dropout_rate": 0.5}
    module, _, tokens = make(kind, **rate)
    plain, rngs = make(kind)[0], jax.random.split(jax.random.key(0))
    one, again, other, without, expected = run_jit(
        lambda rngs: [
            *(module(*tokens, rng=rng) for rng in (rngs[0], rngs[0], rngs[1], None)),
            plain(*tokens),
        ],
        rngs,
    )
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(without, expected)
    assert np.all([np.any(np.abs(one - x) > 1e-3) for x in (other, without)])


def test_a_fresh_coverage_module_is_the_plain_score_and_learns():
    module = CoverageAttention("general", 3, 11, rngs=nnx.Rngs(5))
    plain = Attention("general", 3, 11, rngs=nnx.Rngs(5))
    query, key = normal(B, T, 3), normal(B, S, 11, seed=3)
    graph, state = nnx.split(module)

    def gradient(state):
        return jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(query, key) ** 2))(state)

    found, expected, slope = run_jit(
        lambda state: (module(query, key), plain(query, key), gradient(state)), state
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.any(slope["coverage_kernel"][...] != 0)


def test_windows_of_local_m():
    def seen(weights):  # the keys of each query, in the first example and the last
        return [[np.flatnonzero(row).tolist() for row in weights[b]] for b in (0, -1)]

    query, key = normal(B, T, 3), normal(B, S, 11, seed=3)
    ahead, back = (
        scrambled(lambda alignment=alignment, radius=radius: LocalMAttention(
            "additive", 3, 11, radius=radius, alignment=alignment, rngs=nnx.Rngs(0)))[0]
        for alignment, radius in (("monotonic", 1), ("reversed", 0))
    )  # fmt: skip

    def weights(query, key, first):
        options = {"lengths": LENGTHS, "return_weights": True}
        return {
            "monotonic": ahead(query, key, **options)[1],
            "reversed": back(query, key, **options)[1],
            "all real": back(query, key, return_weights=True)[1],
            "two steps": ahead(query[:, 3:], key, first=3, **options)[1],
            "a step": back(query[:, 2:3], key, first=first, **options)[1],
        }

    found = {name: seen(array) for name, array in run_jit(weights, query, key, 2).items()}
    assert found["monotonic"][0] == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert found["reversed"] == [[[6], [5], [4], [3], [2]], [[3], [2], [1], [0], []]]
    assert found["all real"] == [[[6], [5], [4], [3], [2]]] * 2
    assert found["two steps"][0] == [[2, 3, 4], [3, 4, 5]]
    assert found["a step"] == [[[4]], [[1]]]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("local-m", {"score": "dott"}, r"did you mean 'dot'\?"),
        ("local-m", {"alignment": "sideways"}, "alignment must be .*; got 'sideways'"),
        ("local-m", {"dropout_rate": 1.5}, "dropout_rate"),
        ("local-m", {"radius": -1}, "radius must be at least 0"),
        ("local-p", {"radius": 0}, "radius must be at least 1; got 0"),
        ("coverage", {"key_dim": 4}, "key_dim must be 3 to match score"),
        ("monotonic", {"key_dim": 4}, "key_dim must be 3 to match score"),
    ],
)
def test_bad_settings(kind, changes, message):
    made, own, _ = KINDS[kind]
    options = {"score": "dot", "query_dim": 3, "key_dim": 3, **own, **changes}
    with pytest.raises(ValueError, match=message):
        made(**options, rngs=nnx.Rngs(0))


# --- in a decoder ---


@pytest.mark.parametrize("attention", ["coverage", "monotonic"])
def test_the_carry_keeps_its_dtype(attention):
    tolerances = {"bfloat16": 0.05, "float32": 1e-5, "float64": 1e-12}
    config = ModelConfig(score="additive", dim=12, attention=attention)
    module, _ = scrambled(lambda: CrossAttention(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(module)

    def calls(params, query, memory):
        module = nnx.merge(graph, params)

        def step(carry, token):
            output, _, carry = module(token[:, None], memory, carry=carry)
            return carry, output[:, 0]

        carry, steps = jax.lax.scan(step, module.first_carry(memory), jnp.swapaxes(query, 0, 1))
        return carry, jnp.swapaxes(steps, 0, 1), module(query, memory).output

    with jax.enable_x64(True):  # float32 stays float32 there, too
        arguments = [
            jax.tree.map(lambda leaf, dtype=dtype: np.asarray(leaf).astype(dtype), leaves)
            for dtype in map(jnp.dtype, tolerances)
            for leaves in [(params, normal(B, T, 12), normal(B, S, 12, seed=3))]
        ]
        found = run_jit(lambda cases: [calls(*case) for case in cases], arguments)
    for (dtype, tolerance), (carry, steps, expected) in zip(tolerances.items(), found, strict=True):
        assert steps.dtype == dtype
        assert carry.dtype == (jnp.float64 if dtype == "float64" else jnp.float32), dtype
        wide = (array.astype(np.float64) for array in (steps, expected))
        np.testing.assert_allclose(*wide, atol=tolerance, err_msg=dtype)
