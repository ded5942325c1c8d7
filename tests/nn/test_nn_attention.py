"""The attention modules against numpy by hand, the functional core, and plain JAX transforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit

from attention_jax import Additive, Dot, General, ScaledDot, Score, attention, padding_mask
from attention_jax.nn import (
    AdditiveAttention,
    Attention,
    DotAttention,
    GeneralAttention,
    ScaledDotAttention,
)

B, T, S, DV = 2, 5, 7, 13
MODULES = {"additive": (AdditiveAttention, 3, 11), "general": (GeneralAttention, 3, 11)}
MODULES |= {"dot": (DotAttention, 11, 11), "scaled": (ScaledDotAttention, 11, 11)}
every_score = pytest.mark.parametrize("score", MODULES)


@dataclasses.dataclass(frozen=True)
class Scaled(Score):
    """A user's score with nested parameters: gain * (q * scales) . k + bonus of the key."""

    gain: float = 0.5

    def init(self, rng, query_dim, key_dim):
        scales = jax.random.normal(rng, (query_dim,))
        return {"query": {"scales": scales}, "key": ({"bonus": jnp.linspace(-1, 1, key_dim)},)}

    def pair(self, params, q_features, k_features):
        bonus = k_features @ params["key"][0]["bonus"]
        dots = self.gain * (q_features * params["query"]["scales"][None, :]) @ k_features.T
        return dots + bonus[None, :]


def inputs(query_dim, key_dim):
    rng = np.random.default_rng(3)
    return (
        rng.normal(size=(B, T, query_dim)).astype(np.float32),
        rng.normal(size=(B, S, key_dim)).astype(np.float32),
        rng.normal(size=(B, S, DV)).astype(np.float32),
    )


def numpy_logits(score, params, query, key):
    """The books' formulas in float64, a pair at a time; params by name."""
    logits = np.zeros((*query.shape[:-1], key.shape[-2]))
    for index in np.ndindex(logits.shape):
        *batch, i, j = index
        q, k = query[*batch, i].astype(np.float64), key[*batch, j].astype(np.float64)
        if score == "additive":
            stacked = np.concatenate([params["query_kernel"], params["key_kernel"]])
            logits[index] = np.tanh(np.concatenate([q, k]) @ stacked) @ params["v"]
        elif score == "general":
            logits[index] = q @ params["kernel"] @ k
        elif score == "scaled":
            logits[index] = q @ k / np.sqrt(k.size)
        else:
            logits[index] = q @ k
    return logits


def numpy_softmax(logits):
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def numpy_params(module):
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(module))
    ).get("params", {})


@every_score
def test_named_module_is_the_formula_and_the_functional_core(score):
    module_class, query_dim, key_dim = MODULES[score]
    module = module_class(query_dim, key_dim, rngs=nnx.Rngs(5))
    query, key, value = inputs(query_dim, key_dim)
    params = numpy_params(module)
    weights = numpy_softmax(numpy_logits(score, params, query, key))

    float32 = jax.tree.map(np.float32, params)
    unnamed = Attention(score, query_dim, key_dim, rngs=nnx.Rngs(5))

    def calls(query, key, value):
        return (
            module(query, key, value),
            attention(query, key, value, score=score, params=float32),
            unnamed(query, key, value),
            module(query, key),
        )

    output, functional, unnamed_output, of_keys = run_jit(calls, query, key, value)
    np.testing.assert_allclose(output, weights @ value, atol=3e-6)
    np.testing.assert_array_equal(output, functional)
    np.testing.assert_array_equal(output, unnamed_output)
    # The key is the value when none is given.
    np.testing.assert_allclose(of_keys, weights @ key, atol=3e-6)


@every_score
def test_mask_bias_and_returned_weights(score):
    module_class, query_dim, key_dim = MODULES[score]
    module = module_class(query_dim, key_dim, rngs=nnx.Rngs(5))
    query, key, value = inputs(query_dim, key_dim)
    bias = np.random.default_rng(4).normal(size=(B, T, S)).astype(np.float32)
    lengths = [3, 6]
    logits = numpy_logits(score, numpy_params(module), query, key) + bias
    for row, length in enumerate(lengths):
        logits[row, :, length:] = -np.inf
    expected = numpy_softmax(logits)

    options = {"mask": padding_mask(jnp.array(lengths)), "bias": bias, "return_weights": True}
    output, weights = run_jit(functools.partial(module, **options), query, key, value)
    np.testing.assert_allclose(weights, expected, atol=3e-6)
    np.testing.assert_allclose(output, expected @ value, atol=3e-6)
    np.testing.assert_allclose(np.sum(weights, -1), np.ones((B, T)), atol=1e-6)


