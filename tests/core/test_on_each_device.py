"""`on_each_device`: values under nested `vmap`, and how often a function is traced."""

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.on_each_device import on_each_device

X = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
Y = np.arange(3 * 5, dtype=np.float32).reshape(3, 5) - 4


def counted():
    """Returns a function of one example, and the list of its calls."""
    calls = []

    def scaled_sum(x, y):
        calls.append(x.shape)
        return jnp.cumsum(x) * 2, jnp.max(x) + y

    return on_each_device(scaled_sum), calls


def test_nested_vmap_gives_the_values_of_every_example():
    function, _ = counted()
    nested = jax.vmap(jax.vmap(function), (0, None))
    for mapped, x in ((jax.jit(nested), X), (nested, X), (nested, X[:1, :1])):
        doubled, shifted = mapped(x, Y[: x.shape[1]])
        np.testing.assert_array_equal(doubled, 2 * np.cumsum(x, axis=-1))
        np.testing.assert_array_equal(shifted, x.max(-1, keepdims=True) + Y[: x.shape[1]])


def test_batched_loops_trace_it_at_most_twice():
    function, calls = counted()

    def loops(x):  # JAX traces the body of a loop again for each batch axis, and in each loop
        def add_results(_, x):
            doubled, shifted = function(x, x[0])
            return doubled + shifted

        def repeat(_, x):
            return jax.lax.fori_loop(0, x[0].astype(int), add_results, x)

        return jax.lax.fori_loop(0, 2, repeat, x)

    jax.jit(jax.vmap(jax.vmap(loops))).lower(X)
    assert len(calls) <= 2  # of 9 times that JAX evaluates it
