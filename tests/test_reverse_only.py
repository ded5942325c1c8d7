"""Forward mode through a hand-written gradient: refused in words, and reverse mode untouched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.implementations.reverse_only import (
    NO_FORWARD_MODE,
    ForwardModeError,
    forward_mode_explained,
    reverse_only,
)

X, Y = jnp.array([0.3, 0.7, 1.1]), jnp.array([2.0, 3.0, 5.0])


def product(x, y):
    x, pair = reverse_only((x, {"y": y}), "no way")
    return (jnp.sin(x) * pair["y"]).sum()


def refused(function, *args, message="no way"):
    with pytest.raises(NotImplementedError, match=message) as caught:
        jax.block_until_ready(function(*args))
    assert isinstance(caught.value, TypeError)  # what JAX raises, for those who catch that


# --- the identity ---


def test_it_is_the_identity_forward_and_backward():
    np.testing.assert_allclose(product(X, Y), (np.sin(X) * np.float64(Y)).sum(), rtol=1e-6)
    for gradient in (jax.grad(product, (0, 1)), jax.jit(jax.grad(product, (0, 1)))):
        dx, dy = gradient(X, Y)
        np.testing.assert_allclose(dx, np.cos(X) * Y, rtol=1e-6)
        np.testing.assert_allclose(dy, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(product, 1)(X, Y), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jacrev(product)(X, Y), np.cos(X) * Y, rtol=1e-6)


def test_forward_mode_over_reverse_mode_is_allowed():
    gradient = jax.grad(product)
    np.testing.assert_allclose(
        jax.jacfwd(gradient)(X, Y), np.diag(-np.sin(X) * Y), rtol=1e-6, atol=1e-7
    )
    # ... also in the other argument, of which the gradient is not taken.
    _, cross = jax.jit(lambda y: jax.jvp(lambda y: gradient(X, y), (y,), (jnp.ones(3),)))(Y)
    np.testing.assert_allclose(cross, np.cos(X), rtol=1e-6)


def test_forward_mode_is_refused():
    def pushed(x):
        return jax.jvp(product, (x, Y), (X, Y))[1]

    refused(pushed, X)
    refused(jax.jit(pushed), X)
    refused(jax.jacfwd(product), X, Y)
    refused(jax.jit(jax.jacfwd(product)), X, Y)
    refused(jax.jacfwd(jax.jit(product)), X, Y)
    refused(jax.linearize(product, X, Y)[1], X, Y)
    refused(jax.jacrev(jax.jacfwd(product)), X, Y)
    refused(lambda y: jax.jvp(lambda y: jax.jit(product)(X, y), (y,), (y,)), Y)


def test_reverse_mode_in_scan_cond_while_and_checkpoint():
    def scanned(x):
        def step(carry, y):
            return carry + product(x, y * carry), carry * 2

        return jax.lax.scan(step, 1.0, jnp.stack([Y, 2 * Y]))[0]

    # carry c1 = 1 + s, c2 = c1 + 2 s c1 with s = sum sin(x) y: (1 + s) (1 + 2 s)
    s, ds = (np.sin(np.float64(X)) * Y).sum(), np.cos(np.float64(X)) * Y
    np.testing.assert_allclose(scanned(X), (1 + s) * (1 + 2 * s), rtol=1e-6)
    for function in (scanned, jax.jit(scanned), jax.checkpoint(scanned)):
        np.testing.assert_allclose(jax.grad(function)(X), (3 + 4 * s) * ds, rtol=1e-6)
    refused(lambda: jax.jvp(scanned, (X,), (X,)))

    def branched(x, flag):
        return jax.lax.cond(flag, lambda x: product(x, Y), lambda x: x.sum(), x)

    for flag, expected in ((True, ds), (False, np.ones(3))):
        np.testing.assert_allclose(jax.grad(branched)(X, flag), expected, rtol=1e-6)

    def looped(x):
        return jax.lax.fori_loop(0, 2, lambda _, total: total + product(x, Y), 0.0)

    np.testing.assert_allclose(jax.grad(looped)(X), 2 * ds, rtol=1e-6)


def test_vmap_of_grad_and_grad_of_vmap():
    several = jnp.stack([X, 2 * X])
    expected = np.cos(several) * np.asarray(Y)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(product), (0, None))(several, Y), expected, rtol=1e-6
    )

    def total(several, y):
        return jax.vmap(jax.jit(product), (0, None))(several, y).sum()

    for gradient in (jax.grad(total), jax.jit(jax.grad(total))):
        np.testing.assert_allclose(gradient(several, Y), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total, 1)(several, Y), np.sin(several).sum(0), rtol=1e-6)
    refused(lambda: jax.jvp(total, (several, Y), (several, Y)))


@jax.custom_jvp
def sine_of_each(x, y):
    return jnp.sin(x), jnp.sin(y)


@sine_of_each.defjvp
def _sine_of_each_jvp(primals, tangents):
    return sine_of_each(*primals), tuple(
        jnp.cos(x) * dx for x, dx in zip(primals, tangents, strict=True)
    )


def test_a_tangent_known_to_be_zero_is_no_forward_mode():
    # Of `x`, it comes as an array of zeros and not as a symbol.
    def both(y):
        x, y = sine_of_each(X, y)
        return product(x, y)

    expected = np.sin(np.sin(X)) * np.cos(Y)
    for gradient in (jax.grad(both), jax.jit(jax.grad(both)), jax.grad(jax.checkpoint(both))):
        np.testing.assert_allclose(gradient(Y), expected, rtol=1e-5)
    # And an integer's is neither.
    _, pull_back = jax.vjp(lambda x, n: product(x, reverse_only(n) * Y), X, jnp.arange(3.0))
    np.testing.assert_allclose(pull_back(1.0)[1], np.sin(X) * Y, rtol=1e-6)


def test_the_context_replaces_only_what_it_is_for():
    @jax.custom_vjp
    def by_hand(x):
        return x

    by_hand.defvjp(lambda x: (x, None), lambda _, dx: (dx,))

    def explained(x):
        with forward_mode_explained():
            return by_hand(x)

    np.testing.assert_array_equal(explained(X), X)
    with pytest.raises(TypeError, match="something else"), forward_mode_explained():
        raise TypeError("something else")
    with pytest.raises(ForwardModeError, match=r"^mine$"), forward_mode_explained():
        raise ForwardModeError("mine")
    with pytest.raises(ForwardModeError, match="checkpointed") as caught, forward_mode_explained():
        raise TypeError("can't apply forward-mode differentiation (jvp) to a custom_vjp function")
    assert isinstance(caught.value.__cause__, TypeError)


# --- in attention ---


def attend(query):
    key = jnp.array([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
    return aj.attention(
        query, key, key, implementation="tiled", mask=aj.causal_mask(), return_statistics=True,
        block_sizes=aj.BlockSizes(1, 2),
    )[0].sum()  # fmt: skip


def test_attention_says_what_to_use_instead():
    query = jnp.array([[0.1, 0.2], [0.3, 0.5]])
    message = "implementation 'tiled' has no forward mode .*: use implementation='checkpointed'"
    assert NO_FORWARD_MODE.startswith("implementation 'tiled' has no forward mode")

    def pushed(query):
        return jax.jvp(attend, (query,), (query,))[1]

    def scanned(query):
        return jax.lax.scan(lambda c, _: (c + attend(query), None), 0.0, None, length=2)[0]

    refused(pushed, query, message=message)
    refused(jax.jit(pushed), query, message=message)
    refused(jax.linearize(attend, query)[1], query, message=message)
    refused(jax.jacfwd(attend), query, message=message)
    refused(jax.jit(jax.jacfwd(attend)), query, message=message)
    refused(lambda q: jax.jvp(jax.jit(scanned), (q,), (q,)), query, message=message)
    refused(lambda q: jax.vmap(lambda dq: jax.jvp(attend, (query,), (dq,)))(q[None]), query,
            message=message)  # fmt: skip
    # The limit: under a `jax.jit` of the caller's own, a batched tangent meets JAX's error first.
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(jax.jit(attend))(query)
