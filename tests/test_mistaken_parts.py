"""Parts of a user that break their contract: one line names the part, the method and the cure."""

import dataclasses
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import check_error
from flax import nnx
from mistakes import refused

import attention_jax as aj
from attention_jax import attention
from attention_jax.tasks.translation.task import Translation
from attention_jax.training.run import prepare

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
HERE = "test_mistaken_parts.py, line "


# --- masks and biases ---


def mask_of(allowed, **fields):
    annotations = {"__annotations__": dict.fromkeys(fields, jax.Array)}
    mine = type("Mine", (aj.Mask,), {"allowed": allowed, **fields, **annotations})
    return aj.mask_dataclass(mine)


def bias_of(values):
    return aj.bias_dataclass(type("Mine", (aj.Bias,), {"values": values}))()


def score_of(**members):
    """A dot product with other methods."""
    members = {"pair": lambda _, params, q, k: q @ k.T, **members}
    return dataclasses.dataclass(frozen=True)(type("Mine", (aj.Score,), members))()


TRACED = [1.0]
WRONG_MASKS = [
    (lambda _, i, j: jnp.where(j[None] <= i[:, None], 0.0, -1e9),
     r"must return booleans .*got float32 \[3, 5\]"),
    (lambda _, i, j: j <= i, r".* raised TypeError.*must return booleans .* \[3, 5\]"),
    (lambda _, i, j: j[:, None] <= i[None], r"must return .*got bool \[5, 3\]"),
    (lambda _, i, j: None, "must return .*got None"),
    (lambda _, i, j: np.less_equal.outer(i, j), r".* raised TracerArray.*line \d+\): use jax.nump"),
    (lambda self, i, j: (j[None] >= int(self.start)) & (i[:, None] >= 0),
     r".* raised Concretization.*: use jnp functions"),
    (lambda _, i: i > 0, r"must take \(query_positions, key_positions\): too"),
]  # fmt: skip
WRONG_BIASES = [
    (lambda _, i, j: j > i, "raised TypeError"),
    (lambda _, i, j: j[None] > i[:, None], "must return floats .*got bool"),
    (lambda _, i, j: jnp.zeros((len(i), len(j)), jnp.bfloat16),
     r"must return floats of float32 .*got bfloat16 \[3, 5\]"),
    (lambda _, i, j, k: i, "must take .*: missing a required argument: 'k'"),
]  # fmt: skip


def test_a_mask_that_reads_a_traced_array():
    mask = mask_of(lambda _, i, j: (j[None] <= i[:, None]) & (TRACED[0] > 0))()

    def loss(limit):
        TRACED[0] = limit
        return attention(X, X, X, mask=mask).sum()

    refused(r"mask Mine must not use the traced .*array_field\(\)", lambda: jax.grad(loss)(1.0))


@aj.bias_dataclass
class Slope(aj.Bias):
    rate: jax.Array = aj.array_field()

    def values(self, query_positions, key_positions):
        steps = key_positions[None, :] - query_positions[:, None]
        return jnp.asarray(self.rate) * steps.astype(float)


def test_a_python_number_in_a_bias_is_an_array():
    number, array = (aj.attention(X, X, X, bias=Slope(rate)) for rate in (0.5, jnp.array(0.5)))
    np.testing.assert_array_equal(number, array)


@aj.bias_dataclass
class Undeclared(aj.Bias):
    rate: jax.Array  # not declared as an array
    values = Slope.values


def test_an_undeclared_array_is_refused_under_grad_too():
    # Compared by value in a static option, the tracer would hit the cache of 1.0: gradient 0.
    def loss(rate):
        return jnp.sin(attention(X, X, X, bias=Undeclared(rate))).sum()

    loss(1.0)
    refused(r"Undeclared.rate must be declared `rate: Array =", lambda: jax.grad(loss)(1.0))
    refused("Undeclared.rate must be declared", lambda: loss(jnp.ones(())))
    mask = aj.mask_dataclass(type("Mine", (aj.Mask,), {"__annotations__": {"lengths": jax.Array}}))
    refused("Mine.lengths must be declared", lambda: mask(jnp.ones(3)))
    bare = type("Bare", (aj.Bias,), {})
    refused("must be decorated with @bias_dataclass", lambda: attention(X, X, X, bias=bare()))


# --- scores that are none ---


WRONG_FUNCTIONS = [
    (lambda q, k: q @ k.T - abs(jnp.indices((len(q), len(k)), q.dtype)[0]),
     "depends on positions .*: use a bias"),
    (lambda q, k: q @ (k - k.mean(0, keepdims=True)).T, "on other tokens"),
    (lambda q, k: q @ k.T / len(k), "on other tokens"),
    (lambda q, k: k @ (q**2).T, r"pair must return float logits .*got float32 \[5, 3\]"),
    (lambda q, k: (q @ k.T).astype(int), "pair must return float logits .*got int32"),
    (lambda q, k: (q @ k.T).astype(jnp.float16), "pair must return .* in float32 .*got float16"),
    (lambda q, k: None, "pair must return float logits .*got None"),
    (lambda q, k: (q @ k.T, k), r"pair must return float logits .*got float32 \[3, 5\]"),
    (lambda q, k: [q @ k.T], r"pair must return float logits .*got a list of float32 \[3, 5\]"),
    (lambda q, k: q @ k, "pair .* raised TypeError.*pair must give logits"),
    (lambda q, k: np.dot(q, k.T), r"pair .* raised TracerArrayConv.*: use jax.numpy"),
    (lambda q, k: q @ k.T if q.sum() > 0 else k @ q.T, r"pair .* raised .*: use jnp.where"),
]  # fmt: skip


