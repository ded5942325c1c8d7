"""What a user writes is known by its program: its numbers are those of now.

Scores, functions as scores, masks, biases and normalisers, as they are written in notebooks.
"""

import copy
import dataclasses
import functools
import gc
import hashlib
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mistakes import refused
from own_parts import NOW, NUMBERS, Hotter, Module, Near, Slope, X, close, product, slope

import attention_jax as aj
from attention_jax import attention, interop
from attention_jax.functional.attention import _attention
from attention_jax.parts import known_score
from attention_jax.parts.digests import _text_of, program_digest
from attention_jax.parts.user_code import UserCode

# --- numbers that change between eager calls ---

TEMPERATURE = 1.0


def by_global(q, k):
    return TEMPERATURE * (q @ k.T)


class Plain:
    """An object that a user wrote, callable and with methods."""

    def __init__(self, temperature):
        self.temperature = temperature

    def __call__(self, q, k):
        return self.temperature * (q @ k.T)

    def method(self, q, k):
        return self(q, k)


def score_class(eq=True, **field):
    """A class of scores with the field `temperature`, which is an array."""

    def pair(self, params, q, k):
        return self.temperature * (q @ k.T)

    fields = [("temperature", object, dataclasses.field(**field))]
    return dataclasses.make_dataclass(
        "Mine", fields, bases=(aj.Score,), namespace={"pair": pair}, frozen=True, eq=eq
    )


CLASSES = {
    "eq=False": score_class(eq=False),
    "compare=False": score_class(compare=False),
    "array field": score_class(),
}


SHARED = Plain(0.0)
KINDS = ["global", "object", "bound method", "inside of a score", *CLASSES]


