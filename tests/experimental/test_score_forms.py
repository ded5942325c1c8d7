"""What kernels compute in place of the `pair` of a score."""

import jax.numpy as jnp
import pytest
from score_cases import numpy_params

import attention_jax as aj
from attention_jax.experimental.mosaic_gpu import sum_of_tanh
from attention_jax.experimental.mosaic_tpu.scores import AdditiveOnTpu, DotOnTpu, on_tpu
from attention_jax.experimental.score_forms import form_of
from attention_jax.parts import known_score
from attention_jax.scores import Concat


class Squared(aj.Additive):
    tile_params = aj.Additive.tile_params
    finite_slopes = aj.Additive.finite_slopes

    def pair(self, params, q_features, k_features):
        return super().pair(params, q_features, k_features) ** 2


class Renamed(aj.Additive):
    """Its pair is that of `Additive`."""


@pytest.mark.parametrize("score", [aj.Additive(), Concat(), Renamed()])
def test_the_pair_of_additive_has_a_form_of_its_own(score):
    params = {"v": jnp.ones(3)}
    assert form_of(sum_of_tanh, score, params) is params["v"]
    assert form_of(on_tpu, score) == AdditiveOnTpu()


def test_a_user_s_pair_keeps_to_itself():
    for score in (Squared(), aj.Score()):
        assert form_of(sum_of_tanh, score, {"v": jnp.ones(3)}) is None
        assert form_of(on_tpu, score) is score
    params = numpy_params(Squared(3), 2, 2)
    known = known_score(Squared(3), params, 2, 2)
    assert form_of(on_tpu, known) == Squared(3)


def test_products_and_wrapped_scores():
    for score in (aj.Dot(), aj.ScaledDot(), aj.General(), aj.Cosine()):
        assert form_of(on_tpu, score) == DotOnTpu(score)
    assert form_of(on_tpu, aj.SoftCap(aj.Additive(), 3.0)) == aj.SoftCap(AdditiveOnTpu(), 3.0)
    assert form_of(on_tpu, aj.SoftCap(Squared())) == aj.SoftCap(Squared())
