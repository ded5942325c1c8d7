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
from oracles import softmax

import attention_jax as aj
from attention_jax import attention, interop
from attention_jax.core.programs import Part
from attention_jax.functional.attention import _attend
from attention_jax.scores import known_score

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
NUMBERS = (0.1, 3.0)
NOW = {"score": 1, "mask": 1, "bias": 1, "normalizer": 1}  # what parts of a user read


def expected(temperature, allowed=True):
    """Attention of X to itself with logits `temperature * q . k`, in float64 NumPy."""
    tokens = X.astype(np.float64)
    return softmax(temperature * tokens @ tokens.T, allowed) @ tokens


def slope(temperature):
    """The derivative of the sum of squares of `expected` by the temperature."""
    temperature, step = float(temperature), 1e-6
    losses = [np.sum(expected(temperature + sign * step) ** 2) for sign in (-1, 1)]
    return (losses[1] - losses[0]) / (2 * step)


def close(got, temperature, **mask):
    np.testing.assert_allclose(got, expected(temperature, **mask), rtol=2e-5, atol=2e-6)


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
        return id(array), Part("score", "mine", "").trace(lambda x: array * x, array)

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


class Module(nnx.Module):
    def __init__(self):
        self.temperature = nnx.Param(jnp.float32(1.0))
        self.name = "a static attribute"

    def __call__(self, q, k):
        return self.temperature[...] * (q @ k.T)


def product(temperature, q, k):
    return temperature * (q @ k.T)


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
    module = Module()
    traces = []

    def counted(module, q, k):
        traces.append(q.shape)
        return module(q, k)

    for temperature in NUMBERS:
        module.temperature[...] = jnp.float32(temperature)
        score = jax.tree_util.Partial(counted, module)
        close(attention(X, X, X, score=score), temperature)
    of_calls = [shape for shape in traces if shape == X.shape]
    assert len(of_calls) == 1


# --- masks and biases ---


@aj.mask_dataclass
class Near(aj.Mask):
    def allowed(self, query_positions, key_positions):
        return abs(query_positions[:, None] - key_positions[None, :]) <= NOW["mask"]


@aj.bias_dataclass
class Slope(aj.Bias):
    def values(self, query_positions, key_positions):
        before = key_positions[None, :] <= query_positions[:, None]
        return jnp.where(before, 0.0, -1e4 * NOW["bias"])


@dataclasses.dataclass(frozen=True)
class Hotter(aj.Normalizer):
    sums_to_one = False

    def weight(self, params, shifted):
        return jax.nn.sigmoid(shifted)

    def transform(self, params, logits, num_keys):
        return NOW["normalizer"] * logits


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


# --- one program, many objects ---


def test_equal_programs_are_compiled_once_and_keep_one_array():
    arrays = []

    def call():
        large = jnp.full((1000, 100), len(arrays) * 0.0 + 2)
        arrays.append(weakref.ref(large))
        scores = (lambda q, k: large[0, 0] * (q @ k.T)), functools.partial(product, 2.0)
        for score in scores:
            close(attention(X, X, X, score=score, mask=aj.causal_mask(5)), 2.0)

    call()
    programs = _attend._cache_size()
    for _ in range(4):
        call()
    gc.collect()
    assert _attend._cache_size() == programs
    assert sum(array() is not None for array in arrays) <= 2
    jax.clear_caches()
    gc.collect()
    assert not any(array() is not None for array in arrays)


def test_the_python_function_that_a_score_calls_is_that_of_the_call():
    for log in ([], []):

        def score(q, k, log=log):
            jax.debug.callback(log.append, q[0, 0])
            return q @ k.T

        close(attention(X, X, X, score=score), 1.0)
        jax.effects_barrier()
        assert [*map(float, log)] == [X[0, 0]]


class Switch(Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def __call__(self, q, k):
        return self.factor * super().__call__(q, k)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_of_an_equal_object_refuses_no_gradient(changed):
    """Two modules have one program until one of them changes."""
    modules = Switch(), Switch()

    def loss(query, score):
        return attention(query, X, X, score=score, implementation="tiled").sum()

    calls = [jax.jit(functools.partial(loss, score=module)) for module in modules]
    for call in calls:
        call(X)
    modules[changed].factor = 2.0
    expected = jax.grad(loss)(X, "dot")
    for call in (calls[1 - changed], functools.partial(loss, score=modules[1 - changed])):
        np.testing.assert_allclose(jax.grad(call)(X), expected, rtol=2e-5, atol=2e-6)


# --- nothing of a check is seen ---


@dataclasses.dataclass(frozen=True)
class Printing(aj.Score):
    def pair(self, params, q, k):
        logits = q @ k.T
        jax.debug.print("largest {}", logits.max())
        return jax.lax.cond(True, lambda x: jax.debug.print("inner {}", x[0, 0]) or x, abs, logits)

    pair_vjp = aj.Score.pair_vjp


def test_prints_are_those_of_the_call(capsys):
    def transform(_, params, logits, num_keys):
        jax.debug.print("largest {}", logits.max())
        return logits

    normalizer = type("Loud", (Hotter,), {"transform": transform})()
    attention(X, X, X, score=Printing(), normalizer=normalizer, implementation="reference")
    jax.effects_barrier()
    assert capsys.readouterr().out.count("largest") == 2


def test_no_transfer_is_needed():
    tokens = jnp.asarray(X)
    table = jnp.ones((3, 8))
    parts = {"mask": Near(), "bias": Slope(), "normalizer": Hotter()}
    with jax.transfer_guard("disallow"):
        attention(tokens, tokens, tokens, score=lambda q, k: q @ k.T + table.sum(), **parts)


# --- programs that depend on the number of tokens ---


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_a_branch_on_the_number_of_tokens_belongs_to_the_program(implementation):
    now = {"score": 1.0, "mask": 6, "normalizer": 1.0}

    def score(q, k):
        return (now["score"] if len(q) > 3 else 1.0) * (q @ k.T)

    @aj.mask_dataclass
    class Mine(aj.Mask):
        def allowed(self, query_positions, key_positions):
            gap = now["mask"] if len(query_positions) > 3 else 0
            return key_positions[None] <= query_positions[:, None] + gap

    @dataclasses.dataclass(frozen=True)
    class Warm(aj.Softmax):
        def transform(self, params, logits, num_keys):
            return (now["normalizer"] if len(logits) > 3 else 1.0) * logits

    options = {"implementation": implementation, "score": score, "mask": Mine()}
    i, j = np.indices((6, 6))
    for part, number in ((None, 0), ("score", 0.5), ("mask", 1), ("normalizer", 0.1), ("mask", 6)):
        now[part] = number
        got = attention(X, X, X, normalizer=Warm(), **options)
        close(got, now["score"] * now["normalizer"], allowed=j <= i + now["mask"])
