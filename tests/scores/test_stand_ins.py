"""Scores with an infinite slope: a pair that a mask hides sends no NaN.

The expected values come from a plain softmax whose distances are safe where the mask hides a pair.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import normal
from score_cases import slow_unless

import attention_jax as aj
from attention_jax.tiles.features import may_have_infinite_slopes

T, D = 7, 3
TILE = aj.BlockSizes(2, 3)
TOKENS, DIRECTION = normal(T, D), normal(T, D, seed=1)
MASKS = np.stack([np.tri(T, T, -1, dtype=bool), ~np.eye(T, dtype=bool) & (np.arange(T) < 5)])


@dataclasses.dataclass(frozen=True)
class Euclidean(aj.Score):
    """-scale |q - k|, whose slope is infinite where q = k"""

    def init(self, rng, query_dim, key_dim):
        return {"scale": jnp.ones(())}

    def pair(self, params, q_features, k_features):
        difference = q_features[:, None, :] - k_features[None, :, :]
        return -params["scale"] * jnp.sqrt(jnp.sum(difference**2, axis=-1))


def safe_attention(score, params, tokens, allowed):
    """Self-attention that computes hidden pairs from other tokens from the start."""
    far = jnp.broadcast_to(jnp.array([1.0, 0.0, 0.0]), (T, T, D))
    query = jnp.where(allowed[..., None], tokens[:, None, :], far)
    key = jnp.where(allowed[..., None], tokens[None, :, :], jnp.roll(far, 1, axis=-1))
    logits = -params["scale"] * jnp.linalg.norm(query - key, axis=-1)
    if isinstance(score, aj.SoftCap):
        logits = score.cap * jnp.tanh(logits / score.cap)
    exponentials = jnp.where(allowed, jnp.exp(logits), 0)
    total = exponentials.sum(1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1, total) @ tokens


def of_attention(implementation, score, params, tokens, mask):
    if implementation == "ring":
        mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
        attend = functools.partial(aj.ring_attention, mesh=mesh)
        tokens, mask = jnp.pad(tokens, ((0, 1), (0, 0))), jnp.pad(mask, ((0, 1), (0, 1)))
    else:
        attend = functools.partial(aj.attention, implementation=implementation)
    options = {"score": score, "params": params, "mask": mask, "block_sizes": TILE}
    return attend(tokens, tokens, tokens, **options)[:T]


CAPPED = aj.SoftCap(Euclidean(), 1.5)


@pytest.mark.parametrize(
    ("score", "implementation", "order"),
    [
        (Euclidean(), "tiled", 1),
        (Euclidean(), "ring", 1),
        (CAPPED, "reference", 2),
        (CAPPED, "tiled", 2),
    ],
)
def test_hidden_pairs_send_no_nan(score, implementation, order):
    """In gradients, and in a second derivative."""

    def derivatives(attend):
        def of_mask(mask):
            def gradient(tokens):
                params = {"scale": jnp.asarray(0.7)}
                loss = lambda *arrays: jnp.sum(jnp.sin(attend(*arrays, mask)))  # noqa: E731
                return jax.grad(loss, (0, 1))(params, tokens)

            if order == 1:
                return gradient(jnp.float64(TOKENS))
            return jax.jvp(gradient, (jnp.float64(TOKENS),), (jnp.float64(DIRECTION),))

        return quick_jit(jax.vmap(of_mask))(MASKS)

    with jax.enable_x64(True):
        got = derivatives(functools.partial(of_attention, implementation, score))
        expected = derivatives(functools.partial(safe_attention, score))
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attend", slow_unless(["monotonic"], ["coverage", "monotonic"]))
def test_hidden_pairs_of_other_forms_of_attention(attend):
    def loss(params, tokens, apart):
        """With `apart` > 0 the keys differ from the queries, so that no pair is singular."""
        arguments = {"score": Euclidean(), "params": params, "mask": jnp.asarray(MASKS[1])}
        arrays = tokens, tokens + apart, tokens
        if attend == "monotonic":
            return jnp.sum(jnp.sin(aj.monotonic_attention(*arrays, **arguments)[0]))
        result = aj.coverage_attention(*arrays, coverage_kernel=jnp.zeros(D), **arguments)
        return jnp.sum(jnp.sin(result.output)) + jnp.sum(result.loss)

    gradient = quick_jit(jax.grad(loss, (0, 1, 2)))
    # A gradient is continuous: nothing else is singular.
    got, near = (gradient({"scale": jnp.float32(0.7)}, TOKENS, apart) for apart in (0.0, 1e-4))
    chex.assert_trees_all_close(got, near, rtol=2e-2, atol=2e-3)


@jax.custom_jvp
def size(x):
    """|x|, with a rule whose slope at 0 is 0 / 0."""
    return jnp.abs(x)


@size.defjvp
def _size_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return size(x), t * x / jnp.abs(x)


SMOOTH = (
    *aj.SCORES,
    aj.SoftCap(aj.Additive()),
    lambda q, k: jnp.tanh(jnp.maximum(q @ k.T, 0)) / 3,
    lambda q, k: (q @ k.T) ** 0 + (q @ k.T) ** 3 / jnp.log(2.0),
)
SINGULAR = (
    Euclidean(),
    aj.SoftCap(Euclidean()),
    lambda q, k: jnp.log(jnp.sum(jnp.abs(q[:, None] - k[None]), -1)),
    lambda q, k: -jnp.sum(size(q[:, None] - k[None]), -1),
    lambda q, k: 1 / (q @ k.T),
    lambda q, k: (q @ k.T) / (1 + q @ k.T),
    lambda q, k: (q @ k.T) / jnp.abs(q[:, :1]),
    lambda q, k: jnp.abs(q @ k.T) ** jnp.float32(0.5),
    lambda q, k: jnp.exp(100 * q @ k.T),  # it overflows
    jax.jit(lambda q, k: (q @ k.T) ** 0.5),
    lambda q, k: (q @ k.T) ** -1,
)


def test_which_scores_have_finite_slopes():
    """The others pay for stand-ins."""
    for score in (*SMOOTH, *SINGULAR):
        known = aj.get_score(score)
        params = known.init(jax.random.key(0), D, D)
        assert may_have_infinite_slopes(known, params, D, D) == (score not in SMOOTH), score
