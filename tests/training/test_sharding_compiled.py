"""What eight devices would send in a step of training with "fsdp", from programs compiled for them.

A CPU mesh cannot say it: XLA:CPU has no reduce-scatter, and gathers once for both passes.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from accelerator_targets import h100_devices, tpu_devices
from collectives import collectives

from attention_jax.training.loop import LoopConfig, Task, initial_state, train_steps
from attention_jax.training.sharding import Layout, MeshShape

pytestmark = pytest.mark.accelerators

SHAPES = {"in": (64, 128), "hidden": (128, 256), "out": (256, 8)}
SIZES = sorted(rows * columns for rows, columns in SHAPES.values())


def init(rng):
    return {name: jax.random.normal(rng, shape) for name, shape in SHAPES.items()}


def loss(params, batch, rng):
    hidden = jnp.tanh(jnp.tanh(batch @ params["in"]) @ params["hidden"])
    return jnp.mean((hidden @ params["out"]) ** 2), {}


def compiled_steps(devices):
    """Two steps with "fsdp" over all devices."""
    task = Task(init, lambda rng: jax.random.normal(rng, (32, 64)), loss)
    optimizer, layout = optax.adam(0.01), Layout(MeshShape(fsdp=len(devices)), devices)
    config = LoopConfig(seeds=1, steps=4, log_every=2, checkpoint_every=4)
    state = jax.eval_shape(functools.partial(initial_state, task, optimizer, config))

    def steps(state):
        return jax.vmap(lambda state: train_steps(task, optimizer, 2, state, layout))(state)

    shardings = layout.shardings(state), layout.replicated
    return jax.jit(steps, out_shardings=shardings).lower(layout.placed(state)).compile()


def sizes_of(sent, kind):
    return sorted(each.numbers for each in sent if each.kind == kind)


def test_on_h100s():
    """One gather and one reduce-scatter of all parameters together."""
    sent = collectives(compiled_steps(h100_devices(8)))
    # A started collective lists its inputs, an eighth, and its outputs.
    whole = sum(SIZES)
    assert sizes_of(sent, "all-gather") == [whole + whole // 8]
    assert sizes_of(sent, "reduce-scatter") == [whole + whole // 8]
    assert max(sizes_of(sent, "all-reduce")) <= 2  # the loss


def test_on_tpus():
    """The large matrices are scattered; each is gathered for the forward and the backward pass."""
    sent = collectives(compiled_steps(tpu_devices(8)))
    assert set(sizes_of(sent, "all-gather")) == set(SIZES)
    assert sizes_of(sent, "reduce-scatter") == [SIZES[1] + SIZES[2]]
    # A gradient [256, 8] fills no tile of [8, 128] in parts: XLA sums it whole.
    assert max(sizes_of(sent, "all-reduce")) <= SIZES[0]