def test_a_module_needs_a_score_that_initialises_its_params():
    def general(params, q, k):
        return q @ params["kernel"] @ k.T

    message = r"general takes params .* define init"
    refused(message, lambda: aj.nn.Attention(general, 8, 8, rngs=nnx.Rngs(0)))


@dataclasses.dataclass(frozen=True)
class Wrong(aj.Score):
    """A score of which one method is wrong."""

    method: str = ""

    def init(self, rng, query_dim, key_dim):
        return {"kernel": jax.random.normal(rng, (query_dim, key_dim))}

    def project_query(self, params, query):
        self._fail("project_query")
        if self.method == "narrow":
            query = query.astype(jnp.bfloat16)
        if self.method == "transposed":
            return query.T
        return query @ params["kernel"].astype(query.dtype)

    def project_key(self, params, key):
        self._fail("project_key")
        return key - key.mean(0, keepdims=True) if self.method == "centred" else key

    def pair(self, params, q, k):
        self._fail("pair")
        return q @ k.T

    def _fail(self, method):
        if self.method == method:
            raise LookupError("first line\nsecond line")


@dataclasses.dataclass(frozen=True)
class WrongVjp(aj.Score):
    kind: str = "factor"

    def pair(self, params, q, k):
        return q @ k.T

    def pair_vjp(self, params, q, k, dlogits):
        if self.kind == "two":
            return dlogits @ k, dlogits.T @ q
        dlogits = q @ k.T if self.kind == "no cotangent" else dlogits
        return params, dlogits @ k, 2 * dlogits.T @ q


class WrongTileParams(aj.Score):
    def pair(self, params, q, k):
        return params.get("scale", 1.0) * (q @ k.T)

    def tile_params(self, params, q_features):
        return {**params, "scale": 2.0}


class NarrowVjp(WrongVjp):
    def pair_vjp(self, params, q, k, dlogits):
        exact = aj.Score.pair_vjp(self, params, q, k, dlogits)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), exact)


@pytest.mark.parametrize(
    ("score", "method"),
    [(lambda q, k: (q @ k.T).astype(jnp.float32), "pair"), (NarrowVjp(), "pair_vjp")],
)
def test_float32_of_float64(score, method):
    with jax.enable_x64(True):
        for dtype in (np.float64, np.float32):
            x = X.astype(dtype)

            def call(x=x):
                return attention(x, x, x, score=score, implementation="reference")

            if dtype == np.float64:
                refused(f"{method} .*float64", call)
            else:
                call()


@pytest.mark.parametrize("method", ["project_query", "project_key", "pair"])
def test_the_line_of_a_method_that_raises(method):
    lines, first = inspect.getsourcelines(Wrong)
    line = first + next(i for i, line in enumerate(lines) if "raise LookupError" in line)
    for score in (Wrong(method), aj.SoftCap(Wrong(method))):
        message = rf"^score .*{method}.* raised LookupError: first line \({HERE}{line}\)"
        options = {"score": score, "params": {"kernel": np.eye(8, dtype=np.float32)}}
        refused(message, lambda options=options: attention(X, X, X, **options))


def test_projections_and_derivatives():
    params = {"kernel": np.eye(8, dtype=np.float32)}

    def call(score, params=None):
        return lambda: attention(X, X, X, score=score, params=params)

    refused("project_query must return one row per token", call(Wrong("transposed"), params))
    refused("project_query must return .* in float32 .*got bfloat16", call(Wrong("narrow"), params))
    refused("on other tokens", call(Wrong("centred"), params))
    for kind in ("factor", "no cotangent", "two"):
        for score in (WrongVjp(kind), aj.SoftCap(WrongVjp(kind))):
            refused("score .* must have a pair_vjp that is the derivat", call(score))
    for score in (WrongTileParams(), aj.SoftCap(WrongTileParams())):
        refused("score .* must have a tile_params that adds what pair", call(score))
    moved = {"pair": lambda _, params, q, k: q @ k.T, "translation_invariant": True}
    for score in (
        dataclasses.dataclass(frozen=True)(
            type("Moved", (aj.Score,), moved | {"needs_equal_dims": dims})
        )()
        for dims in (True, False)
    ):
        for each in (score, aj.SoftCap(score)):
            refused("score .* must not be translation_invariant", call(each))
    without_pair = dataclasses.dataclass(frozen=True)(type("WithoutPair", (aj.Score,), {}))()
    refused(r"score WithoutPair\(\) must define pair\(params, ", call(without_pair))


