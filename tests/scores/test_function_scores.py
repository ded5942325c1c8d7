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
from attention_jax import analysis, interop
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


def results_of(score):
    """The results of every function and module that takes a score."""
    mask = aj.padding_mask(LENGTHS)
    arrays, inputs = (QUERY, KEY, VALUE), {"score": score, "mask": mask}
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    heads = [array[:, :, None] for array in arrays]
    flax_layer = nnx.MultiHeadAttention(
        1, D, attention_fn=interop.flax_attention_fn(score), decode=False, rngs=nnx.Rngs(0)
    )
    return {
        "reference": aj.attention(*arrays, **inputs, implementation="reference"),
        "tiled": aj.attention(
            *arrays, **inputs, implementation="tiled", block_sizes=aj.BlockSizes(4, 4)
        ),
        "weights": aj.attention_weights(QUERY, KEY, **inputs),
        "ring": aj.ring_attention(*arrays, **inputs, mesh=mesh),
        "coverage": aj.coverage_attention(*arrays, **inputs, coverage_kernel=jnp.ones(D)),
        "monotonic": aj.monotonic_attention(*arrays, **inputs),
        "local": aj.local_attention(*arrays, **inputs, centers=jnp.arange(T), radius=2),
        "interop": interop.dot_product_attention(*heads, score=score),
        "flax": flax_layer(QUERY),
        "module": aj.nn.Attention(score, D, D, rngs=nnx.Rngs(0))(QUERY, KEY, mask=mask),
        "heads": aj.nn.MultiHeadAttention(score, D, num_heads=1, rngs=nnx.Rngs(0))(QUERY),
        "gradients": analysis.attention_gradients(*arrays, VALUE[:, :T], **inputs),
    }


def test_every_function_and_module_takes_a_function_as_score():
    # `Dot` is the same score, with its own tests and a hand-written backward pass.
    got, expected = quick_jit(lambda: (results_of(product), results_of("dot")))()
    for name, rows in expected.items():
        assert_leaves_close(
            jax.tree.leaves(got[name]), jax.tree.leaves(rows), rtol=2e-5, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_params_of_a_function_and_their_gradient(implementation):
    allowed = np.arange(S) < LENGTHS[:, None, None]

    def ours(params):
        return aj.attention(
            QUERY, KEY, VALUE, score=general, params=params, mask=aj.padding_mask(LENGTHS),
            implementation=implementation, block_sizes=aj.BlockSizes(3, 4),
        )  # fmt: skip

    def plain(params):
        logits = jnp.einsum("btd,de,bse->bts", QUERY, params["kernel"], KEY)
        return jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf)) @ VALUE

    @quick_jit
    def derivatives(params):
        """Values, gradients, and products of the Hessian with a direction."""
        direction = {"kernel": normal(D, D, seed=1)}
        losses = (lambda params, f=f: jnp.sum(jnp.sin(f(params))) for f in (ours, plain))
        return [jax.jvp(jax.value_and_grad(loss), (params,), (direction,)) for loss in losses]

    close(*derivatives({"kernel": KERNEL}))


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
    capped, expected = (
        aj.attention_weights(QUERY, KEY, score=aj.SoftCap(score, cap=2.0))
        for score in (aj.get_score(product), aj.Dot())
    )
    close(capped, expected)


MISTAKES = {  # what the error names: arguments
    "score must be .*function of": [
        {"score": lambda q: q},
        {"score": lambda *tokens: 0},
        {"score": lambda q, k, *, scale: 0},
    ],
    r"params(\['kernel'\])? must be": [
        {"score": general},
        {"score": general, "params": {"kernel": np.eye(D, dtype=int)}},
        {"score": product, "params": {"kernel": KERNEL}},
    ],
    r"params must be .*give params=score.init\(rng, 3, 3\)": [
        {"score": score} for score in (aj.Additive, "additive", aj.Additive())
    ],
}


@pytest.mark.parametrize("named", MISTAKES)
def test_mistakes(named):
    for arguments in MISTAKES[named]:
        with pytest.raises(ValueError, match=named):
            aj.attention(QUERY, KEY, VALUE, **arguments)


def test_modules_need_a_score_that_initialises_its_params():
    with pytest.raises(ValueError, match=r"general takes params .* define init"):
        aj.nn.Attention(general, D, D, rngs=nnx.Rngs(0))
