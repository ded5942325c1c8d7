r"""Every derivative of `attention` and `ring_attention`, for every score, mask and option.

The derivatives must equal those of implementation "reference", in float64. All compositions of one
case, of both implementations, are one program, because compiling takes most of the time.

A case is a score, an option and an implementation. All compositions of all cases take hours: the
tests run a sample (see `sample`). test_derivative_grid.py runs this file as a script on several CPU
devices. Its arguments name the cases to run: `all:own-bias-tiled` runs all compositions of a case,
and without `all:` those of the sample:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python tests/derivative_grid.py all:own-bias-tiled
"""

from __future__ import annotations

import functools
import itertools
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
from conformance import quick_jit
from derivative_compositions import COMPOSITIONS, K, Q, V
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax.core.meshes import varying_as
from attention_jax.implementations import tiled

SCORES = {**aj.SCORES, "own": SCORE_CASES["own"].score}
OPTIONS = ("none", "dropout", "bias", "statistics")
CASES = list(itertools.product(SCORES, OPTIONS, ("tiled", "ring")))
THIRD = ("third", "third in reverse")
LONG = (  # these take several times as long to compile as the others
    *THIRD, "hessian", "jacrev of jacrev", "jacfwd of jacfwd", "jacrev of jacfwd", "custom_root",
    "hessian of scan", "grad of grad of checkpoint of scan", "grad of grad of map",
    "jvp of grad of fori_loop",
)  # fmt: skip
# Lengths 5 and 7 are padded to these, which two devices split into two chunks each.
ROWS, KEYS = 8, 8
TILE = aj.BlockSizes(2, 3)


def tables() -> np.ndarray:
    """Returns masks, bool [3, ROWS, KEYS]: none, causal with an empty row, padding."""
    rows, keys = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    real = (rows < len(Q)) & (keys < len(K))
    return np.stack([real, real & (keys < rows), real & (keys < 4) & (rows != 2)])


def function_of(score_name, option, implementation):
    """Returns f(table, q, k, v): attention, whose parameters and bias depend on the query."""
    score = SCORES[score_name]
    params = score.init(jax.random.key(3), 3, 3)

    def f(allowed, q, k, v):
        size = 1 + jnp.tanh(q[0, 0]) / 4
        arguments = {
            "score": score,
            "params": jax.tree.map(lambda leaf: leaf.astype(q.dtype) * size, params),
            "mask": allowed,
            "return_statistics": option == "statistics",
        }
        if option == "dropout":
            arguments |= {"dropout_rate": 0.3, "dropout_rng": jax.random.key(5)}
        if option == "bias":
            table = jnp.sin(q[:, :1] - k[None, :, 1])
            stored = jnp.pad(table, ((0, ROWS - len(q)), (0, KEYS - len(k))))
            arguments["bias"] = aj.alibi_bias(size / 3) + stored
        tokens = [
            jnp.pad(x, ((0, n - len(x)), (0, 0))) for x, n in ((q, ROWS), (k, KEYS), (v, KEYS))
        ]
        if implementation == "ring":
            mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
            results = aj.ring_attention(*tokens, mesh=mesh, block_sizes=TILE, **arguments)
        else:
            arguments["implementation"] = implementation
            results = aj.attention(*tokens, block_sizes=TILE, **arguments)
        if option != "statistics":
            return results[: len(q)]
        output, statistics = results
        entropy, has_keys = statistics.entropy, statistics.logsumexp > -jnp.inf
        logsumexp = jnp.where(has_keys, statistics.logsumexp, 0)
        return (output * jnp.cos(entropy)[:, None] + jnp.tanh(logsumexp)[:, None])[: len(q)]

    return f


def is_the_reference(score_name, option, implementation, names=None, table=slice(None)):
    """Compares compositions with the reference, for all masks at once or for the given one."""
    if names is None:
        names = list(COMPOSITIONS)
    # JAX traces equal programs once, so that the forward ones come first.
    names = sorted(names, key=lambda name: COMPOSITIONS[name][1])
    rule = tiled.attend_tiles  # a ring has the same rule
    by_hand, traced = rule.bwd, set()

    def counted(*arguments):
        traced.add(in_reverse[-1])
        return by_hand(*arguments)

    in_reverse = []

    def of_table(table):
        results = []
        for each in (implementation, "reference"):
            f = functools.partial(function_of(score_name, option, each), table)
            results.append({})
            for name in names:
                in_reverse.append(COMPOSITIONS[name][1])
                results[-1][name] = COMPOSITIONS[name][0](f)(Q, K, V)
        return results

    masks = tables()[table]
    rule.bwd = counted
    try:
        with jax.enable_x64(True):
            program = quick_jit(jax.vmap(of_table) if masks.ndim == 3 else of_table)
            got, expected = jax.device_get(program(masks))
    finally:
        rule.bwd = by_hand
    for name in names:
        for one, other in zip(*map(jax.tree.leaves, (got[name], expected[name])), strict=True):
            scale = max(1.0, np.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10 * scale, err_msg=name)
    # The rule by hand is used where a derivative is taken in reverse, and nowhere else.
    assert traced == ({True} & set(in_reverse)), (names, traced)


