"""Plain functions as scores, in every function and module that takes a score."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx

import attention_jax as aj
from attention_jax import analysis, interop
from attention_jax.scores import FunctionScore

B, T, S, D = 2, 6, 8, 3
RNG = np.random.default_rng(0)
QUERY, KEY = (RNG.normal(size=(B, n, D)).astype(np.float32) for n in (T, S))
VALUE = RNG.normal(size=(B, S, D)).astype(np.float32)
KERNEL = RNG.normal(size=(D, D)).astype(np.float32)
LENGTHS = np.array([3, 8])


def product(q, k):
    return q @ k.T


def general(params, q, k):
    return q @ params["kernel"] @ k.T


def close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, expected)


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
        close(got[name], rows)


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

    params = {"kernel": jnp.asarray(KERNEL)}
    direction = {"kernel": jnp.asarray(QUERY[0, :D])}

    @quick_jit
    def derivatives(params):
        """Values, gradients, and products of the Hessian with a direction."""
        losses = (lambda params, f=f: jnp.sum(jnp.sin(f(params))) for f in (ours, plain))
        return [jax.jvp(jax.value_and_grad(loss), (params,), (direction,)) for loss in losses]

    close(*derivatives(params))


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
    assert FunctionScore(counted) == FunctionScore(counted)
    assert hash(FunctionScore(counted)) == hash(FunctionScore(counted))
    assert FunctionScore(counted) != FunctionScore(lambda q, k: q @ k.T)


def test_callables_that_count_as_functions():
    expected = aj.attention_weights(QUERY, KEY, score="dot")

    def scaled(q, k, scale=1.0):
        return scale * (q @ k.T)

    for score in (
        scaled,
        jax.jit(product),
        functools.partial(scaled, scale=1.0),
        aj.get_score(f"{__name__}:product"),
    ):
        close(aj.attention_weights(QUERY, KEY, score=score), expected)
    capped = aj.SoftCap(aj.get_score(product), cap=2.0)
    expected = aj.attention_weights(QUERY, KEY, score=aj.SoftCap(aj.Dot(), cap=2.0))
    close(aj.attention_weights(QUERY, KEY, score=capped), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": lambda q: q}, r"function of \(q, k\) or \(params, q, k\); got .*<lambda>\(q\)"),
        ({"score": lambda *tokens: 0}, r"function of \(q, k\) .*; got .*<lambda>\(\*tokens\)"),
        ({"score": lambda q, k, *, scale: 0}, r"function of \(q, k\) .*<lambda>\(q, k, \*, scale"),
        (
            {"score": lambda q, k: q},
            r"score .*<lambda>: pair must return float logits \[5, 7\] .*; got float32 \[5, 3\]",
        ),
        ({"score": lambda q, k: 0.0}, r"score .*<lambda>: pair must return .* got a float"),
        ({"score": lambda q, k: (q @ k.T).astype(int)}, r"pair must return float .* got int32 "),
        ({"score": general}, r"params must be a pytree of float arrays for score general, .*{}"),
        (
            {"score": general, "params": {"kernel": np.eye(D, dtype=int)}},
            r"params\['kernel'\] must be floating-point; got dtype int",
        ),
        (
            {"score": product, "params": {"kernel": KERNEL}},
            r"params must be {} for score product .* got {'kernel': \[3, 3\]}",
        ),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        aj.attention(QUERY, KEY, VALUE, **arguments)


def test_a_traced_array_from_the_enclosing_scope_is_refused():
    def closed_over(kernel):
        return aj.attention(QUERY, KEY, VALUE, score=lambda q, k: q @ kernel @ k.T).sum()

    def bound(kernel):
        score = functools.partial(lambda kernel, q, k: q @ kernel @ k.T, kernel)
        return aj.attention(QUERY, KEY, VALUE, score=score).sum()

    for loss in (closed_over, bound):
        with pytest.raises(ValueError, match=r"traced array float32\[3,3\].*: take it as a param"):
            jax.grad(loss)(KERNEL)


def test_modules_need_a_score_that_initialises_its_params():
    with pytest.raises(ValueError, match=r"general takes params .* subclass Score and define init"):
        aj.nn.Attention(general, D, D, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("score", [aj.Additive, "additive", aj.Additive()])
def test_missing_params(score):
    with pytest.raises(
        ValueError, match=r"give params=score.init\(rng, 3, 3\), where score = Additive\(hidden"
    ):
        aj.attention(QUERY, KEY, VALUE, score=score)
