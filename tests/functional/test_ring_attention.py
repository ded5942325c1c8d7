"""Ring attention: the result of `attention`, with equal work and memory on each device."""

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_checks
from conformance import quick_jit
from derivative_cases import normal

import attention_jax as aj
from attention_jax import ring_attention

# --- on eight devices ---


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(ring_checks, request)


@pytest.mark.parametrize(
    "name",
    [
        *ring_checks.CHECKS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ring_checks.SLOW),
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]


# --- on one ---


def mesh():
    return jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])


def test_mistakes_fail_before_anything_compiles():
    query, key = jnp.ones((2, 6, 3)), jnp.ones((2, 8, 3))

    def run(query=query, key=key, **options):
        return ring_attention(query, key, key, **{"mesh": mesh(), **options})

    for options, message in (
        ({"key": key[:, :0]}, r"key must .* multiple of 1, .*'context'; got \[2, 0, 3\]: pad"),
        ({"axis_name": "data"}, "axis_name must be .*, one of context; got 'data'"),
        ({"mesh": jax.devices()}, "mesh must be a jax.sharding.Mesh; got"),
        ({"key": key[..., :2]}, r"key must be \[..., S, 3\] to match score"),
        ({"block_sizes": 4}, "block_sizes must be a BlockSizes or None; got 4"),
        ({"dropout_rate": 0.5}, "dropout_rng must be a PRNG key when dropout_rate is 0.5"),
        ({"dropout_rate": 1.5}, r"dropout_rate must be .*\[0, 1\)"),
        ({"mask": jnp.ones((3, 8), bool)}, "mask must broadcast"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**options)


def test_integer_features_have_no_gradient():
    class Rounded(aj.Dot):
        pair_vjp = aj.Score.pair_vjp
        round = aj.Score.round
        finite_slopes = aj.Score.finite_slopes

        def project_query(self, params, query):
            return jnp.round(query).astype(jnp.int32)

        project_key = project_query

        def pair(self, params, q_features, k_features):
            return super().pair(params, *(x.astype(float) for x in (q_features, k_features)))

    tokens = np.float32(normal(4, 3))

    def run(tokens):
        return ring_attention(tokens, tokens, tokens, score=Rounded(), mesh=mesh())

    def whole(tokens):
        return aj.attention(tokens, tokens, tokens, score=Rounded(), implementation="reference")

    def result_and_gradient(attend):
        def loss(tokens):
            output = attend(tokens)
            return jnp.sum(output**2), output

        return jax.grad(loss, has_aux=True)

    (got_gradient, got), (gradient, expected) = quick_jit(
        lambda tokens: [result_and_gradient(attend)(tokens) for attend in (run, whole)]
    )(tokens)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5)