def sample() -> dict[tuple[str, str, str], list[str]]:
    """Returns {case: its compositions}, a sample in which all pairs of properties of a case occur.

    Each composition occurs with all options, each with another score, in a ring for one of the
    options and in tiles for the others. LONG compositions occur in tiles for one option only, and
    THIRD, whose rules are those of the second order, not in a ring.
    """
    cases = {}
    for c, name in enumerate(COMPOSITIONS):
        in_ring = c % len(OPTIONS)
        both = (in_ring, (in_ring + 1) % len(OPTIONS))
        for o, option in enumerate(OPTIONS):
            if name in LONG and o not in both:
                continue
            implementation = "ring" if o == in_ring and name not in THIRD else "tiled"
            case = (list(SCORES)[(2 * o + c) % len(SCORES)], option, implementation)
            cases.setdefault(case, []).append(name)
    return cases


# --- on meshes ---


def by_hand():
    """Returns tanh(x w) as a `custom_vjp`, whose forward pass loops over the rows."""

    def forward(x, w):
        def row(i, out):
            return out.at[i].set(jnp.tanh(x[i] @ w))

        start = varying_as(jnp.zeros((x.shape[0], w.shape[1]), x.dtype), x, w)
        return jax.lax.fori_loop(0, x.shape[0], row, start)

    def fwd(x, w):
        out = forward(x, w)
        return out, (x, w, out)

    def bwd(residuals, ct):
        x, w, out = residuals
        slopes = ct * (1 - out**2)
        return slopes @ w.T, x.T @ slopes

    f = aj.custom_vjp(forward, twin=lambda x, w: jnp.tanh(x @ w))
    f.defvjp(fwd, bwd)
    return f


def tiled_attention(x, w):
    tokens = x @ w
    return aj.attention(
        tokens, tokens, x, score="additive", mask=aj.causal_mask(-1), implementation="tiled",
        params={"query_kernel": w, "key_kernel": w.T, "v": w[0]}, block_sizes=TILE,
    )  # fmt: skip


def on_meshes(f):
    """Compares derivatives in `shard_map` and on Explicit axes: sharded examples, shared params."""
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=(4, 5, 3)), rng.normal(size=(3, 3))
    dx, dw = np.cos(x), np.sin(w)

    def everything(loss, x, w, dx, dw):
        gradient = jax.grad(loss, (0, 1))
        slope = jax.jvp(loss, (x, w), (dx, dw))
        product = jax.jvp(gradient, (x, w), (dx, dw))[1]
        again = jax.grad(lambda w: jnp.sum(jax.grad(loss, 1)(x, w) ** 2))(w)
        return slope, gradient(x, w), product, again

    def total(f):
        return lambda x, w: jnp.sum(jnp.sin(jax.vmap(f, (0, None))(x, w)) ** 2)

    with jax.enable_x64(True):
        expected = jax.jit(functools.partial(everything, total(f)))(x, w, dx, dw)
        mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
        data, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
        spread = [jax.device_put(leaf, data) for leaf in (x, dx)]
        shared = [jax.device_put(leaf, whole) for leaf in (w, dw)]
        arguments = (spread[0], shared[0], spread[1], shared[1])

        def in_shard_map(x, w):
            def of_one_device(x, w):
                return jax.lax.psum(total(f)(x, w), "data")

            specs = jax.P("data"), jax.P()
            return jax.shard_map(of_one_device, mesh=mesh, in_specs=specs, out_specs=jax.P())(x, w)

        with jax.set_mesh(mesh):
            for loss in (in_shard_map, total(f)):
                got = jax.jit(functools.partial(everything, loss))(*arguments)
                for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


SOME = ("vmap of jvp of grad", "linearize", "vmap of jvp")
CHECKS = {
    "a_ring": functools.partial(is_the_reference, "own", "statistics", "ring", SOME, 1),
    "custom_vjp_on_meshes": lambda: on_meshes(by_hand()),
}
SLOW = {
    "tiles": functools.partial(
        is_the_reference, "general", "bias", "tiled", (*SOME, "custom_root"), 2
    ),
    "tiled_on_meshes": lambda: on_meshes(tiled_attention),
}
GRID = {f"all:{'-'.join(case)}": functools.partial(is_the_reference, *case) for case in CASES}
SAMPLE = {
    "-".join(case): functools.partial(is_the_reference, *case, names, number % 3)
    for number, (case, names) in enumerate(sample().items())
}

if __name__ == "__main__":
    eight_devices.run({**CHECKS, **SLOW, **SAMPLE, **GRID}, sys.argv[1:])
