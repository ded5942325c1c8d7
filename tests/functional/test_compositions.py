"""Derivatives as users compose them, of every score and implementation, against plain JAX.

The other side is a softmax written out here, with each score's formula as its paper has it. Both
are put through the same compositions of `grad`, `vmap`, `jvp`, `scan`, `checkpoint` and the like.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, assert_close, named, quick_jit

import attention_jax as aj

N, T, S, D, DV = 2, 3, 5, 2, 1  # N examples
TILE = aj.BlockSizes(query=2, key=3)


# --- the scores, plainly ---


def outer(combine, query, key):
    return combine(query[:, None, :], key[None, :, :])


def additive(params, query, key):
    hidden = outer(jnp.add, query @ params["query_kernel"], key @ params["key_kernel"])
    return jnp.tanh(hidden) @ params["v"]


def concat(params, query, key):
    both = [jnp.broadcast_to(x, (T, S, D)) for x in (query[:, None, :], key[None, :, :])]
    return jnp.tanh(jnp.concatenate(both, axis=-1) @ params["kernel"]) @ params["v"]


def cosine(params, query, key):
    sizes = outer(jnp.multiply, *(jnp.sum(x**2, -1, keepdims=True) for x in (query, key)))
    return jnp.exp(params["log_scale"]) * (query @ key.T) / jnp.sqrt(sizes[..., 0])


def distance(params, query, key):
    return -jnp.sum(outer(jnp.subtract, query, key) ** 2, axis=-1) / (8 * D) ** 0.5


LOGITS = {
    "additive": additive,
    "concat": concat,
    "cosine": cosine,
    "distance": distance,
    "dot": lambda params, query, key: query @ key.T,
    "general": lambda params, query, key: query @ params["kernel"] @ key.T,
    "scaled": lambda params, query, key: query @ key.T / D**0.5,
    "softcap": lambda params, query, key: 50 * jnp.tanh(query @ key.T / D**0.5 / 50),
}


def plain_attention(score_name, point):
    logits = LOGITS[score_name](point["params"], point["query"], point["key"])
    exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return exponentials / exponentials.sum(-1, keepdims=True) @ point["value"]


def library_attention(implementation, score_name, point):
    return aj.attention(**point, score=score_name, implementation=implementation, block_sizes=TILE)


# --- the compositions: (attend, points of N examples, directions like them) -> arrays ---


def loss(attend, point):
    """One number, in which no two entries count alike."""
    output = attend(point)
    return jnp.sum(jnp.sin(output) * jnp.cos(jnp.arange(output.size)).reshape(output.shape))


def first(points):
    return jax.tree.map(lambda leaf: leaf[0], points)


def dot(left, right):
    return sum(jnp.sum(x * y) for x, y in zip(*map(jax.tree.leaves, (left, right)), strict=True))


def hessian(attend, points, directions):
    """Of parameters and queries together, as a pytree of blocks."""
    point = first(points)

    def of(some):
        return loss(attend, {**point, **some})

    return jax.hessian(of)({name: point[name] for name in ("params", "query")})


def jacobian(transformation):
    def compose(attend, points, directions):
        point = first(points)
        return transformation(
            lambda params, query: attend({**point, "params": params, "query": query}), (0, 1)
        )(point["params"], point["query"])

    return compose  # fmt: skip


def gradients_of_examples(attend, points, directions):
    """Parameters shared, each example's gradient of them apart."""
    shared = first(points)["params"]
    rest = {name: points[name] for name in ("query", "key", "value")}
    return jax.vmap(
        jax.value_and_grad(lambda params, rest: loss(attend, {**rest, "params": params})),
        (None, 0),
    )(shared, rest)  # fmt: skip


def pulled_back(attend, points, directions):
    """One linear function of cotangents for all of them."""
    _, pull_back = jax.vjp(attend, first(points))
    return jax.vmap(pull_back)(jnp.stack([points["value"][:, :T], directions["value"][:, :T]])[0])


def gradient_of(attend):
    return jax.grad(functools.partial(loss, attend))


def jvp_of_grad(attend, points, directions):
    return jax.jvp(gradient_of(attend), (first(points),), (first(directions),))[1]


def vmap_of_jvp_of_grad(attend, points, directions):
    gradient = gradient_of(attend)
    return jax.vmap(lambda *x: jax.jvp(gradient, x[:1], x[1:])[1])(points, directions)


