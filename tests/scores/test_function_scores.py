"""Plain functions as scores, in every function and module that takes a score."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx
from oracles import assert_leaves_close, normal

import attention_jax as aj
from attention_jax.scores import FunctionScore

B, T, S, D = 2, 6, 8, 3
QUERY, KEY, VALUE = normal(B, T, D), normal(B, S, D), normal(B, S, D, seed=1)
KERNEL = normal(D, D)
LENGTHS = np.array([3, 8])
close = functools.partial(assert_leaves_close, rtol=2e-5, atol=2e-6)


def product(q, k):
    return q @ k.T


def general(params, q, k):
    return q @ params["kernel"] @ k.T


def test_params_of_a_function_and_their_gradient():
    allowed = np.arange(S) < LENGTHS[:, None, None]

    def ours(params):
        return aj.attention(
            QUERY, KEY, VALUE, score=general, params=params, mask=aj.padding_mask(LENGTHS),
            implementation="tiled", block_sizes=aj.BlockSizes(3, 4),
        )  # fmt: skip

    def plain(params):
        logits = jnp.einsum("btd,de,bse->bts", QUERY, params["kernel"], KEY)
        return jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf)) @ VALUE

    @quick_jit
    def gradients(params):
        losses = (lambda params, f=f: jnp.sum(jnp.sin(f(params))) for f in (ours, plain))
        return [jax.value_and_grad(loss)(params) for loss in losses]

    close(*gradients({"kernel": KERNEL}))


def test_each_function_compiles_once():
    traces = []

    def counted(q, k):
        if len(q) == T:  # not the small tile on which a function is traced in every call
            traces.append(q.shape)
        return q @ k.T

    for scale in (1, 2, 3):
        aj.attention(scale * QUERY, KEY, VALUE, score=counted)
    once = len(traces)
    assert once > 0
    aj.attention(QUERY, KEY, VALUE, score=lambda q, k: counted(q, k))
    assert len(traces) == 2 * once
    assert len({FunctionScore(counted), FunctionScore(counted), FunctionScore(product)}) == 2


def test_callables_that_count_as_functions():
    expected = aj.attention_weights(QUERY, KEY, score="dot")

    def scaled(q, k, scale=1.0):
        return scale * (q @ k.T)

    partial, named = functools.partial(scaled, scale=1.0), aj.get_score(f"{__name__}:product")
    for score in (scaled, jax.jit(product), partial, named):
        close(aj.attention_weights(QUERY, KEY, score=score), expected)


def test_modules_need_a_score_that_initialises_its_params():
    with pytest.raises(ValueError, match=r"general takes params .* define init"):
        aj.nn.Attention(general, D, D, rngs=nnx.Rngs(0))
