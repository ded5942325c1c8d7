"""`custom_vjp` with forward mode, by itself: against plain JAX of the same function.

The function is a softmax of products, times values. Its hand-written backward pass counts how often
it is traced.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from jax.experimental.jet import jet
from oracles import normal
from transformations import DERIVATIVES, loss_of

from attention_jax import attention, custom_vjp

Q, K, V = (normal(n, 3, seed=i, dtype=float) for i, n in enumerate((5, 7, 7)))


def plain(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


class Counted:
    """`plain` with a backward pass by hand, and how often each of its functions was traced."""

    def __init__(self):
        self.calls = dict.fromkeys(("fun", "fwd", "bwd", "twin"), 0)

        def counted(name, function):
            @functools.wraps(function)
            def call(*args):
                self.calls[name] += 1
                return function(*args)

            return call

        def fwd(q, k, v):
            weights = jax.nn.softmax(q @ k.T, axis=-1)
            return weights @ v, (q, k, v, weights)

        def bwd(residuals, ct):
            q, k, v, weights = residuals
            dweights = ct @ v.T
            dlogits = weights * (dweights - jnp.sum(weights * dweights, axis=-1, keepdims=True))
            return dlogits @ k, dlogits.T @ q, weights.T @ ct

        self.function = custom_vjp(counted("fun", plain), twin=counted("twin", plain))
        self.function.defvjp(counted("fwd", fwd), counted("bwd", bwd))


def test_compositions_are_those_of_plain_jax():
    """All in one program, without those that others contain."""
    contained = {"vjp", "linearize", "jvp of grad", "hessian", "third derivative", "scan"}
    counted = {name: Counted() for name in DERIVATIVES.keys() - contained - {"linear_transpose"}}

    @quick_jit
    def all_of_them(*arrays):
        functions = {name: each.function for name, each in counted.items()}
        return [
            {name: DERIVATIVES[name][0](function, *arrays) for name, function in each.items()}
            for each in (functions, dict.fromkeys(functions, plain))
        ]

    with jax.enable_x64(True):
        chex.assert_trees_all_close(*all_of_them(Q, K, V), rtol=0, atol=1e-11)
    for name, each in counted.items():
        assert (each.calls["bwd"] > 0) == DERIVATIVES[name][1], (name, each.calls)


# --- arguments and results of every kind ---


def mixed(scale, tree, ids, rng, flag, none=None):
    """Arrays of every kind in; floats, integers and nothing out."""
    assert none is None
    noise = jax.random.normal(rng, tree["x"].shape, tree["x"].dtype)
    picked = tree["x"][ids] * tree["y"][0]
    value = jnp.where(flag, picked.sum() * scale, jnp.vdot(noise, tree["x"]))
    return {"value": value, "ids": ids + 1, "wide": (tree["x"] ** 2, None)}


def mixed_fwd(*args):
    return mixed(*args), args


def mixed_bwd(residuals, cotangents):
    pull_back = jax.vjp(
        lambda scale, tree: mixed(scale, tree, *residuals[2:])["value"], *residuals[:2]
    )
    dscale, dtree = pull_back[1](cotangents["value"])
    assert cotangents["ids"].dtype == jax.dtypes.float0
    dx = dtree["x"] + 2 * residuals[1]["x"] * cotangents["wide"][0]
    return dscale, {"x": dx, "y": dtree["y"]}, None, None, None


def test_pytrees_integers_keys_and_nothing():
    f = custom_vjp(mixed, twin=mixed)
    f.defvjp(mixed_fwd, mixed_bwd)
    arguments = (
        np.float32(2),
        {"x": np.arange(4, dtype=np.float32), "y": (np.float32(3),)},
        np.array([0, 2, 2], np.int32),
        jax.random.key(1),
    )

    def gradients(f):
        def of(scale, tree, flag):
            out = f(scale, tree, *arguments[2:], flag)
            return out["value"] + jnp.sum(jnp.sin(out["wide"][0])), out["ids"]

        def everything(flag):
            hessian = jax.jacfwd(jax.grad(of, 1, has_aux=True), 1, has_aux=True)
            pushed = jax.jvp(lambda s, t: of(s, t, flag)[0], arguments[:2], arguments[:2])
            return (
                jax.grad(of, (0, 1), has_aux=True)(*arguments[:2], flag),
                pushed,
                hessian(*arguments[:2], flag),
            )

        return jax.vmap(everything)

    @quick_jit
    def both(flags):
        return gradients(f)(flags), gradients(mixed)(flags)

    results = both(np.array([True, False]))
    chex.assert_trees_all_close(*results, rtol=1e-5, strict=True)


def test_dtypes_and_weak_types():
    def f(x, y):
        return x * y, x + 1

    g = custom_vjp(f, twin=f)
    g.defvjp(lambda x, y: (f(x, y), (x, y)), lambda r, ct: (ct[0] * r[1] + ct[1], ct[0] * r[0]))

    @quick_jit
    def derivatives(x):
        return *jax.jvp(lambda x: g(x, 3.0), (x,), (x,)), jax.grad(lambda x: g(x, x)[0])(x)

    for dtype in (jnp.bfloat16, jnp.float32):
        (out, other), (dout, dother), gradient = derivatives(jnp.asarray(2.0, dtype))
        assert {a.dtype for a in (out, other, dout, dother, gradient)} == {jnp.dtype(dtype)}
        assert (out, dout, gradient) == (6, 6, 4)
    # A Python number is as weak as it is in the function itself.
    for h in (f, g):
        assert jax.jit(h)(2.0, 3.0)[0].weak_type
        assert jax.grad(lambda x, h=h: h(x, 3.0)[0])(2.0) == 3


def test_static_arguments():
    @functools.partial(custom_vjp, nondiff_argnums=(1,), twin=lambda x, n, y: x**n * y)
    def f(x, n, y):
        return x**n * y

    f.defvjp(
        lambda x, n, y: (x**n * y, (x, y)),
        lambda n, r, ct: (ct * n * r[0] ** (n - 1) * r[1], ct * r[0] ** n),
    )
    x = jnp.float32(3.0)
    assert jax.grad(f)(x, 2, 5.0) == 30
    assert jax.grad(f, 2)(x, 2, 5.0) == 9
    assert jax.jvp(lambda x: f(x, 3, 2.0), (x,), (x,))[1] == 162
    assert jax.grad(jax.grad(f))(x, 3, 1.0) == 18


# --- what costs time ---


def test_nothing_is_traced_again():
    counted = Counted()
    gradient = quick_jit(jax.grad(loss_of(counted.function), (0, 1, 2)))
    pushed = quick_jit(lambda *x: jax.jvp(counted.function, x, x))
    arrays = [jnp.asarray(x, jnp.float32) for x in (Q, K, V)]
    for function in (gradient, pushed):
        function(*arrays)
        calls = dict(counted.calls)
        function(*(x + 1 for x in arrays))
        assert counted.calls == calls
    # One of each: reverse mode never traces the twin, forward mode never the backward pass.
    assert counted.calls["twin"] == counted.calls["bwd"] == 1
    assert counted.calls["fwd"] == 2


# --- mistakes ---


def test_nothing_leaks():
    """The rules close over no traced value, also under `jit` and `vmap`."""
    f = Counted().function
    with jax.checking_leaks():
        for function in (f, jax.grad(loss_of(f)), jax.hessian(loss_of(f))):
            jax.eval_shape(jax.jit(jax.vmap(function)), *(x[None] for x in (Q, K, V)))


def test_taylor_mode_is_refused():
    f = Counted().function
    for function in (f, jax.jit(f), lambda q, k, v: attention(q, k, v, implementation="reference")):
        with pytest.raises(NotImplementedError, match="jet cannot differentiate attention"):
            jet(function, (Q, K, V), tuple((x, x) for x in (Q, K, V)))


def test_a_backward_pass_over_a_traced_value_is_refused():
    def gradient(scale, x):
        f = custom_vjp(jnp.sin, twin=jnp.sin)
        f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (scale * ct * jnp.cos(x),))
        return jax.grad(f)(x)

    for transform in (jax.jit, lambda f: jax.vmap(f, in_axes=(0, None))):
        scale = jnp.ones(3)[0] if transform is jax.jit else jnp.ones(3)
        with pytest.raises(ValueError, match="bwd must not close over a traced value"):
            transform(gradient)(scale, jnp.ones(()))


def test_mistakes_are_named():
    def f(x, tree):
        return x * tree["y"]

    g = custom_vjp(f, twin=f)
    x, tree = jnp.ones(3), {"y": jnp.ones(3), "z": jnp.ones(2)}
    with pytest.raises(AttributeError):
        g(x, tree)

    def fwd(x, tree):
        return f(x, tree), ()

    narrow = {"y": x.astype(jnp.bfloat16), "z": None}
    for cotangents, message in (
        ((x,), "bwd of f must return a tuple"),
        ((x, x), "bwd of f must return a tuple"),
        ((x[:2], None), r"cotangents of bwd of f must be .*; got \['float32\[2\]'"),
        ((None, narrow), r"cotangents of bwd of f must be .*; got .*'bfloat16\[3\]'"),
    ):
        g.defvjp(fwd, lambda r, ct, cotangents=cotangents: cotangents)
        with pytest.raises(TypeError, match=message):
            jax.grad(lambda x, tree: jnp.sum(g(x, tree)), (0, 1))(x, tree)
    h = custom_vjp(f, twin=lambda x, tree: (x, x))
    h.defvjp(fwd, lambda r, ct: (None, None))
    with pytest.raises(TypeError, match="the tangent of the twin of f must be"):
        jax.jvp(h, (x, tree), (x, tree))

    def around(x):
        inner = custom_vjp(lambda y: x * y, twin=lambda y: x * y)
        inner.defvjp(lambda y: (x * y, ()), lambda r, ct: (x * ct,))
        return inner(x)

    with pytest.raises(ValueError, match="must not close over a traced value"):
        jax.jit(around)(x)
