"""Second derivatives of ring attention, compared with those of the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from conformance import quick_jit
from derivative_cases import agree
from ring_cases import lengths_of, mesh_of, point_of, reference
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax import BlockSizes, ring_attention


def forward_over_reverse(gradient, direction):
    def pushed(point, mask):
        return jax.jvp(lambda point: gradient(point, mask), (point,), (direction,))[1]

    return pushed


def reverse_over_reverse(gradient, direction):
    def along(point, mask):
        pairs = zip(*map(jax.tree.leaves, (gradient(point, mask), direction)), strict=True)
        return sum(jnp.vdot(a, b) for a, b in pairs)

    return jax.grad(along)


def output_loss_of(attend, score_name):
    """A loss of the output alone, without biases and dropout."""

    def loss(point, mask):
        output = attend(**point, score=SCORE_CASES[score_name].score, mask=mask)
        return jnp.sum(jnp.sin(output) * np.cos(np.arange(output.size)).reshape(output.shape))

    return loss


def second_derivatives(score_name, product, devices=2, make_loss=output_loss_of):
    """Compares the Hessian times one direction."""
    target, source = lengths_of(devices)
    point = point_of(score_name, target, source)
    if make_loss is output_loss_of:
        del point["slopes"], point["distances"]
    ring = functools.partial(ring_attention, mesh=mesh_of(devices), block_sizes=BlockSizes(4, 8))
    with jax.enable_x64(True):
        direction = jax.tree.map(np.cos, point)
        got, expected = (
            quick_jit(product(jax.grad(make_loss(attend, score_name)), direction))(
                point, aj.causal_mask(-1)
            )
            for attend in (ring, reference)
        )
    agree(jax.device_get(got), expected)


def small_hessian():
    """Reverse mode of reverse mode without a mask: two tokens on each device, in tiles of one."""
    tokens = np.random.default_rng(0).normal(size=(3, 4, 2))
    direction = np.cos(tokens)
    ring = functools.partial(ring_attention, mesh=mesh_of(2), block_sizes=BlockSizes(1, 1))

    def product(attend):
        gradient = jax.grad(lambda tokens: jnp.sum(jnp.sin(attend(*tokens))))
        return quick_jit(jax.grad(lambda tokens: jnp.vdot(gradient(tokens), direction)))(tokens)

    with jax.enable_x64(True):
        got, expected = product(ring), product(reference)
    agree({"tokens": got}, {"tokens": expected})
