"""Scores with an infinite slope: a pair that a mask hides sends no NaN.

The expected values come from a plain softmax whose distances are safe where the mask hides a pair.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit

import attention_jax as aj
from attention_jax.scores import needs_stand_ins

T, D = 7, 3
RNG = np.random.default_rng(8)
TILE = aj.BlockSizes(2, 3)


@dataclasses.dataclass(frozen=True)
class Euclidean(aj.Score):
    """-scale |q - k|, whose slope is infinite where q = k"""

    def init(self, rng, query_dim, key_dim):
        return {"scale": jnp.ones(())}

    def pair(self, params, q_features, k_features):
        difference = q_features[:, None, :] - k_features[None, :, :]
        return -params["scale"] * jnp.sqrt(jnp.sum(difference**2, axis=-1))


class Angle(Euclidean):
    """-scale arccos of the cosine, whose slope is infinite where q and k are parallel"""

    def pair(self, params, q_features, k_features):
        sizes = [jnp.linalg.norm(x, axis=-1) for x in (q_features, k_features)]
        cosine = q_features @ k_features.T / (sizes[0][:, None] * sizes[1][None, :])
        return -params["scale"] * jnp.arccos(jnp.clip(cosine, -1, 1))


OTHER_SCORES = (Angle(), aj.SoftCap(Euclidean()))


def safe_attention(score, params, tokens, allowed):
    """Self-attention that computes hidden pairs from other tokens from the start."""
    far = jnp.broadcast_to(jnp.array([1.0, 0.0, 0.0]), (T, T, D))
    query = jnp.where(allowed[..., None], tokens[:, None, :], far)
    key = jnp.where(allowed[..., None], tokens[None, :, :], jnp.roll(far, 1, axis=-1))
    if isinstance(score, Angle):
        sizes = jnp.linalg.norm(query, axis=-1) * jnp.linalg.norm(key, axis=-1)
        logits = -params["scale"] * jnp.arccos(jnp.sum(query * key, axis=-1) / sizes)
    else:
        logits = -params["scale"] * jnp.linalg.norm(query - key, axis=-1)
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
    return attend(tokens, tokens, tokens, score=score, params=params, mask=mask, block_sizes=TILE)[
        :T
    ]


MASKS = {
    "causal": np.tril(np.ones((T, T), bool), -1),
    "others": ~np.eye(T, dtype=bool) & (np.arange(T) < 5),
}


@pytest.mark.parametrize(
    ("score", "implementation", "order"),
    [
        *((Euclidean(), *case) for case in (("reference", 2), ("tiled", 2), ("ring", 1))),
        *((score, "reference", 2) for score in OTHER_SCORES),
        pytest.param(Euclidean(), "ring", 2, marks=pytest.mark.slow),
        *(
            pytest.param(score, implementation, 2, marks=pytest.mark.slow)
            for score in OTHER_SCORES
            for implementation in ("tiled", "ring")
        ),
    ],
)
def test_hidden_pairs_send_no_nan(score, implementation, order):
    tokens, direction = (RNG.normal(size=(T, D)) for _ in range(2))
    masks = np.stack([*MASKS.values()])
    plain = score.score if isinstance(score, aj.SoftCap) else score

    def derivatives(attend):
        def loss(params, tokens, mask):
            return jnp.sum(jnp.sin(attend(params, tokens, mask)))

        def of_mask(mask):
            params = {"scale": jnp.asarray(0.7)}

            def gradient(tokens):
                return jax.grad(loss, (0, 1))(params, tokens, mask)

            if order == 1:
                return gradient(tokens)
            return jax.jvp(gradient, (tokens,), (direction,))

        return quick_jit(jax.vmap(of_mask))(masks)

    with jax.enable_x64(True):
        got = derivatives(functools.partial(of_attention, implementation, score))
        if plain is not score:
            assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))
            return
        expected = derivatives(functools.partial(safe_attention, score))
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attend", ["coverage", "monotonic"])
def test_hidden_pairs_of_other_forms_of_attention(attend):
    tokens = jnp.asarray(RNG.normal(size=(T, D)), jnp.float32)
    mask = jnp.asarray(MASKS["others"])
    hidden = jnp.where(mask, 0.0, 1.0)

    def loss(params, tokens, apart):
        """With `apart` > 0 the keys differ from the queries, so that no pair is singular."""
        arguments = {"score": Euclidean(), "params": params, "mask": mask}
        keys = tokens + apart
        if attend == "coverage":
            kernel = jnp.zeros(D)
            result = aj.coverage_attention(
                tokens, keys, tokens, coverage_kernel=kernel, **arguments
            )
            return jnp.sum(jnp.sin(result.output)) + jnp.sum(result.loss)
        return jnp.sum(jnp.sin(aj.monotonic_attention(tokens, keys, tokens, **arguments)[0]))

    gradient = quick_jit(jax.grad(loss, (0, 1, 2)))
    params = {"scale": jnp.float32(0.7)}
    got = gradient(params, tokens, 0.0)
    near = gradient(params, tokens, 1e-4)  # a gradient is continuous: nothing else is singular
    assert hidden.sum() > 0
    for one, other in zip(*map(jax.tree.leaves, (got, near)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


def test_which_scores_have_finite_slopes():
    def finite(score):
        score = aj.get_score(score)
        return not needs_stand_ins(score, score.init(jax.random.key(0), D, D), D, D)

    assert all(map(finite, aj.SCORES))
    for smooth in (
        lambda q, k: q @ k.T / 8,
        lambda q, k: q @ k.T / jnp.sqrt(q.shape[-1]),
        lambda q, k: -jnp.sum((q[:, None] - k[None]) ** 2, -1),
        lambda q, k: jnp.tanh(jnp.maximum(q @ k.T, 0)) * jnp.abs(q[:, :1]),
        jax.jit(lambda q, k: jnp.einsum("td,sd->ts", q, jnp.sin(k))),
        aj.SoftCap(aj.Additive()),
    ):
        assert finite(smooth)
    for singular in (
        Euclidean(),
        Angle(),
        aj.SoftCap(Euclidean()),
        lambda q, k: jnp.log(jnp.sum(jnp.abs(q[:, None] - k[None]), -1)),
        lambda q, k: 1 / (q @ k.T),
        lambda q, k: jnp.exp(100 * q @ k.T),  # it overflows
        jax.jit(lambda q, k: (q @ k.T) ** 0.5),
        lambda q, k: (q @ k.T) ** -1,
    ):
        assert not finite(singular)


@jax.custom_jvp
def size(x):
    """|x|, with a rule whose slope at 0 is 0 / 0."""
    return jnp.abs(x)


@size.defjvp
def _size_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return size(x), t * x / jnp.abs(x)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_hidden_pairs_of_a_rule_of_ones_own(implementation):
    tokens = jnp.asarray(RNG.normal(size=(T, D)), jnp.float32)

    def gradient(size):
        def loss(tokens):
            output = of_attention(
                implementation,
                lambda q, k: -jnp.sum(size(q[:, None] - k[None]), -1),
                None,
                tokens,
                jnp.asarray(MASKS["others"]),
            )
            return jnp.sum(jnp.sin(output))

        return quick_jit(jax.grad(loss))(tokens)

    np.testing.assert_allclose(gradient(size), gradient(jnp.abs), rtol=1e-5, atol=1e-6)


def test_a_score_may_declare_its_slopes_finite():
    class DeclaredFinite(Euclidean):
        finite_slopes = True

    params = {"scale": jnp.ones(())}
    assert not needs_stand_ins(DeclaredFinite(), params, D, D)
    assert needs_stand_ins(Euclidean(), params, D, D)
