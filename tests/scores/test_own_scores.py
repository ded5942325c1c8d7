"""Classes of one's own: what a subclass says of its logits, and what it inherits."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import normal, softmax
from score_cases import DK, A, numpy_params

from attention_jax import attention, attention_weights
from attention_jax.scores import Additive, Dot, Score, SoftCap, WrappedScore
from attention_jax.scores.literature import L2

T, S = 5, 7


class Tripled(Score):
    def pair(self, params, q_features, k_features):
        return 3 * super().pair(params, q_features, k_features)


class TripledAdditive(Tripled, Additive):
    """Its `pair` is that of a mixin: the gradient of `Additive` is not its own."""


class RootOfTripled(TripledAdditive):
    finite_slopes, tile_params = False, Additive.tile_params

    def pair(self, params, q_features, k_features):
        return jnp.sqrt(jnp.abs(super().pair(params, q_features, k_features)))


class RootOf(WrappedScore):
    """Its slopes are infinite where those of the inner score are finite."""

    def pair(self, params, q_features, k_features):
        return -jnp.sqrt(jnp.abs(self.score.pair(params, q_features, k_features)))


@pytest.mark.parametrize("score", [TripledAdditive(A), RootOfTripled(A), RootOf(L2())])
def test_a_new_pair_starts_anew_with_what_describes_it(score):
    """Inherited, `pair_vjp` would be the gradient of another function."""
    params = jax.tree.map(np.float64, numpy_params(score, DK, DK))
    tokens = np.round(4 * normal(S, DK, dtype=float)) / 4  # so that distances to itself are 0

    def loss(implementation, params, tokens):
        options = {"score": score, "params": params, "implementation": implementation}
        output = attention(*[tokens] * 3, mask=np.tri(S, k=-1, dtype=bool), **options)
        return jnp.sum(jnp.sin(output))

    with jax.enable_x64(True):
        by_tiles, by_jax = (
            quick_jit(jax.grad(functools.partial(loss, name), (0, 1)))(params, tokens)
            for name in ("tiled", "reference")
        )
    chex.assert_tree_all_finite(by_jax)
    chex.assert_trees_all_close(by_tiles, by_jax, rtol=1e-10, atol=1e-12)


def test_what_describes_a_pair_is_inherited_with_it():
    describe = ("pair_vjp", "round", "tile_params", "finite_slopes", "translation_invariant")

    def described(cls):
        return [getattr(cls, name) for name in describe]

    assert described(TripledAdditive) == described(RootOf) == described(Score)
    assert described(RootOfTripled) == [*described(Score)[:2], Additive.tile_params, False, False]
    assert described(type("Plain", (Additive,), {})) == described(Additive)
    assert described(type("Plain", (L2,), {})) == described(L2)
    assert described(SoftCap)[1:] == described(WrappedScore)[1:]


@dataclasses.dataclass(frozen=True)
class SharedProjection(L2):
    """|W q - W k|^2, which is translation invariant as |q - k|^2 is."""

    translation_invariant = True

    def init(self, rng, query_dim, key_dim):
        return {"kernel": jnp.eye(query_dim)}

    def project_query(self, params, query):
        return super().project_query(params, query @ params["kernel"])

    def project_key(self, params, key):
        return super().project_key(params, key @ params["kernel"])


def test_translation_invariance_is_said_of_a_projection_and_a_pair():
    query, key = (100 + normal(length, DK) for length in (T, S))
    params = numpy_params(SharedProjection(), DK, DK)
    weights = attention_weights(query, key, score=SharedProjection(), params=params)
    projected = [np.float64(x) @ np.float64(params["kernel"]) for x in (query, key)]
    logits = -((projected[0][:, None] - projected[1]) ** 2).sum(-1) / DK**0.5
    np.testing.assert_allclose(weights, softmax(logits), atol=3e-6)

    mixin = type("Mixin", (), {"project_query": lambda self, params, query: query})
    assert not type("Mixed", (mixin, L2), {}).translation_invariant
    assert [SoftCap(score).translation_invariant for score in (L2(), Dot())] == [True, False]


def test_a_subclass_with_features_of_its_own_cannot_subtract_the_key_part():
    """The key's part is a feature that `Additive.project_key` adds and its `pair` reads."""

    @dataclasses.dataclass(frozen=True)
    class Doubled(Additive):
        temperature: float = 1.0

        def project_key(self, params, key):
            return 2 * super().project_key(params, key)

    assert Doubled(8, 2.0).temperature == 2  # key_part takes no place among the arguments
    with pytest.raises(ValueError, match=r"^key_part=False needs .* got those of Doubled$"):
        Doubled(8, key_part=False)
