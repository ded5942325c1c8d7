"""Every kind of cross attention: all queries at once, one after another, and against its core."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import (
    linear,
    multi_head,
    normal,
    run_jit,
    scrambled,
    softmax_where,
    weights_of,
)

from attention_jax import get_score, padding_mask
from attention_jax.functional.coverage import coverage_attention
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.nn import CrossAttention, ModelConfig

B, T, S, DIM, MEMORY_DIM = 2, 5, 7, 12, 13
LENGTHS = [4, 7]
KINDS = {
    "global": {},
    "heads": {"num_heads": 4},
    "local-m": {"attention": "local-m", "radius": 1},
    "local-m-monotonic": {"attention": "local-m", "radius": 1, "alignment": "monotonic"},
    "local-p": {"attention": "local-p", "radius": 2},
    "coverage": {"attention": "coverage"},
    "monotonic": {"attention": "monotonic"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, score="additive", **options):
    settings = dict(KINDS[kind])
    num_heads = settings.pop("num_heads", 1)
    config = ModelConfig(**settings)
    options = {"num_heads": num_heads, "keep_rngs": False, **options}
    return scrambled(
        lambda: CrossAttention(score, DIM, MEMORY_DIM, config, **options, rngs=nnx.Rngs(0))
    )


def tokens():
    return normal(B, T, DIM), normal(B, S, MEMORY_DIM, seed=3)


def expected_weights(kind, params, query, memory, length):
    """[T, S] of one example in float64; only of kinds without a past."""
    i, j = np.arange(T)[:, None], np.arange(S)[None, :]
    allowed, own = j < length, params["attention"]
    if kind == "heads":
        return multi_head("additive", own, query, memory, allowed)[1].mean(0)
    if kind.startswith("local-m"):
        center = i if kind == "local-m-monotonic" else length - 1 - i
        allowed = allowed & (np.abs(j - center) <= 1)
    weights = weights_of("additive", own["params"], query, memory, allowed)
    if kind == "local-p":
        hidden = np.tanh(query @ own["position_kernel"]) @ own["position_v"]
        center = length / (1 + np.exp(-hidden))[:, None]
        distances = np.abs(j - center)
        logits = np.log(weights_of("additive", own["params"], query, memory, allowed) + 1e-300)
        # The window's keys share the weight, and then a Gaussian of sigma = D / 2 scales it down.
        weights = softmax_where(logits, allowed & (distances <= 2)) * np.exp(-(distances**2) / 2)
    return weights


@every_kind
def test_all_at_once_is_one_after_another(kind):
    module, params = make(kind)
    query, memory = tokens()
    spoiled = memory.copy()
    for row, length in enumerate(LENGTHS):
        spoiled[row, length:] = np.nan

    @jax.jit
    def both(query, memory, lengths):
        options = {"source_lengths": lengths, "mask": padding_mask(lengths)}
        remembered = module.remember(memory)

        def step(carry, token):
            first, carry = carry
            found = module(
                token[:, None], remembered, first=first, carry=carry, return_weights=True, **options
            )
            return (first + 1, found[2]), (found[0][:, 0], found[1][:, 0])

        start = (0, module.first_carry((B,), S))
        (_, carry), steps = jax.lax.scan(step, start, jnp.swapaxes(query, 0, 1))
        steps = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), steps)
        return module(query, memory, return_weights=True, **options), (*steps, carry)

    whole, steps = jax.tree.map(np.asarray, both(query, memory, jnp.array(LENGTHS)))
    output, weights, _ = whole
    assert (output.shape, weights.shape) == ((B, T, DIM), (B, T, S))
    for one, other in zip(*map(jax.tree.leaves, (steps, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for found in both(query, spoiled, jnp.array(LENGTHS)):  # what padding holds is not seen
        for one, other in zip(found[:2], whole[:2], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(weights[row, :, length:], 0)
        wide = (query[row].astype(np.float64), memory[row].astype(np.float64))
        if kind not in ("coverage", "monotonic"):
            expected = expected_weights(kind, params, *wide, length)
            np.testing.assert_allclose(weights[row], expected, atol=1e-5)
        if kind == "heads":
            expected = multi_head("additive", params["attention"], *wide, np.arange(S) < length)[0]
        else:
            expected = linear(params["output"], np.asarray(weights[row], np.float64) @ wide[1])
        np.testing.assert_allclose(output[row], expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["coverage", "monotonic"])
def test_kinds_with_a_past_are_their_core(kind):
    module, params = make(kind)
    query, memory = tokens()
    mask = padding_mask(jnp.array(LENGTHS))
    own = jax.tree.map(np.float32, params["attention"])
    options = {
        "score": get_score("additive"),
        "params": own["params"],
        "mask": mask,
    }

    def both(query, memory):
        if kind == "coverage":
            kernel = own["coverage_kernel"]
            core = coverage_attention(query, memory, memory, coverage_kernel=kernel, **options)
        else:
            core = monotonic_attention(query, memory, memory, offset=own["offset"], **options)
        return module(query, memory, mask=mask, return_weights=True), core

    (output, weights, carry), core = run_jit(both, query, memory)
    if kind == "coverage":
        expected, found, last = core.output, core.weights, core.coverage
        np.testing.assert_allclose(carry, np.sum(weights, axis=1), atol=1e-5)
    else:
        expected, found = core
        last = found[:, -1]
    np.testing.assert_allclose(weights, found, atol=1e-6)
    np.testing.assert_allclose(carry, last, atol=1e-6)
    expected = np.asarray(expected, np.float64) @ params["output"]["kernel"]
    np.testing.assert_allclose(output, expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["coverage", "monotonic"])
def test_the_carry_keeps_its_dtype(kind):
    tolerances = {"bfloat16": 0.05, "float32": 1e-5, "float64": 1e-12}
    graph, params = nnx.split(make(kind)[0])

    def calls(params, query, memory):
        module = nnx.merge(graph, params)

        def step(carry, token):
            output, _, carry = module(token[:, None], memory, carry=carry)
            return carry, output[:, 0]

        first = module.first_carry((B,), S, query.dtype)
        carry, steps = jax.lax.scan(step, first, jnp.swapaxes(query, 0, 1))
        return carry, jnp.swapaxes(steps, 0, 1), module(query, memory)[0]

    with jax.enable_x64(True):  # float32 stays float32 there, too
        arguments = [
            jax.tree.map(lambda leaf, dtype=dtype: np.asarray(leaf).astype(dtype), leaves)
            for dtype in map(jnp.dtype, tolerances)
            for leaves in [(params, *tokens())]
        ]
        found = run_jit(lambda cases: [calls(*case) for case in cases], arguments)
    for (dtype, tolerance), (carry, steps, expected) in zip(tolerances.items(), found, strict=True):
        assert steps.dtype == dtype
        assert carry.dtype == (jnp.float64 if dtype == "float64" else jnp.float32), dtype
        wide = (array.astype(np.float64) for array in (steps, expected))
        np.testing.assert_allclose(*wide, atol=tolerance, err_msg=dtype)


def test_the_carry_keeps_its_dtype_beside_wider_parameters():
    with jax.enable_x64(True):
        config = ModelConfig(attention="coverage")
        module, params = scrambled(
            lambda: CrossAttention("dot", DIM, DIM, config, rngs=nnx.Rngs(0))
        )
        module.attention.coverage_kernel = nnx.Param(params["attention"]["coverage_kernel"])
        first = module.first_carry((), S, jnp.float32)
        _, _, carry = run_jit(
            lambda first: module(normal(1, DIM), normal(S, DIM), carry=first), first
        )
    assert first.dtype == carry.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["global", "heads", "local-m", "local-p", "monotonic"])
def test_dropout_or_noise_only_with_a_rng(kind):
    module, _ = make(kind, dropout_rate=0.5)
    plain, _ = make(kind)
    query, memory = tokens()
    module.eval()

    @jax.jit
    def call(rng):
        dropped = module(query, memory, dropout_rng=rng)[0]
        return dropped, module(query, memory)[0], plain(query, memory)[0]

    first, undropped, without = map(np.asarray, call(jax.random.key(0)))
    np.testing.assert_array_equal(first, call(jax.random.key(0))[0])
    assert np.any(np.abs(first - without) > 1e-3)
    np.testing.assert_allclose(undropped, without, atol=1e-5)
    assert np.any(first != np.asarray(call(jax.random.key(1))[0]))


def test_without_lengths_all_of_the_memory_is_real():
    module, _ = make("local-m")
    query, memory = tokens()
    whole = jnp.full((B,), S)
    found, expected = run_jit(
        lambda query, memory: (
            module(query, memory, return_weights=True),
            module(query, memory, source_lengths=whole),
        ),
        query,
        memory,
    )
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    weights = found[1]
    window = np.abs(np.arange(S)[None, :] - (S - 1 - np.arange(T))[:, None]) <= 1
    np.testing.assert_array_equal(weights != 0, np.broadcast_to(window, weights.shape))


def test_first_places_the_window():
    module, _ = make("local-m-monotonic")
    query, memory = tokens()
    weights = run_jit(
        lambda query: module(query, memory, first=3, return_weights=True)[1], query[:, :2]
    )
    window = np.abs(np.arange(S)[None, :] - np.array([3, 4])[:, None]) <= 1
    np.testing.assert_array_equal(weights != 0, np.broadcast_to(window, (B, 2, S)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "locally"},
         "attention must be one of global, local-m, local-p, coverage, monotonic; got 'locally'"),
        ({"alignment": "none"}, "alignment must be one of monotonic, reversed; got 'none'"),
        ({"radius": -1}, "radius must be at least 0; got -1"),
        ({"attention": "local-p", "radius": 0}, "radius must be at least 1; got 0"),
        ({"normalizer": "log_scaled(start=0)"}, "start must be at least 1; got 0"),
        ({"normalizer": "ssmax", "attention": "coverage"},
         "normalizer must be softmax with attention 'coverage'; got 'ssmax'"),
    ],
)  # fmt: skip
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("global", {"num_heads": 0}, "num_heads must be at least 1; got 0"),
        ("global", {"num_heads": 5}, "qkv_dim must be a multiple of 5 heads; got 12"),
        ("global", {}, "key_dim must be 12 to match score"),
        ("coverage", {"num_heads": 4}, "num_heads must be 1 with attention 'coverage'; got 4"),
        ("monotonic", {"rotary_wavelength": 50.0}, "attention must be global .*; got 'monotonic'"),
        ("global", {"rotary_wavelength": 0.0}, "rotary_wavelength must be .* above 0; got 0.0"),
        (
            "global",
            {"rotary_wavelength": 50.0, "num_position_ids": 2},
            "memory_dim must be a multiple of 4 to be rotated; got 13",
        ),
    ],
)
def test_settings_that_do_not_go_together(attention, options, message):
    config = ModelConfig(attention=attention)
    with pytest.raises(ValueError, match=message):
        CrossAttention("dot", DIM, MEMORY_DIM, config, **options, rngs=nnx.Rngs(0))
