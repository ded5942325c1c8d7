"""Parts of a user that break their contract: one line names the part, the method and the cure."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import attention

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)

# --- masks and biases ---


def masks():
    def mask(allowed, **fields):
        annotations = {"__annotations__": dict.fromkeys(fields, jax.Array)}
        return aj.mask_dataclass(
            type("Mine", (aj.Mask,), {"allowed": allowed, **fields, **annotations})
        )

    return {
        "floats": mask(lambda _, i, j: jnp.where(j[None] <= i[:, None], 0.0, -1e9))(),
        "integers": mask(lambda _, i, j: (j[None] <= i[:, None]).astype(int))(),
        "vectors": mask(lambda _, i, j: j <= i)(),
        "transposed": mask(lambda _, i, j: j[:, None] <= i[None])(),
        "nothing": mask(lambda _, i, j: None)(),
        "numpy": mask(lambda _, i, j: np.less_equal.outer(i, j))(),
        "a value of an array": mask(
            lambda self, i, j: (j[None] >= int(self.start)) & (i[:, None] >= 0),
            start=aj.array_field(),
        )(jnp.array(1)),
        "a closure": mask(lambda _, i, j: (j[None] <= i[:, None]) & (TRACED[0] > 0))(),
    }


TRACED = [1.0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("floats", r"allowed must return booleans .*got float32 \[3, 5\]"),
        ("integers", r"allowed must return booleans .*got int32 \[3, 5\]"),
        ("vectors", r"allowed .* raised TypeError.*must return booleans .* \[3, 5\]"),
        ("transposed", r"allowed must return .*got bool \[5, 3\]"),
        ("nothing", "allowed must return .*got None"),
        ("numpy", r"allowed .* raised TracerArray.*line \d+\): use jax.numpy"),
        ("a value of an array", r"allowed .* raised Concretization.*: use jnp functions"),
    ],
)
def test_a_wrong_mask_is_named_in_one_line(kind, message):
    mask = masks()[kind]

    def loss(query, mask):
        return attention(query, X, X, mask=mask).sum()

    for call in (loss, jax.jit(loss), jax.grad(loss)):
        with pytest.raises(ValueError, match=f"^mask Mine: {message}") as error:
            call(X, mask)
        assert "\n" not in str(error.value)


def test_a_mask_that_reads_a_traced_array_is_refused():
    def loss(limit):
        TRACED[0] = limit
        return attention(X, X, X, mask=masks()["a closure"]).sum()

    with pytest.raises(ValueError, match=r"mask Mine must not use the traced .*array_field\(\)"):
        jax.grad(loss)(1.0)


def test_a_wrong_bias_is_named_in_one_line():
    for wrong, message in (
        (lambda _, i, j: j > i, r"bias Mine: values .* raised TypeError"),
        (lambda _, i, j: j[None] > i[:, None], "bias Mine: values must return floats .*got bool"),
    ):
        bias = aj.bias_dataclass(type("Mine", (aj.Bias,), {"values": wrong}))()
        with pytest.raises(ValueError, match=message):
            attention(X, X, X, bias=bias)


# --- scores that are none ---


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda q, k: q @ k.T - abs(jnp.indices((len(q), len(k)), q.dtype)[0]),
         "depends on positions .*: use a bias"),
        (lambda q, k: q @ (k - k.mean(0, keepdims=True)).T, "on other tokens"),
        (lambda q, k: q @ k.T / len(k), "on other tokens"),
        (lambda q, k: q @ k.T - jnp.where(jnp.arange(len(k)) < 64, 0.0, 1.0)[None], "positions"),
        (lambda q, k: k @ (q**2).T, r"pair must return float logits .*got float32 \[5, 3\]"),
        (lambda q, k: q @ k, "pair .* raised TypeError.*pair must give logits"),
        (lambda q, k: jnp.vdot(q, k), "pair .* raised .*pair must give logits"),
        (lambda q, k: np.dot(q, k.T), r"pair .* raised TracerArrayConv.*: use jax.numpy"),
        (lambda q, k: q @ k.T if q.sum() > 0 else k @ q.T, r"pair .* raised .*: use jnp.where"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("jitted", [False, True])
def test_a_wrong_score_is_named_in_one_line(score, message, jitted):
    def call(tokens):
        return attention(tokens, tokens, tokens, score=score)

    with pytest.raises(ValueError, match=f"score .*<lambda>.*{message}") as error:
        (jax.jit(call) if jitted else call)(X)
    assert "\n" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class CentredKeys(aj.Score):
    def project_key(self, params, key):
        return key - key.mean(0, keepdims=True)

    def pair(self, params, q, k):
        return q @ k.T


@dataclasses.dataclass(frozen=True)
class WrongVjp(aj.Score):
    def pair(self, params, q, k):
        return q @ k.T

    def pair_vjp(self, params, q, k, dlogits):
        return params, dlogits @ k, 2 * dlogits.T @ q


@dataclasses.dataclass(frozen=True)
class WithoutCotangent(aj.Score):
    def pair(self, params, q, k):
        return q @ k.T

    def pair_vjp(self, params, q, k, dlogits):
        logits = q @ k.T
        return params, logits @ k, logits.T @ q


@dataclasses.dataclass(frozen=True)
class TwoCotangents(aj.Score):
    def pair(self, params, q, k):
        return q @ k.T

    def pair_vjp(self, params, q, k, dlogits):
        return dlogits @ k, dlogits.T @ q


@dataclasses.dataclass(frozen=True)
class Whole(aj.Score):
    """Whole numbers as features, which have no gradient."""

    def project_query(self, params, query):
        return {"x": query, "n": query[:, 0].astype(int)}

    project_key = project_query

    def pair(self, params, q, k):
        return q["x"] @ k["x"].T + (q["n"][:, None] == k["n"][None]).astype(q["x"].dtype)

    def pair_vjp(self, params, q, k, dlogits):
        return jax.vjp(self.pair, params, q, k)[1](dlogits)


def test_projections_and_derivatives_are_checked_too():
    with pytest.raises(ValueError, match=r"CentredKeys.*on other tokens"):
        attention(X, X, X, score=CentredKeys())
    with pytest.raises(ValueError, match=r"CentredKeys.*on other tokens"):
        aj.nn.MultiHeadAttention(CentredKeys(), 8, num_heads=2, rngs=nnx.Rngs(0))(X)
    for wrong in (WrongVjp(), WithoutCotangent(), TwoCotangents(), aj.SoftCap(WrongVjp())):
        with pytest.raises(ValueError, match=r"score .* must have a pair_vjp that is the derivat"):
            attention(X, X, X, score=wrong)
    attention(X, X, X, score=Whole())


# --- normalisers that break the contract ---


def normalizer(**members):
    return dataclasses.dataclass(frozen=True)(type("Mine", (aj.Normalizer,), members))()


FREE = {"sums_to_one": False}
WRONG_NORMALIZERS = {
    "negative": (
        normalizer(weight=lambda _, p, x: x, **FREE), "weights must not be negative"),
    "falling": (
        normalizer(weight=lambda _, p, x: jnp.exp(-x * x), **FREE), "weights must not fall"),
    "not 0 at -inf": (
        normalizer(weight=lambda _, p, x: 1 + jax.nn.sigmoid(x), **FREE), "weights must be 0 at"),
    "no sum of 1": (
        normalizer(weight=lambda _, p, x: jax.nn.sigmoid(x), inverse=lambda _, p, w: w),
        "must have weights that sum to 1"),
    "of the row": (
        normalizer(weight=lambda _, p, x: jax.nn.sigmoid(x), **FREE,
                   transform=lambda _, p, x, n: x - x.max(1, keepdims=True)),
        "transform that is elementwise"),
    "n without uses_num_keys": (
        normalizer(weight=lambda _, p, x: jax.nn.sigmoid(x), **FREE,
                   transform=lambda _, p, x, n: x - jnp.log(n)),
        "transform raised TypeError.*: set uses_num_keys = True"),
    "of all logits": (
        normalizer(weight=lambda _, p, x: jax.nn.softmax(x), **FREE), "weight that is elementwise"),
    "no inverse(1)": (
        normalizer(weight=lambda _, p, x: jax.nn.sigmoid(x),
                   inverse=lambda _, p, w: jnp.log(w) - jnp.log1p(-w)),
        r"must have a finite inverse\(1\)"),
    "not elementwise": (
        normalizer(weight=lambda _, p, x: jnp.exp(x).sum(1), **FREE), "weight must be elementwise"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG_NORMALIZERS)
def test_a_wrong_normalizer_is_named_in_one_line(kind):
    wrong, message = WRONG_NORMALIZERS[kind]
    for call in (attention, jax.jit(attention, static_argnames="normalizer")):
        with pytest.raises(ValueError, match=rf"normalizer Mine\(\).*{message}") as error:
            call(X, X, X, normalizer=wrong)
        assert "\n" not in str(error.value)


def test_a_wrong_normalizer_inside_of_another():
    wrong, message = WRONG_NORMALIZERS["negative"]
    with pytest.raises(ValueError, match=message):
        aj.attention_weights(X, X, normalizer=aj.LogScaled(wrong))
