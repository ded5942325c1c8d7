"""No loop of a compiled program runs on a single thread, where it has work for several.

XLA:CPU of jax 0.12 turns a loop whose body is elementwise into one call on one thread, and marks
the call in the text of the compiled program.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from conformance import SCORE_CASES
from score_cases import slow_unless

import attention_jax as aj

LENGTH, DIM = 150, 40  # one [T, S] takes 90,000 bytes; 40 features take several passes of a loop
SMALL = 2**16  # bytes of a call that one thread computes as fast


def on_one_thread(function, *arguments):
    """The bytes of arguments of each loop that the compiled function runs on a single thread."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    calls = [line for line in text.splitlines() if 'xla_cpu_small_call="true"' in line]
    shapes = (re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", line.partition(" call(")[0]) for line in calls)
    return [
        sum(
            int(bits) // 8 * math.prod(map(int, filter(None, sizes.split(","))))
            for bits, sizes in each
        )
        for each in shapes
    ]


def arrays(score):
    tokens = (jax.ShapeDtypeStruct((2, LENGTH, DIM), jnp.float32) for _ in range(3))
    return *tokens, jax.eval_shape(lambda: score.init(jax.random.key(0), DIM, DIM))


def gradient_and_tangent(function):
    def both(*x):
        _, pull_back = jax.vjp(function, *x)
        return pull_back(x[0]), jax.jvp(function, x, x)

    return both


def product_with_hessian(function):
    return lambda *x: jax.jvp(
        jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2, 3)), x, x
    )


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("name", slow_unless(["additive", "neural"], SCORE_CASES))
@pytest.mark.parametrize(
    "derivative", [gradient_and_tangent, pytest.param(product_with_hessian, marks=pytest.mark.slow)]
)
def test_loops_of_attention_use_all_threads(name, implementation, derivative):
    score = SCORE_CASES[name].score

    def attend(query, key, value, params):
        return aj.attention(
            query, key, value, score=score, params=params, mask=aj.causal_mask(),
            implementation=implementation,
        )  # fmt: skip

    found = on_one_thread(derivative(attend), *arrays(score))
    assert max(found, default=0) <= SMALL