def scores_of(temperature):
    """Scores as users write them, whose number is now `temperature`."""
    global TEMPERATURE
    TEMPERATURE = SHARED.temperature = temperature
    return {
        "global": by_global,
        "object": SHARED,
        "bound method": SHARED.method,
        "inside of a score": aj.SoftCap(aj.get_score(by_global), cap=1e4),
        **{name: cls(jnp.float32(temperature)) for name, cls in CLASSES.items()},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_now(kind):
    for temperature in (*NUMBERS, NUMBERS[0]):
        close(attention(X, X, X, score=scores_of(temperature)[kind]), temperature)


def test_numbers_are_those_of_now_in_every_function():
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    global TEMPERATURE
    for TEMPERATURE in NUMBERS:
        heads = X[:, None]
        weights = aj.attention_weights(X, X, score=by_global)
        close(weights @ X, TEMPERATURE)
        close(interop.dot_product_attention(heads, heads, heads, score=by_global)[:, 0],
              TEMPERATURE)  # fmt: skip
        close(aj.ring_attention(X, X, X, score=by_global, mesh=mesh), TEMPERATURE)
        whole = {"centers": jnp.arange(6), "radius": 6}
        close(aj.local_attention(X, X, X, score=by_global, **whole), TEMPERATURE)
        no_coverage = jnp.zeros(8)
        result = aj.coverage_attention(X, X, X, score=by_global, coverage_kernel=no_coverage)
        close(result.output, TEMPERATURE)
        close(aj.nn.Attention(by_global, 8, 8, rngs=nnx.Rngs(0))(X, X), TEMPERATURE)
        _, weights = aj.monotonic_attention(X, X, X, score=by_global)
        first = 1 / (1 + np.exp(-TEMPERATURE * X[0] @ X[0]))
        np.testing.assert_allclose(weights[0, 0], first, rtol=1e-5)


@pytest.mark.parametrize("kind", ["object", *CLASSES])
def test_a_traced_array_that_is_no_parameter_is_refused(kind):
    def loss(temperature):
        SHARED.temperature = temperature
        score = SHARED if kind == "object" else CLASSES[kind](temperature)
        return attention(X, X, X, score=score).sum()

    calls = (lambda: jax.grad(loss)(1.0), lambda: jax.jit(loss)(1.0))
    refused(r"score .*traced array float32\[\] .*params=", *calls)


def test_large_constants_cost_no_time_and_are_not_kept():
    large = jnp.ones(20_000_000)

    def score_of(factor):
        return lambda q, k: jnp.asarray(factor)[0] * (q @ k.T)

    def seconds(call):
        """The fewest of a few runs."""
        times = []
        for _ in range(4):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    score = score_of(large)
    of_call = seconds(lambda: close(attention(X, X, X, score=score), 1.0))
    assert of_call < 0.3 * seconds(functools.partial(hashlib.sha256, np.asarray(large)))
    kept = [weakref.ref(each) for each in (score, large)]
    del score, large
    jax.clear_caches()
    gc.collect()
    assert [each() for each in kept] == [None, None]

    def score(q, k):
        return of_numpy * (q @ k.T)

    of_numpy = np.ones((1, 1), np.float32)
    for temperature in NUMBERS:
        of_numpy[:] = temperature  # NumPy's arrays can change
        close(attention(X, X, X, score=score), temperature)


def test_an_array_in_the_place_of_one_that_was_deleted():
    def place_and_digest(number):
        array = jnp.full(3, number)
        return id(array), program_digest(UserCode("score", "mine", ""), lambda x: array * x, array)

    places, digests = zip(*map(place_and_digest, range(50)), strict=True)
    assert len(set(places)) < 50 == len(set(digests))


def test_a_copy_of_a_known_score_is_equal():
    known = known_score(aj.get_score(by_global), None, 8, 8)
    assert copy.copy(known) == known == copy.deepcopy(known)


def test_a_class_counts_beside_its_program():
    """It says which kernels compute it."""
    scores = (type(name, (aj.Dot,), {})() for name in ("One", "Other"))
    one, other = (known_score(score, None, 8, 8) for score in scores)
    assert one.digest == other.digest
    assert one != other


# --- callable pytrees ---


def module_of(temperature):
    module = Module()
    module.temperature[...] = temperature
    return module


OF_PARAMETERS = {
    "nnx": lambda temperature: {"score": module_of(temperature)},
    "Partial": lambda temperature: {"score": jax.tree_util.Partial(product, temperature)},
    "function": lambda temperature: {"score": product, "params": temperature},
}


@pytest.mark.parametrize("kind", OF_PARAMETERS)
def test_parameters_of_a_function_and_leaves_of_a_callable_pytree(kind):
    def output(temperature):
        return attention(X, X, X, **OF_PARAMETERS[kind](temperature))

    def loss(temperature):
        return jnp.sum(output(temperature) ** 2)

    for temperature in map(jnp.float32, NUMBERS):
        close(output(temperature), temperature)
        np.testing.assert_allclose(jax.grad(loss)(temperature), slope(temperature), rtol=2e-4)


def test_callables_that_count_as_functions():
    def doubled(q, k, scale=2.0):
        return scale * (q @ k.T)

    for score in (doubled, jax.jit(doubled), functools.partial(doubled, scale=2.0)):
        close(attention(X, X, X, score=score), 2.0)


def test_a_module_as_score_is_compiled_once_while_it_trains():
    module, programs = Module(), []
    for temperature in NUMBERS:
        module.temperature[...] = jnp.float32(temperature)
        close(attention(X, X, X, score=module), temperature)
        programs = [*programs, _attention._cache_size()]
    assert programs[0] == programs[1]


# --- masks and biases ---


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_numbers_of_masks_and_biases_are_those_of_now(implementation):
    i, j = np.indices((6, 6))
    options = {"score": "dot", "implementation": implementation}
    for limit in (0, 1):
        NOW["mask"] = NOW["bias"] = limit
        near, causal = abs(i - j) <= limit, j <= i
        close(attention(X, X, X, mask=Near(), **options), 1.0, allowed=near)
        both = aj.causal_mask() & (~Near() | aj.local_mask(0, 0))
        close(attention(X, X, X, mask=both, **options), 1.0, allowed=causal & (~near | (i == j)))
        close(attention(X, X, X, bias=Slope(), **options), 1.0, allowed=causal | (limit == 0))


def test_numbers_of_normalizers_are_those_of_now():
    for factor in (2, 1):
        NOW["normalizer"] = factor
        weights = 1 / (1 + np.exp(-factor * X.astype(np.float64) @ X.T))
        for name in ("reference", "tiled"):
            got = attention(X, X, X, score="dot", normalizer=Hotter(), implementation=name)
            np.testing.assert_allclose(got, weights @ X, rtol=2e-5, atol=1e-5)


def test_subclasses_of_softmax():
    """With a transform it is softmax; with a weight of its own, a search finds the threshold."""

    class Base2(aj.Softmax):
        def weight(self, params, shifted):
            return jnp.exp2(shifted)

    with pytest.raises(ValueError, match="Base2 must define inverse"):
        attention(X, X, X, score="dot", normalizer=Base2())

    class OwnInverse(Base2):
        def inverse(self, params, weight):
            return jnp.log2(weight)

    @dataclasses.dataclass(frozen=True)
    class Warm(aj.Softmax):
        def transform(self, params, logits, num_keys):
            return logits / 2

    for implementation in ("reference", "tiled"):
        for normalizer, scale in ((Warm(), 0.5), (OwnInverse(), np.log(2))):
            options = {"normalizer": normalizer, "implementation": implementation}
            close(attention(X, X, X, score="dot", **options), scale)


# --- changes between a call and its derivative ---


def test_a_change_before_the_derivative_is_refused():
    """Of any part of a call."""
    parts = {"mask": Near(), "bias": Slope(), "normalizer": Hotter()}
    parts["score"] = lambda q, k: NOW["score"] * (q @ k.T)

    def loss(tokens):
        return jnp.sum(attention(tokens, X, X, implementation="tiled", **parts) ** 2)

    compiled = jax.jit(loss)
    compiled(X)
    _, pull_back = jax.vjp(loss, X)
    for part in NOW:
        NOW[part] = 2
        for late in (lambda: pull_back(1.0), lambda: jax.grad(compiled)(X)):
            with pytest.raises(ValueError, match="must not change between a call of attention"):
                late()
        NOW[part] = 1
    np.testing.assert_array_equal(pull_back(1.0)[0], jax.grad(loss)(X))


SETTINGS = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "mesh": lambda: jax.set_mesh(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    ),
    "leaks": jax.checking_leaks,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_jax_may_change_before_the_derivative(setting):
    parts = {"mask": Near(), "bias": Slope(), "normalizer": Hotter()}

    def call(tokens):
        score = functools.partial(product, 1.0)
        return attention(tokens, X, X, score=score, implementation="tiled", **parts)

    with SETTINGS[setting]():
        output, pull_back = jax.vjp(call, jnp.asarray(X))
    (got,) = pull_back(output)
    (expected,) = jax.vjp(call, jnp.asarray(X))[1](output)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_a_digest_sees_what_is_computed_alone():
    """Not the mesh, nor what this library says of a transpose: older runs keep their digests."""

    def self_attention(tokens):
        return attention(tokens, tokens, tokens, implementation="tiled")

    program = jax.make_jaxpr(self_attention)(jax.ShapeDtypeStruct((300, 8), jnp.float32))
    assert "linear_in=" in str(program)
    assert "linear_in=" not in _text_of(program)