@pytest.mark.parametrize(
    ("score", "count"), [("additive", 8256), ("general", 4096), ("dot", 0), ("scaled", 0)]
)
def test_parameter_counts_at_64(score, count):
    module = nnx.eval_shape(lambda: MODULES[score][0](64, 64, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module))) == count


def test_options_of_the_named_modules():
    narrow, wide = (
        nnx.eval_shape(lambda size=size: AdditiveAttention(3, 5, hidden_dim=size, rngs=nnx.Rngs(0)))
        for size in (2, None)
    )
    assert narrow.score == Additive(2)
    assert wide.params["v"].shape == (5,)
    assert ScaledDotAttention(3, 3, scale=2.0, rngs=nnx.Rngs(0)).score == ScaledDot(2.0)
    assert DotAttention(3, 3, rngs=nnx.Rngs(0)).score == Dot()
    assert GeneralAttention(3, 5, rngs=nnx.Rngs(0)).score == General()


@pytest.mark.parametrize("score", [Scaled(0.25), "test_nn_attention:Scaled"])
def test_a_users_score_with_nested_parameters(score):
    module = Attention(score, 11, 11, rngs=nnx.Rngs(2))
    gain = module.score.gain
    query, key, value = inputs(11, 11)
    params = numpy_params(module)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 22
    scales, bonus = jax.tree.leaves(params["query"])[0], jax.tree.leaves(params["key"])[0]
    logits = gain * (query * scales) @ key.transpose(0, 2, 1) + (key @ bonus)[:, None, :]
    np.testing.assert_allclose(module(query, key, value), numpy_softmax(logits) @ value, atol=3e-6)
    # Out to a pure dict and back, with new values in it.
    graph, state = nnx.split(module)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, nnx.to_pure_dict(state))
    output = nnx.merge(graph, doubled)(query, key, value)
    np.testing.assert_allclose(
        output,
        numpy_softmax(
            gain * (query * 2 * scales) @ key.transpose(0, 2, 1) + (key @ (2 * bonus))[:, None, :]
        )
        @ value,
        atol=3e-6,
    )


@pytest.mark.parametrize("score", ["dot", "scaled", Dot(), ScaledDot(2.0)])
def test_unequal_sizes_fail_at_construction_in_one_line(score):
    with pytest.raises(ValueError, match=r"key_dim must be 3 to match score .*Dot.*; got 11") as e:
        Attention(score, 3, 11, rngs=nnx.Rngs(0))
    assert "\n" not in str(e.value)


def test_unknown_score_fails_at_construction():
    with pytest.raises(ValueError, match="did you mean 'additive'"):
        Attention("adit", 3, 3, rngs=nnx.Rngs(0))


def test_dropout_with_an_explicit_rng():
    query, key, _ = inputs(11, 11)
    module = Attention("scaled", 11, 11, dropout_rate=0.25, rngs=nnx.Rngs(0))
    weights = numpy_softmax(numpy_logits("scaled", {}, query, key))
    eye = np.broadcast_to(np.eye(S, dtype=np.float32), (B, S, S))
    np.testing.assert_allclose(module(query, key, eye, deterministic=True), weights, atol=3e-6)

    # With the unit vectors as values, the output is the weights that dropout left.
    output, returned = module(query, key, eye, dropout_rng=jax.random.key(1), return_weights=True)
    output = np.asarray(output)
    np.testing.assert_allclose(returned, weights, atol=3e-6)
    kept = output != 0
    assert 0 < np.sum(~kept) < kept.size / 2
    np.testing.assert_allclose(output[kept], (weights / 0.75)[kept], atol=3e-6)
    again = module(query, key, eye, dropout_rng=jax.random.key(1))
    np.testing.assert_array_equal(output, again)
    assert np.any(output != np.asarray(module(query, key, eye, dropout_rng=jax.random.key(2))))
    # A rng alone drops nothing.
    plain = Attention("scaled", 11, 11, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        plain(query, key, eye, dropout_rng=jax.random.key(1)), weights, atol=3e-6
    )


