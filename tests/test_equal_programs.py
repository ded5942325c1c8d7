"""Parts of a user with equal programs are one; what checks them is not seen."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_parts import Hotter, Module, Near, Slope, X, close, product

import attention_jax as aj
from attention_jax import BlockSizes, attention
from attention_jax.functional.attention import _attention
from attention_jax.parts import known_score

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
    programs = _attention._cache_size()
    for _ in range(4):
        call()
    gc.collect()
    assert _attention._cache_size() == programs
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


BRANCHES = {
    "at least": lambda q, k: len(q) >= 6,
    "equal": lambda q, k: q.shape[0] in (6, 8),
    "as many": lambda q, k: q.shape == k.shape,
    "multiple": lambda q, k: len(k) % 2 == 0,
}


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_a_branch_on_the_number_of_tokens_belongs_to_the_program(implementation, branch):
    now = {"score": 1.0, "mask": 6, "normalizer": 1.0}
    takes = BRANCHES[branch]

    def score(q, k):
        return (now["score"] if takes(q, k) else 1.0) * (q @ k.T)

    @aj.mask_dataclass
    class Mine(aj.Mask):
        def allowed(self, query_positions, key_positions):
            gap = now["mask"] if takes(query_positions, key_positions) else 0
            return key_positions[None] <= query_positions[:, None] + gap

    @dataclasses.dataclass(frozen=True)
    class Warm(aj.Softmax):
        def transform(self, params, logits, num_keys):
            return (now["normalizer"] if takes(logits, logits.T) else 1.0) * logits

    def call(x):
        options = {"implementation": implementation, "score": score, "mask": Mine()}
        return attention(x, x, x, normalizer=Warm(), block_sizes=BlockSizes(6, 6), **options)

    i, j = np.indices((6, 6))
    for part, number in ((None, 0), ("score", 0.5), ("mask", 1), ("normalizer", 0.1), ("mask", 6)):
        now[part] = number
        expected = {
            "temperature": now["score"] * now["normalizer"],
            "allowed": j <= i + now["mask"],
        }
        close(call(X), **expected)
        close(call(np.stack([X, X]))[1], **expected)
    if (branch, implementation) == ("equal", "tiled"):  # a tile takes it, and the call does not
        twice = np.concatenate([X, X])
        for now["score"] in (0.5, 2.0):
            options = {"implementation": implementation, "block_sizes": BlockSizes(6, 6)}
            close(attention(twice, twice, twice, score=score, **options)[:6], now["score"])


@dataclasses.dataclass(frozen=True)
class Started(aj.Score):
    """Its `pair` does not depend on the number with which its parameter begins."""

    start: object

    def init(self, rng, query_dim, key_dim):
        return {"t": jnp.full((), self.start)}

    def pair(self, params, q, k):
        jax.debug.print("unseen" if q is None else "{}", params["t"])
        return params["t"] * (q @ k.T)


@pytest.mark.parametrize("start", [float, jnp.float32])  # an array cannot be hashed
def test_scores_of_one_program_keep_their_own_init(start):
    scores = [known_score(Started(start(number)), None, 8, 8) for number in (1, 2)]
    starts = [float(score.init(jax.random.key(0), 8, 8)["t"]) for score in scores]
    assert starts == [1, 2]
    params = {"t": jnp.float32(2)}
    close(attention(X, X, X, score=Started(start(1)), params=params), 2.0)
