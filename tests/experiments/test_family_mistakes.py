"""Mistakes with heads, windows and biases raise one line that says what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nn import FeedForward, LocalPAttention, ModelConfig, MultiHeadAttention

B, T, D, N = 2, 5, 4, 2
X = jnp.ones((B, T, D))


def heads(**settings):
    return MultiHeadAttention("dot", D, num_heads=N, rngs=nnx.Rngs(0), **settings)


def local_p(**settings):
    return LocalPAttention("dot", D, D, rngs=nnx.Rngs(0), **settings)


@aj.bias_dataclass
class Undeclared(aj.Bias):
    rate: jax.Array  # not declared as an array

    def values(self, query_positions, key_positions):
        return self.rate * jnp.ones((query_positions.size, key_positions.size))


class Undecorated(aj.Bias):
    pass


@aj.mask_dataclass
class UndeclaredMask(aj.Mask):
    lengths: jax.Array


@aj.bias_dataclass
class Constant(aj.Bias):
    rate: jax.Array = aj.array_field()

    def values(self, query_positions, key_positions):
        steps = key_positions[None, :] - query_positions[:, None]
        return jnp.asarray(self.rate) * steps.astype(float)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: heads()(X, mask=jnp.ones((3, T, T), bool)),
            r"mask must broadcast to \[2, 2, 5, 5\]",
        ),
        (lambda: heads()(X, jnp.ones((3, T, D))), r"key must have batch axes that broadcast to \["),
        (lambda: heads()(X, X, X[:, :3]), r"value must be \[..., 5, Dv\] to match key"),
        (lambda: heads()(X, heads().remember(X), X), "value must be None where key is a Memory"),
        (lambda: heads(rotary_wavelength=0.0), "rotary_wavelength must be a finite number above 0"),
        (lambda: aj.nn.rotary(X, jnp.arange(T), max_wavelength=jnp.nan), "max_wavelength must be"),
        (lambda: heads().empty_cache(B, 3), "batch_shape must be a tuple"),
        (lambda: heads().extend(X, heads().empty_cache((3,), 8)), "cache must be this module's"),
        (lambda: heads().extend(X, heads().empty_cache((B,), 3)), "x must have at most 3 tokens"),
        (lambda: FeedForward(D, D, activation="geluu", rngs=nnx.Rngs(0)), "activation must be one"),
        (lambda: local_p(radius=-2), "radius must be at least 1; got -2"),
        (lambda: local_p(radius=0), "radius must be at least 1; got 0"),
        (
            lambda: local_p(radius=1)(X, X, lengths=jnp.array([1, 2, 3])),
            r"source_lengths must",
        ),
        (lambda: aj.gaussian_bias(jnp.ones(T), "1"), "sigma must be an array; got str"),
        (lambda: aj.gaussian_bias(jnp.ones(T), True), "sigma must be floating-point; got dtype b"),
        (lambda: aj.gaussian_bias(jnp.ones(T), {}), "sigma must be an array; got dict"),
        (lambda: aj.reversed_centers(3, "4"), "source_lengths must be an array; got str"),
        (lambda: aj.monotonic_weights("p"), "probabilities must be an array; got str"),
        (lambda: aj.monotonic_weights(X, {}), "initial must be an array; got dict"),
        (lambda: aj.hard_monotonic_positions([[1.0], []]), "probabilities must be an array; got"),
        (lambda: aj.hard_monotonic_weights(X, start="0"), "start must be an array; got str"),
        (
            lambda: aj.monotonic_attention(X, X, X, score="dot", offset="1"),
            "offset must be an array; got str",
        ),
        (lambda: aj.predicted_centers(X, None, jnp.array(3)), "params must be {'kernel'"),
        (lambda: aj.reversed_centers(jnp.array([3]), 5), "target_length must be an integer"),
        (lambda: ModelConfig(attention="local-p", radius=0), "radius must be at least 1; got 0"),
        (
            lambda: Undeclared(jnp.ones(())),
            r"Undeclared.rate must be declared `rate: Array =",
        ),
        (lambda: UndeclaredMask(jnp.ones(3)), "UndeclaredMask.lengths must be declared"),
        (
            lambda: aj.attention(X, X, X, bias=Undecorated()),
            "Undecorated must be decorated with @bias_dataclass",
        ),
    ],
)
def test_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(call)  # compiles nothing
    assert "\n" not in str(error.value)


def test_a_sigma_below_zero():
    with pytest.raises(ValueError, match="sigma must be greater") as error:
        aj.gaussian_bias(np.ones(T, np.float32), np.array([1.0, -1.0], np.float32))
    assert "\n" not in str(error.value)


def test_an_undeclared_array_is_refused_under_grad_too():
    # Compared by value in a static option, the tracer would hit the cache of 1.0: gradient 0.
    def loss(rate):
        return jnp.sin(aj.attention(X, X, X, bias=Undeclared(rate))).sum()

    loss(1.0)
    with pytest.raises(ValueError, match="must be declared"):
        jax.grad(loss)(1.0)


def test_a_window_of_radius_zero_is_one_key():
    config = ModelConfig(score="dot", dim=D, attention="local-m", radius=0)

    @jax.jit
    def weights():
        cross = aj.nn.CrossAttention(config, rngs=nnx.Rngs(0))
        return cross(X, X, return_weights=True)[1]

    assert weights()[0].tolist() == np.eye(T)[::-1].tolist()


def test_python_numbers_in_a_bias_of_ones_own():
    number, array = Constant(0.5), Constant(jnp.array(0.5))
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)

    @jax.jit
    def outputs():
        attend = MultiHeadAttention("dot", D, num_heads=N, rngs=nnx.Rngs(0))
        extended, _ = attend.extend(x, attend.empty_cache((B,), 8), bias=number)
        return {
            "attention": [aj.attention(x, x, x, bias=bias) for bias in (number, array)],
            "heads": [attend(x, bias=bias) for bias in (number, array)],
            "extended": (extended, attend(x, bias=number, mask=aj.causal_mask())),
        }

    found = outputs()
    np.testing.assert_array_equal(*found["attention"])
    np.testing.assert_array_equal(*found["heads"])
    np.testing.assert_allclose(*found["extended"], atol=1e-6)


def test_lists_through_a_gaussian_window():
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    lists = (x.tolist(), x.tolist(), x.tolist())
    window = {"centers": np.arange(T), "radius": 1, "sigma": 0.5}

    @jax.jit
    def outputs():
        return [aj.local_attention(*arrays, **window) for arrays in (lists, (x, x, x))]

    np.testing.assert_array_equal(*outputs())
