"""What test_shard_map.py runs on eight devices: `jax.shard_map` with its default checks."""

from __future__ import annotations

import functools
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import attention_jax as aj

B, T, S, D = 8, 67, 7, 3  # more queries than one chunk holds


def case(score):
    """(what is cut up over devices, what every device has)."""
    rng = np.random.default_rng(1)
    shapes = {"query": (B, T, D), "key": (B, S, D), "value": (B, S, D)}
    cut = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    cut["lengths"] = (np.arange(B) % S + 1).astype(np.int32)
    params = aj.get_score(score).init(jax.random.key(2), D, D)
    table = rng.normal(size=(T, S)).astype(np.float32)
    shared = {"params": params, "bias": table, "kernel": np.ones(D, np.float32)}
    return cut, shared | {"offset": np.float32(0.5)}


def monotonic(score, hard, cut, shared):
    output, last = aj.monotonic_attention(
        cut["query"], cut["key"], cut["value"], score=score, params=shared["params"], hard=hard,
        mask=aj.padding_mask(cut["lengths"]), bias=shared["bias"], offset=shared["offset"],
        return_weights="last",
    )  # fmt: skip
    return output, last


def coverage(score, cut, shared):
    result = aj.coverage_attention(
        cut["query"], cut["key"], cut["value"], score=score, params=shared["params"],
        coverage_kernel=shared["kernel"], bias=shared["bias"],
        mask=aj.padding_mask(cut["lengths"]) & aj.causal_mask(2),
    )  # fmt: skip
    return tuple(result)


def walks(cut, shared):
    p = jax.nn.sigmoid(cut["query"][:, :5] @ cut["key"].mT + shared["offset"])
    # Starts that are the same on all devices.
    return aj.monotonic_weights(p), aj.hard_monotonic_weights(p)


def as_on_one_device(attend, score="general"):
    """Values and gradients, and no sum over devices inside a loop."""
    cut, shared = case(score)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (PartitionSpec("data"), PartitionSpec())
    spread = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=specs[0])

    def gradient(attend):
        def loss(floats, shared):
            results = attend({**cut, **floats}, shared)
            return sum(jnp.sin(3 * leaf).sum() for leaf in results), results

        return jax.grad(loss, (0, 1), has_aux=True)

    floats = {name: array for name, array in cut.items() if name != "lengths"}
    expected = jax.jit(gradient(attend))(floats, shared)
    found = jax.jit(gradient(spread))(floats, shared)
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-5 * np.max(np.abs(wanted)))
    inside = sums_in_loops(jax.make_jaxpr(gradient(spread))(floats, shared).jaxpr)
    assert not inside, inside


def sums_in_loops(jaxpr, in_loop=False):
    """Names of the sums over devices that stand inside of loops."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if in_loop and name.startswith(("psum", "all_")):
            found.append(name)
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += sums_in_loops(inner, in_loop or name in ("scan", "while"))
    return found


CHECKS = {
    "monotonic": lambda: as_on_one_device(functools.partial(monotonic, "general", False)),
    "monotonic-hard": lambda: as_on_one_device(functools.partial(monotonic, "general", True)),
    "coverage": lambda: as_on_one_device(functools.partial(coverage, "general")),
    "walks": lambda: as_on_one_device(walks),
}

if __name__ == "__main__":
    eight_devices.run(CHECKS, sys.argv[1:])