def linearize_of_grad(attend, points, directions):
    return jax.linearize(gradient_of(attend), first(points))[1](first(directions))


def grad_of_grad(attend, points, directions):
    gradient, direction = gradient_of(attend), first(directions)
    return jax.grad(lambda point: dot(gradient(point), direction))(first(points))


def through_scan(attend, points, directions):
    """Steps that each attend with what the one before made, the last two axes being alike."""

    def of(points):
        def step(query, point):
            output = attend({**point, "query": query + point["query"]})
            return jnp.tanh(output + query), jnp.sum(output)

        query, sums = jax.lax.scan(step, points["query"][0], points)
        return jnp.sum(query) + jnp.sum(sums**2)

    return jax.grad(of)(points)


def through_checkpoint(attend, points, directions):
    kept = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
    return jax.grad(lambda point: loss(kept, point) ** 2)(first(points))


def with_auxiliary(attend, points, directions):
    def of(point):
        output = attend(point)
        return jnp.sum(output**3), {"output": output}

    return jax.value_and_grad(of, has_aux=True)(first(points))


def jvp(attend, points, directions):
    return jax.jvp(attend, (first(points),), (first(directions),))


def linearize(attend, points, directions):
    return jax.linearize(attend, first(points))[1](first(directions))


def vmap_of_jvp(attend, points, directions):
    return jax.vmap(lambda *x: jax.jvp(attend, x[:1], x[1:]))(points, directions)


COMPOSITIONS = {
    "grad": lambda attend, points, _: gradient_of(attend)(first(points)),
    "value_and_grad with auxiliary": with_auxiliary,
    "vmap of value_and_grad": gradients_of_examples,
    "vmap of vjp": pulled_back,
    "jacrev": jacobian(jax.jacrev),
    "hessian": hessian,
    "jvp of grad": jvp_of_grad,
    "vmap of jvp of grad": vmap_of_jvp_of_grad,
    "linearize of grad": linearize_of_grad,
    "grad of grad": grad_of_grad,
    "grad of scan": through_scan,
    "grad of checkpoint": through_checkpoint,
    "jacfwd": jacobian(jax.jacfwd),
    "jvp": jvp,
    "linearize": linearize,
    "vmap of jvp": vmap_of_jvp,
}


def points_of(score_name):
    """Points of N examples, and directions to go in from there."""
    rng = np.random.default_rng(len(score_name))
    shapes = {"query": (N, T, D), "key": (N, S, D), "value": (N, S, DV)}
    params = aj.SCORES[score_name].init(jax.random.key(2), D, D)

    def drawn():
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        arrays["params"] = jax.tree.map(lambda leaf: rng.normal(size=(N, *leaf.shape)), params)
        return arrays

    return drawn(), drawn()


def all_of(names, attend):
    def run(points, directions):
        return {name: COMPOSITIONS[name](attend, points, directions) for name in names}

    return quick_jit(run)


def every_nth_composition(n, start):
    return tuple(COMPOSITIONS)[start % n :: n]


# A composition of a tile loop compiles for one or two seconds. Each score meets all compositions
# with the reference. With tiles, each composition meets one score in a fast test.
EVERY_NTH = {"reference": 4, "tiled": len(aj.SCORES)}
MORE = {"reference": 1, "tiled": 4}
GRID = [
    pytest.param(
        score_name, implementation, every_nth_composition(numbers[implementation], start),
        id=f"{score_name}-{implementation}-every-{numbers[implementation]}", marks=marks,
    )
    for numbers, marks in ((EVERY_NTH, []), (MORE, pytest.mark.slow))
    for implementation in ALL_IMPLEMENTATIONS
    for start, score_name in enumerate(aj.SCORES)
]  # fmt: skip


@pytest.mark.parametrize(("score_name", "implementation", "names"), GRID)
def test_compositions(score_name, implementation, names):
    with jax.enable_x64(True):
        points = points_of(score_name)
        got, expected = (
            all_of(names, functools.partial(*attend, score_name))(*points)
            for attend in ((library_attention, implementation), (plain_attention,))
        )
        for composition, arrays in got.items():
            arrays, others = named(arrays), named(expected[composition])
            assert arrays.keys() == others.keys(), composition
            for name, array in arrays.items():
                assert_close(f"{composition} {name}", array, others[name], 1e-11)
