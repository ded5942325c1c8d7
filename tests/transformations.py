"""Transformations of JAX, of a function f(q [*B, T, D], k [*B, S, D], v [*B, S, D]) -> [*B, T, D]

Each takes the function and its arguments. `USES` compute `output_and_gradients` under a setting of
JAX or in another program, and so must give the same numbers.
"""

import contextlib
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import assert_close

from attention_jax import General


def loss_of(f):
    def loss(*tokens):
        output = f(*tokens)
        rows, features = np.indices(output.shape[-2:])
        return jnp.einsum("...td,td->", jnp.sin(output), np.cos(rows + 4 * features))

    return loss


def gradient_of(f):
    return jax.grad(loss_of(f), (0, 1, 2))


def gradient_of_gradient(loss):
    return jax.grad(lambda *x: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(*x)), (0, 1))


def steps(f, q, k, v):
    """Three steps, each of which attends with the output of the previous step."""
    return jax.lax.scan(lambda c, _: (jax.jit(f)(c, k, v) + c, None), q, None, length=3)[0]


def batches_of_tangents(f, q, k, v):
    """`jax.vmap` at the end of a Hessian-vector product, over several axes."""
    product = lambda t, v: jax.jvp(jax.grad(loss_of(f), (0, 2)), (q, k, v), (t, k, v))  # noqa: E731
    return jax.vmap(product, (2, 1))(jnp.stack([q, q + 1], 2), jnp.stack([v, 2 * v], 1))


def while_loop(f, q, k, v):
    def end(k):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c + 1 + f(c, k, v), q)

    return jax.jvp(end, (k,), (k,))


# Name -> (transformation, whether it uses reverse mode).
DERIVATIVES = {
    "jvp": (lambda f, *x: jax.jvp(f, x, tuple(map(jnp.cos, x))), False),
    "vjp": (lambda f, *x: jax.vjp(f, *x)[1](jnp.cos(x[0])), True),
    "linearize": (lambda f, *x: jax.linearize(f, *x)[1](*x), False),
    "jvp of grad": (lambda f, *x: jax.jvp(gradient_of(f), x, tuple(map(jnp.cos, x))), True),
    "grad of grad": (lambda f, *x: gradient_of_gradient(loss_of(f))(*x), True),
    "hessian": (lambda f, *x: jax.hessian(loss_of(f), (0, 1))(*x), True),
    "jacfwd of jacfwd": (
        lambda f, *x: jax.jacfwd(jax.jacfwd(loss_of(f), (0, 1)), (0, 1))(*x), False
    ),
    "third derivative": (lambda f, *x: jax.jacfwd(jax.jacrev(jax.jacfwd(loss_of(f))))(*x), True),
    "linear_transpose": (
        lambda f, q, k, v: jax.linear_transpose(lambda v: f(q, k, v), v)(jnp.cos(q)), False
    ),
    "vmap": (batches_of_tangents, True),
    "checkpoint": (lambda f, *x: gradient_of_gradient(jax.checkpoint(loss_of(f)))(*x), True),
    "scan": (lambda f, *x: jax.hessian(lambda *x: jnp.sum(jnp.sin(steps(f, *x))), (1,))(*x), True),
    "checkpoint of scan": (
        lambda f, *x: gradient_of_gradient(
            jax.checkpoint(lambda *x: jnp.sum(jnp.sin(steps(f, *x))))
        )(*x),
        True,
    ),
    "while_loop": (while_loop, False),
}  # fmt: skip


def output_and_gradients(f, *tokens):
    return f(*tokens), gradient_of(f)(*tokens)


def compiled(f, *tokens):
    return jax.jit(functools.partial(output_and_gradients, f))(*tokens)


def exported(f, *tokens):
    """One program for every batch size, unless tokens are on a mesh; saved and read again."""
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in tokens]
    on_a_mesh = isinstance(tokens[0].sharding, NamedSharding)
    program = jax.export.export(jax.jit(f), platforms=["cpu"])(*(tokens if on_a_mesh else shapes))
    results = compiled(jax.export.deserialize(program.serialize(vjp_order=1)).call, *tokens)
    assert_close("beside jit: ", *jax.device_get((results, compiled(f, *tokens))), 1e-12)
    return results


class Printing(General):
    def pair(self, params, q, k):
        jax.debug.print("a query sees {}", k[0, 0])
        return super().pair(params, q, k)


def printed(f, *tokens):
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        results = compiled(functools.partial(f, score=Printing()), *tokens)
        jax.effects_barrier()
    assert "a query sees" in lines.getvalue()
    return results


def under(setting, run=compiled):
    def use(f, *tokens):
        with setting():
            return run(f, *tokens)

    return use


def sharded(kind, manual=False):
    def use(f, *tokens):
        mesh = mesh_of(kind)
        placed = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        run = functools.partial(output_and_gradients, f)
        with jax.set_mesh(mesh):
            if manual:
                run = jax.shard_map(
                    run, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
                    check_vma=False,
                )  # fmt: skip
            return jax.jit(run)(*placed)

    return use


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "context"), (kind,) * 2, devices=jax.devices()[:4])


USES = {
    "jit": compiled,
    "export": exported,
    "debug.print": printed,
    "checking_leaks": under(jax.checking_leaks),
    "transfer_guard": under(functools.partial(jax.transfer_guard, "disallow")),
    "disable_jit": under(jax.disable_jit, output_and_gradients),
    "Auto mesh": sharded(AxisType.Auto),
    "Explicit mesh": sharded(AxisType.Explicit),
    "shard_map, Auto": sharded(AxisType.Auto, manual=True),
    "shard_map, Explicit": sharded(AxisType.Explicit, manual=True),
}
