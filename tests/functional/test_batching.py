"""Batch axes: what one example gives, for every example; axes of size 1 and 0; `jax.vmap`."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    DK,
    DQ,
    DV,
    S,
    T,
    _general,
    assert_close,
    numpy_example,
    quick_jit,
)

import attention_jax as aj
from attention_jax.pairwise.biases import as_bias

B, N = 2, 3
RNG = np.random.default_rng(8)
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


QUERY, KEY, VALUE = normal(B, N, T, DQ), normal(B, N, S, DK), normal(B, N, S, DV)
ALL = np.ones((T, S), bool)


def one_example(query, key, value, kernel, bias=0.0, allowed=ALL):
    """Loops in NumPy, for one example of the general score."""
    inputs = {
        "query": query, "key": key, "value": value, "params": {"kernel": kernel},
        "bias": np.broadcast_to(bias, (T, S)),
    }  # fmt: skip
    return numpy_example(_general, jax.tree.map(np.float64, inputs), allowed)[0]["output"]


def looped(kernel, bias=None, allowed=None):
    """[B, N, T, Dv], example by example; the arguments broadcast to axes [B, N]."""
    kernels = np.broadcast_to(kernel, (B, N, DQ, DK))
    biases = np.broadcast_to(0.0 if bias is None else bias, (B, N, T, S))
    tables = np.broadcast_to(True if allowed is None else allowed, (B, N, T, S))
    return np.array(
        [
            [
                one_example(
                    QUERY[b, n], KEY[b, n], VALUE[b, n], kernels[b, n], biases[b, n], tables[b, n]
                )
                for n in range(N)
            ]
            for b in range(B)
        ]
    )


@pytest.mark.parametrize("axes", [(N,), (B, 1), (B, N)])
@every_implementation
def test_parameters_of_each_head_or_example(implementation, axes):
    kernel = normal(*axes, DQ, DK)

    def run(kernel):
        output = aj.attention(
            QUERY, KEY, VALUE, score="general", params={"kernel": kernel},
            implementation=implementation,
        )  # fmt: skip
        return output.sum(), output

    (_, output), gradient = quick_jit(jax.value_and_grad(run, has_aux=True))(kernel)
    assert_close("output", output, looped(kernel), 2e-6)
    assert gradient.shape == kernel.shape


BIAS_SHAPES = [
    (), (S,), (T, 1), (T, S), (N, 1, 1), (N, 1, S), (B, 1, T, 1), (B, 1, T, S), (1, N, T, S),
    (B, N, 1, S), (B, N, T, S),
]  # fmt: skip


@every_implementation
def test_bias_of_every_shape_and_its_gradient(implementation):
    """A sum of biases of all shapes, each an argument of its own."""
    biases = [normal(*shape) / 4 for shape in BIAS_SHAPES]
    kernel = normal(DQ, DK)
    cotangent = np.float64(normal(B, N, T, DV))

    @quick_jit
    def run(biases):
        def attend(biases):
            bias = functools.reduce(operator.add, map(as_bias, biases))
            return aj.attention(
                QUERY, KEY, VALUE, score="general", params={"kernel": kernel},
                bias=bias, implementation=implementation,
            )  # fmt: skip

        output, pull_back = jax.vjp(attend, biases)
        return output, pull_back(jnp.asarray(cotangent, jnp.float32))[0]

    output, gradients = run(biases)
    total = sum(np.broadcast_to(np.float64(bias), (B, N, T, S)) for bias in biases)
    assert_close("output", output, looped(kernel, total), 2e-6)
    # dL_ij = A_ij (dA_ij - sum_k A_ik dA_ik), summed over the axes that share a bias
    logits = np.einsum("bntd,de,bnse->bnts", *(np.float64(x) for x in (QUERY, kernel, KEY)))
    weights = np.exp(logits + total)
    weights = weights / weights.sum(-1, keepdims=True)
    dweights = np.einsum("bntv,bnsv->bnts", cotangent, np.float64(VALUE))
    dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    for bias, gradient in zip(biases, gradients, strict=True):
        padded = (1,) * (4 - bias.ndim) + bias.shape
        shared = tuple(axis for axis, size in enumerate(padded) if size == 1)
        dbias = dlogits.sum(shared, keepdims=True).reshape(bias.shape)
        if padded[-1] == 1:  # softmax does not see a constant of the row
            assert np.abs(gradient).max(initial=0) < 2e-5
            assert gradient.shape == bias.shape
        else:
            assert_close(f"gradient of bias {bias.shape}", gradient, dbias, 2e-5)


@pytest.mark.parametrize("batch", [(0,), (1, 2), (3, 0, 1)])
@every_implementation
def test_batch_axes_of_size_one_and_zero(implementation, batch):
    query, key, value = normal(*batch, T, DK), normal(*batch, S, DK), normal(*batch, S, DV)

    def run(query):
        output, statistics = aj.attention(
            query, key, value, mask=aj.causal_mask(1), dropout_rate=0.5,
            dropout_rng=jax.random.key(0), return_statistics=True, implementation=implementation,
        )  # fmt: skip
        return output.sum(), (output, statistics)

    (_, (output, statistics)), gradient = quick_jit(jax.value_and_grad(run, has_aux=True))(query)
    assert output.shape == (*batch, T, DV)
    assert {x.shape for x in statistics} == {(*batch, T)}
    assert gradient.shape == query.shape
    if implementation == "reference":  # attention_weights has no implementations
        assert quick_jit(aj.attention_weights)(query, key).shape == (*batch, T, S)


@pytest.mark.parametrize(("target", "source"), [(0, S), (T, 0)])
@every_implementation
def test_no_queries_or_no_keys(implementation, target, source):
    query, key, value = normal(target, DK), normal(source, DK), normal(source, DV)
    params = aj.Additive().init(jax.random.key(0), DK, DK)
    masks = [None, aj.causal_mask(), np.ones((1, 1), bool)]

    def run(params, mask):
        output, statistics = aj.attention(
            query, key, value, score="additive", params=params, mask=mask, return_statistics=True,
            implementation=implementation,
        )  # fmt: skip
        return output.sum(), (output, statistics)

    results_and_gradients = jax.value_and_grad(run, has_aux=True)
    for (_, (output, statistics)), gradients in quick_jit(
        lambda params: [results_and_gradients(params, mask) for mask in masks]
    )(params):
        np.testing.assert_array_equal(output, np.zeros((target, DV)))
        np.testing.assert_array_equal(statistics.logsumexp, np.full(target, -np.inf))
        np.testing.assert_array_equal(statistics.entropy, np.zeros(target))
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


@every_implementation
def test_dropout_keys_with_axes_are_shared_where_an_axis_is_one(implementation):
    rngs, values = jax.random.split(jax.random.key(0), (B, 1)), jnp.eye(S)

    @quick_jit
    def dropped(query, key, rngs):
        return aj.attention(
            query, key, values, score="general", params={"kernel": jnp.ones((DQ, DK))},
            dropout_rate=0.5, dropout_rng=rngs, implementation=implementation,
        )  # fmt: skip

    kept = np.asarray(dropped(QUERY, KEY, rngs)) != 0
    assert np.all(kept == kept[:, :1])
    assert np.any(kept[0] != kept[1])
    np.testing.assert_array_equal(np.asarray(dropped(QUERY[1], KEY[1], rngs[1])) != 0, kept[1])
