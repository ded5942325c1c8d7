"""Each transformation of JAX with each form of attention, against plain formulas in float64.

Writes the table of the guide: PYTHONPATH=.:tests python tests/functional/test_transformations.py
"""

import contextlib
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import TILE, assert_close, quick_jit
from derivative_cases import DROPOUT
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import runnable
from oracles import normal
from score_cases import SCORE_CASES, slow_unless
from test_ordered_attention import coverage, monotonic
from transformations import DERIVATIVES, USES, mesh_of

import attention_jax as aj
from experiments.pages import replaced

LENGTH, D = 4, 4
KEYS, QUERIES = 3, 3  # the others are padding
GENERAL, VECTOR = aj.General(), normal(D, dtype=float)
CENTERS = {"kernel": normal(D, D, seed=1, dtype=float), "v": VECTOR}
PAGE = Path(__file__).parents[2] / "docs/guide/transformations.md"
TOKENS = [normal(2, LENGTH, D, seed=i, dtype=float) for i in range(3)]


def size_of(q):
    return 1 + jnp.tanh(q[..., 0, 0]) / 4


def ours(name, q, k, v, score=GENERAL, **options):
    """The parameters, and a bias, depend on the query, so that each derivative is theirs too."""
    size = size_of(q)

    def sized(leaf):
        of_examples = size.reshape(size.shape + (1,) * leaf.ndim)
        return of_examples * jnp.expand_dims(leaf.astype(q.dtype), tuple(range(size.ndim)))

    params = score.init(jax.random.key(3), D, D)
    mask = aj.causal_mask() & aj.padding_mask(jnp.array(KEYS), jnp.array(QUERIES))
    options |= {"score": score, "params": jax.tree.map(sized, params), "mask": mask}
    if name == "cudnn":
        narrow = (q, k, v), options["params"]
        tokens, options["params"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), narrow)
        return aj.attention(*tokens, **options, implementation=name).astype(q.dtype)
    options["bias"] = aj.alibi_bias(size / 3)
    if name == "ring":
        return aj.ring_attention(q, k, v, mesh=mesh_of(), block_sizes=TILE, **options)
    if name == "local":
        centers = aj.predicted_centers(q, CENTERS, jnp.array(LENGTH))
        return aj.local_attention(q, k, v, centers=centers, radius=2, sigma=1.5, **options)
    if name == "coverage":
        result = aj.coverage_attention(q, k, v, coverage_kernel=VECTOR, **options)
        return result.output + result.loss[..., None]
    if name == "monotonic":
        return aj.monotonic_attention(q, k, v, offset=size, return_weights=False, **options)
    return aj.attention(q, k, v, implementation=name, block_sizes=TILE, **options)


def plain(name, q, k, v):
    """The formula of one example, which JAX differentiates by its own rules."""
    rows, keys = np.indices((LENGTH, LENGTH)).astype(float)
    allowed = (keys <= rows) & (keys < KEYS) & (rows < QUERIES)
    size = size_of(q)
    kernel = size * aj.General().init(jax.random.key(3), D, D)["kernel"].astype(q.dtype)
    arrays = {"query": q @ kernel, "key": k, "value": v}
    arrays["bias"] = 0.0 if name == "cudnn" else -size / 3 * abs(rows - keys)
    if name == "monotonic":
        arrays |= {"offset": size, "initial": jnp.eye(1, LENGTH, dtype=q.dtype)[0]}
        return monotonic(arrays, allowed)["output"]
    if name == "coverage":
        arrays |= {"kernel": VECTOR, "initial": jnp.zeros(LENGTH, q.dtype)}
        results = coverage(arrays, allowed)
        return results["output"] + results["loss"][:, None]
    damping = jnp.ones(allowed.shape)
    if name == "local":
        centers = LENGTH * jax.nn.sigmoid(jnp.tanh(q @ CENTERS["kernel"]) @ CENTERS["v"])
        distances = keys - centers[:, None]
        allowed = allowed & (abs(distances) <= 2)
        damping = jnp.exp(-(distances**2) / (2 * 1.5**2))
    logits = jnp.where(allowed, arrays["query"] @ k.T + arrays["bias"], 0)
    exponentials = jnp.where(allowed, jnp.exp(logits), 0)
    total = jnp.sum(exponentials, -1, keepdims=True)
    return (exponentials / jnp.where(total == 0, 1, total) * damping) @ v


