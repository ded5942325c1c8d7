"""The arrays that `capture` returns, against NumPy and `attention_weights`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture_cases import ALLOWED, MASK, B, D, S, T, close, normal, numpy_weights, only, tokens
from conformance import ALL_IMPLEMENTATIONS, quick_jit
from flax import nnx
from oracles import softmax

import attention_jax as aj
from attention_jax import nn
from attention_jax.analysis import capture
from attention_jax.analysis.jaxpr_evaluation import points_in
from attention_jax.functional.capture_point import capturing

TILE = aj.BlockSizes(query=2, key=3)
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


# --- one call ---


@every_implementation
def test_one_call(implementation):
    with jax.enable_x64(True):
        query, key, value = tokens()
        bias = normal(3, B, T, S)

        def attend(query, key, value, bias):
            return aj.attention(
                query, key, value, mask=MASK, bias=bias, implementation=implementation,
                block_sizes=TILE,
            )  # fmt: skip

        @quick_jit
        def both_ways(*arrays):
            return capture(attend, *arrays), capture(attend, *arrays, matrices=False)

        captured, without_matrices = both_ways(query, key, value, bias)
        seen, lean = only(captured), only(without_matrices)
        np.testing.assert_array_equal(seen.output, captured.output)
        np.testing.assert_array_equal(seen.mask, ALLOWED)

        logits = np.asarray(query) @ np.asarray(key).T / np.sqrt(D) + np.asarray(bias)
        assert np.all(np.isneginf(np.asarray(seen.logits)[~ALLOWED]))
        close(np.asarray(seen.logits)[ALLOWED], logits[ALLOWED])
        totals, weights = (np.exp(logits) * ALLOWED).sum(-1), softmax(logits, ALLOWED)
        close(seen.weights, weights)
        close(captured.output, weights @ np.asarray(value))
        with np.errstate(divide="ignore"):
            close(seen.statistics.logsumexp, np.log(totals))
        close(seen.statistics.entropy, -np.sum(weights * np.log(np.where(weights, weights, 1)), -1))
        close(seen.statistics.max_logit, np.where(ALLOWED, logits, -np.inf).max(-1))
        for name, array in (("query", query), ("key", key), ("value", value)):
            full = np.broadcast_to(array, (B, *array.shape[-2:]))
            np.testing.assert_array_equal(getattr(seen, name), full, err_msg=name)

        assert (lean.logits, lean.weights, lean.mask) == (None, None, None)
        for got, full in zip(lean.statistics, seen.statistics, strict=True):
            close(got, full)


# --- it leaves nothing behind ---


def test_a_function_compiled_before_has_points_while_captured_and_not_after():
    query, key, value = tokens()
    traces = []

    @jax.jit
    def attend(query):
        traces.append(capturing() is not None)
        return aj.attention(query, key, value)

    expected = attend(query)
    captured = capture(attend, query)
    close(only(captured).weights, numpy_weights(query, key), 1e-6)
    np.testing.assert_array_equal(captured.output, expected)
    np.testing.assert_array_equal(attend(query), expected)
    assert traces == [False, True]  # and the program without points is found again
    assert points_in(jax.make_jaxpr(attend)(query).jaxpr) == 0


def test_a_module_is_copied_and_its_random_stream_stays():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs
            options = {"dropout_rate": 0.5, "keep_rngs": False}
            self.attend = nn.Attention("general", D, D, **options, rngs=rngs)

        def __call__(self, query, key):
            return self.attend(query, key, dropout_rng=self.rngs.dropout())

        def twice(self, query, key):
            return self(query, key), self(query, key)

    def model():
        return Noisy(nnx.Rngs(params=0, dropout=1))

    query, key, _ = (x.astype(jnp.float32) for x in tokens())
    module = model()
    captured = capture(module, query, key)
    np.testing.assert_array_equal(captured.output, capture(module, query, key).output)
    np.testing.assert_allclose(captured.output, module(query, key), rtol=1e-6)
    assert int(module.rngs.dropout.count[...]) == 1  # of the call that was not captured
    (first, second), attentions = capture(model().twice, query, key)
    assert list(attentions) == ["attention", "attention#2"]
    assert np.any(first != second)


# --- names ---


def test_names():
    query, key, value = tokens()

    def attend(query):
        return aj.attention(query, key, value)

    def model(query):
        attend(query)
        with jax.named_scope("block"):
            with jax.named_scope("self"):
                attend(query * 2)
            jax.vmap(jax.named_scope("mapped")(attend))(query * 3)
            jax.jit(jax.named_scope("jitted")(attend))(query * 4)
            with jax.named_scope("self"):
                attend(query * 5)
        jax.checkpoint(attend)(query * 6)
        return jax.vmap(lambda query: jax.named_scope("own")(jax.vmap(attend))(query[None]))(query)

    names = []

    @quick_jit
    def attentions_of(query):
        attentions = capture(model, query).attentions
        names.extend(attentions)
        return attentions

    attentions = attentions_of(query)
    assert names == [  # in the order of computation, which `jax.jit` does not keep
        "attention",
        "block/self",
        "block/mapped",
        "block/jitted",
        "block/self#2",
        "attention#2",
        "own",
    ]
    for factor, name in enumerate(names[:6], start=1):
        weights = attentions[name].weights
        close(weights, numpy_weights(factor * np.asarray(query), key), 1e-6)
    assert attentions["own"].weights.shape == (B, 1, T, S)