def pure(module):
    """(function of a pure dict of parameters, that dict): how training handles it."""
    graph, state = nnx.split(module)
    return lambda params, *args: nnx.merge(graph, params)(*args), nnx.to_pure_dict(state)


def test_jit_and_grad_of_a_pure_dict():
    query, key, value = inputs(3, 11)
    apply, params = pure(GeneralAttention(3, 11, rngs=nnx.Rngs(0)))
    cotangent = np.random.default_rng(6).normal(size=(B, T, DV))

    @jax.jit
    def loss(params):
        return jnp.sum(apply(params, query, key, value) * jnp.float32(cotangent))

    def numpy_loss(kernel):
        logits = np.einsum("btq,qk,bsk->bts", query.astype(np.float64), kernel, key)
        return np.sum(numpy_softmax(logits) @ value * cotangent)

    kernel = np.asarray(params["params"]["kernel"], np.float64)
    expected = np.zeros_like(kernel)
    for index in np.ndindex(kernel.shape):
        step = np.zeros_like(kernel)
        step[index] = 1e-5
        expected[index] = (numpy_loss(kernel + step) - numpy_loss(kernel - step)) / 2e-5
    dkernel = jax.jit(jax.grad(loss))(params)["params"]["kernel"]
    np.testing.assert_allclose(dkernel, expected, atol=1e-4)
    np.testing.assert_allclose(loss(params), numpy_loss(kernel), rtol=1e-4)


def test_vmap_over_stacked_parameters():
    query, key, value = inputs(3, 11)
    modules = [AdditiveAttention(3, 11, hidden_dim=2, rngs=nnx.Rngs(seed)) for seed in range(3)]
    apply, _ = pure(modules[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[pure(m)[1] for m in modules])
    outputs = jax.vmap(lambda params: apply(params, query, key, value))(stacked)
    for module, output in zip(modules, outputs, strict=True):
        weights = numpy_softmax(numpy_logits("additive", numpy_params(module), query, key))
        np.testing.assert_allclose(output, weights @ value, atol=3e-6)


def test_scan_of_gradient_steps_is_a_loop_of_them():
    query, key, value = inputs(3, 11)
    module = GeneralAttention(3, 11, rngs=nnx.Rngs(0))
    apply, params = pure(module)
    wanted = np.random.default_rng(8).normal(size=(B, T, DV)).astype(np.float32)

    def step(params, _):
        def loss(params):
            return jnp.mean((apply(params, query, key, value) - wanted) ** 2)

        value_, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, d: p - 2 * d, params, gradient), value_

    scanned, losses = jax.jit(lambda params: jax.lax.scan(step, params, length=11))(params)
    assert losses[-1] < 0.9 * losses[0]
    for _ in range(11):
        params, _ = jax.jit(step)(params, None)
    np.testing.assert_allclose(
        scanned["params"]["kernel"], params["params"]["kernel"], rtol=1e-5, atol=1e-6
    )
    # The module that the parameters came from is untouched.
    assert np.any(np.asarray(module.params["kernel"][...]) != params["params"]["kernel"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 2}, "dropout_rate must be a number in"),
        ({"implementation": "fast"}, "None or one of reference, tiled, .*; got 'fast'"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(Attention, "additive"),
        AdditiveAttention,
        DotAttention,
        GeneralAttention,
        ScaledDotAttention,
    ],
)
def test_wrong_options_fail_at_construction(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(3, 3, rngs=nnx.Rngs(0), **options)


def test_no_features_fail_at_construction():
    with pytest.raises(ValueError, match="key_dim must be at least 1; got 0"):
        Attention("additive", 4, 0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "query_dim must be at least 1; got 0"),
        (3.0, "query_dim must be an integer; got 3.0"),
        ("3", "query_dim must be an integer; got '3'"),
    ],
)
def test_wrong_sizes_fail_at_construction(size, message):
    with pytest.raises(ValueError, match=message):
        Attention("dot", size, 3, rngs=nnx.Rngs(0))


def test_lists_and_what_is_no_array():
    module = Attention("dot", 3, 3, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_array_equal(module(tokens.tolist(), tokens.tolist()), module(tokens, tokens))
    with pytest.raises(ValueError, match="query must be an array; got str"):
        module("tokens", tokens)