COLUMNS = ("reference", "tiled", "ring", "local", "coverage", "monotonic", "cudnn")
REFUSED = {("debug.print", "cudnn"): "'cudnn' needs a score that is a dot product of features"}
CELLS = [(name, column) for name in (*DERIVATIVES, *USES) for column in COLUMNS]
LONG = ("hessian", "third derivative", "jacfwd of jacfwd", "checkpoint of scan", "disable_jit")
EVERYWHERE = ("jvp of grad", "linear_transpose", "export", "debug.print", "Explicit mesh")
IN_A_RING = ("linearize", "linear_transpose", "grad of grad", "shard_map, Explicit")
FAST = [
    (name, column)
    for name, column in CELLS
    if name in (IN_A_RING if column == "ring" else EVERYWHERE)
    or (column == "tiled" and name not in LONG)
]


@pytest.mark.parametrize(("name", "column"), slow_unless(FAST, CELLS))
def test_a_cell_of_the_table(name, column):
    """XLA's attention stands in for cuDNN."""
    if (name, column) == ("disable_jit", "ring") and jax.__version_info__[:2] == (0, 10):
        pytest.xfail("without jit, JAX 0.10 takes no shard_map over some of a mesh's axes")
    f, formula = functools.partial(ours, column), functools.partial(plain, column)
    runs = runnable("cudnn") if column == "cudnn" else contextlib.nullcontext()
    with jax.enable_x64(True), runs:
        if name in DERIVATIVES:
            transform, tokens = DERIVATIVES[name][0], [x[0] for x in TOKENS]
            got, expected = quick_jit(lambda *x: [transform(f, *x) for f in (f, formula)])(*tokens)
        else:
            expected = USES["jit"](jax.vmap(formula), *TOKENS)
            place = NamedSharding(mesh_of(), P()) if column == "ring" else None
            tokens = jax.device_put(TOKENS, place)
            if error := REFUSED.get((name, column)):
                with pytest.raises(NotImplementedError, match=error):
                    USES[name](f, *tokens)
                return
            got = USES[name](f, *tokens)
        tolerance = 2**-5 if column == "cudnn" else 1e-9
        assert_close("", *jax.device_get((got, expected)), tolerance)


def table() -> str:
    """The table of the page."""
    lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for name in (*DERIVATIVES, *USES):
        lines.append([name, *("raises" if (name, x) in REFUSED else "yes" for x in COLUMNS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_page_has_the_table():
    assert table() in PAGE.read_text()


# --- further options ---


def with_option(column, option, score, *tokens):
    attend = functools.partial(ours, column, *tokens, score=score)
    if option == "dropout":
        return attend(**DROPOUT)
    output, (logsumexp, entropy, _) = attend(return_statistics=True)
    logsumexp = jnp.where(logsumexp > -jnp.inf, logsumexp, 0)
    return output * (jnp.cos(entropy) + jnp.tanh(logsumexp))[:, None]


SCORES = {**aj.SCORES, "own": SCORE_CASES["own"].score}
# Statistics are results of the same call, which are not linear in the values.
NAMES = [name for name in DERIVATIVES if name != "linear_transpose"]
OPTIONS = list(itertools.product(NAMES, ("dropout", "statistics"), ("tiled", "ring")))
FAST_OPTIONS = [("grad of grad", "statistics", "tiled"), ("jvp", "dropout", "ring")]


@pytest.mark.parametrize(("name", "option", "column"), slow_unless(FAST_OPTIONS, OPTIONS))
def test_dropout_statistics_and_every_score(name, option, column):
    """As JAX's own rules differentiate the reference."""
    score = list(SCORES.values())[OPTIONS.index((name, option, column)) // 2 % len(SCORES)]

    @quick_jit
    def both(*tokens):
        of = functools.partial(functools.partial, with_option)
        return [DERIVATIVES[name][0](of(x, option, score), *tokens) for x in (column, "reference")]

    with jax.enable_x64(True):
        assert_close("", *jax.device_get(both(*(x[0] for x in TOKENS))), 1e-10, 1.0)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), lambda _: table()))
