"""Compositions of derivatives, for any function f(q [5, 3], k [7, 3], v [7, 2]) -> [5, 2]."""

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)
Q, K, V, G = (RNG.normal(size=shape) for shape in ((5, 3), (7, 3), (7, 2), (5, 2)))


def loss(f):
    return lambda q, k, v: jnp.sum(jnp.sin(f(q, k, v)) * G)


def steps(f, q, k, v):
    """Three steps, each of which attends with the output of the previous step."""
    return jax.lax.scan(
        lambda c, _: (jnp.pad(jax.jit(f)(c, k, v), ((0, 0), (0, 1))) + c, None), q, None, length=3
    )[0]


def gradient_of_gradient(loss):
    return jax.grad(lambda *x: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(*x)), (0, 1))


# Name -> (composition, whether it uses reverse mode).
COMPOSITIONS = {
    "jvp": (lambda f: lambda q, k, v: jax.jvp(f, (q, k, v), (jnp.cos(q), jnp.sin(k), v)), False),
    "hessian": (lambda f: jax.hessian(loss(f), (0, 1)), True),
    "grad of grad": (lambda f: gradient_of_gradient(loss(f)), True),
    "jacfwd of jacfwd": (lambda f: jax.jacfwd(jax.jacfwd(loss(f), (0, 1)), (0, 1)), False),
    "third": (lambda f: jax.jacfwd(jax.jacrev(jax.jacfwd(loss(f)))), True),
    "linearize": (lambda f: lambda q, k, v: jax.linearize(f, q, k, v)[1](q, k, v), False),
    "vmap at the end of jvp of grad": (
        lambda f: lambda q, k, v: jax.vmap(
            lambda t, v: jax.jvp(jax.grad(loss(f), (0, 2)), (q, k, v), (t, k, v)), (2, 1)
        )(jnp.stack([q, q + 1], 2), jnp.stack([v, 2 * v], 1)),
        True,
    ),
    "hessian of scan": (
        lambda f: jax.hessian(lambda q, k, v: jnp.sum(jnp.sin(steps(f, q, k, v))), (1,)), True,
    ),
    "grad of grad of checkpoint of scan": (
        lambda f: gradient_of_gradient(
            jax.checkpoint(lambda q, k, v: jnp.sum(jnp.sin(steps(f, q, k, v))))
        ),
        True,
    ),
    "jvp of while_loop": (
        lambda f: lambda q, k, v: jax.jvp(
            lambda k: jax.lax.while_loop(
                lambda c: jnp.sum(c) < 9, lambda c: c + 1 + jnp.pad(f(c, k, v), ((0, 0), (0, 1))), q
            ),
            (k,),
            (k,),
        ),
        False,
    ),
}  # fmt: skip