WRONG_ARGUMENTS = [
    ("pair", lambda _, q, k: q @ k.T, "(params, q_features, k_features): too many positional"),
    ("project_query", lambda _, query: query, "(params, query): too many positional"),
    ("project_key", lambda _, params, key, dim: key, "(params, key): missing a required argument"),
    ("init", lambda _, rng: {}, "(rng, query_dim, key_dim): too many positional"),
]


# --- before a model or a run is made ---

LINE = "pair of float32 [3, {0}] and float32 [5, {0}] raised RuntimeError: broken (wrong_scores.py,"


@pytest.fixture
def wrong_module(tmp_path, monkeypatch):
    """A module of a user in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    head = "import dataclasses\nfrom attention_jax import Score\n\n\n"
    (tmp_path / "wrong_scores.py").write_text(
        f"{head}@dataclasses.dataclass(frozen=True)\nclass Wrong(Score):\n    size: int = 64\n\n"
        "    def pair(self, params, q, k):\n        if q.shape[1] == self.size:\n"
        "            raise RuntimeError('broken')\n        return q @ k.T\n"
    )
    return tmp_path


def test_training_fails_before_it_makes_a_folder_or_reads_a_text(wrong_module, command):
    found = command("train", "--score", "wrong_scores:Wrong", "--workdir", "run")
    check_error(found, f"score Wrong(size=64): {LINE.format(64)} line 11)")
    assert not (wrong_module / "run").exists()
    model = dataclasses.replace(Translation.model, score="wrong_scores:Wrong(size=32)")
    task = Translation(source=Path("nowhere"), target=Path("nowhere"), model=model)
    refused(re.escape(LINE.format(32)), lambda: prepare(task, wrong_module / "run"))


# --- normalisers that break the contract ---


def normalizer(weight, **members):
    members = {"sums_to_one": False, "weight": weight, **members}
    return dataclasses.dataclass(frozen=True)(type("Mine", (aj.Normalizer,), members))()


def sigmoid(_, params, x):
    return jax.nn.sigmoid(x)


WRONG_NORMALIZERS = [
    (normalizer(lambda _, p, x: x), "weights must not be negative"),
    (normalizer(lambda _, p, x: jnp.exp(-x * x)), "weights must not fall"),
    (normalizer(lambda _, p, x: 1 + jax.nn.sigmoid(x)), "weights must be 0 at"),
    (normalizer(sigmoid, sums_to_one=True, inverse=lambda _, p, w: w),
     "must have weights that sum to 1"),
    (normalizer(sigmoid, transform=lambda _, p, x, n: x - x.max(1, keepdims=True)),
     "transform that is elementwise"),
    (normalizer(sigmoid, transform=lambda _, p, x, n: x - jnp.log(n)),
     "transform raised TypeError.*: set uses_num_keys = True"),
    (normalizer(lambda _, p, x: jax.nn.sigmoid(x).astype(jnp.float16)),
     "weight must be .* in float32 .*got float16"),
    (normalizer(lambda _, p, x: jax.nn.softmax(x)), "weight that is elementwise"),
    (normalizer(lambda _, p, x: jnp.exp(x).sum(1)), "weight must be elementwise"),
    (normalizer(sigmoid, sums_to_one=True, inverse=lambda _, p, w: jnp.log(w) - jnp.log1p(-w)),
     r"must have a finite inverse\(1\)"),
    (normalizer(sigmoid, sums_to_one=True), r"must define inverse\("),
    (normalizer(lambda _, x: jnp.exp(x)), r"weight must take \(params, .*\): too many"),
]  # fmt: skip


# --- all of them ---

PARTS = [  # (the argument of attention, a wrong part, what the error says)
    *(("mask", mask_of(allowed, start=aj.array_field())(jnp.array(1)), f"Mine: allowed .*{message}")
      for allowed, message in WRONG_MASKS),
    *(("bias", bias_of(values), f"Mine: values .*{message}") for values, message in WRONG_BIASES),
    *(("score", score, f".*<lambda>.*{message}") for score, message in WRONG_FUNCTIONS),
    *(("score", score, rf"Mine\(\): {name} must take {re.escape(message)}")
      for name, method, message in WRONG_ARGUMENTS
      for mine in [score_of(**{name: method})] for score in (mine, aj.SoftCap(mine))),
    *(("normalizer", wrong, f".*Mine.*{message}") for wrong, message in WRONG_NORMALIZERS),
    ("normalizer", aj.LogScaled(WRONG_NORMALIZERS[0][0]), f".*{WRONG_NORMALIZERS[0][1]}"),
    ("normalizer", aj.LogScaled(normalizer(lambda self, shifted: shifted)), ".*weight must take"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "part", "message"), PARTS)
def test_a_wrong_part(argument, part, message):
    def loss(query):
        return attention(query, query, X, **{argument: part}).sum()

    calls = (lambda how=how: how(X) for how in (loss, jax.jit(loss), jax.grad(loss)))
    refused(f"^{argument} {message}", *calls)
