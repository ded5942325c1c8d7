"""Every mistake a user can make at the front door: one line that names the argument."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import DK, DQ, DV, B, S, T
from oracles import normal

import attention_jax as aj

TOKENS = {"query": normal(B, T, DK), "key": normal(B, S, DK), "value": normal(B, S, DV)}
RNG = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Transposed(aj.Score):
    def pair(self, params, q_features, k_features):
        return k_features @ q_features.T


@dataclasses.dataclass(frozen=True)
class Forgetful(aj.Score):
    def pair(self, params, q_features, k_features):
        q_features @ k_features.T  # without return


def kernel(*shape, dtype=float):
    return {"kernel": jnp.ones(shape, dtype)}


MISTAKES = {  # argument -> wrong values
    "query": [jnp.ones(DK), "tokens", jnp.ones((B, T, DK), int), jnp.ones((B, T, 0))],
    "key": [
        [[[1.0], [1.0, 2.0]]], jnp.ones((B, S, DK), complex), jnp.ones((3, S, DK)),
        jnp.ones((B, S, DQ)),
    ],
    "value": [
        jnp.ones(()), jnp.ones((B, S, DV), bool), jnp.ones((5, S, DV)), jnp.ones((B, T, DV)),
    ],
    "mask": [
        jnp.ones((T, S), jnp.int32), "causal", jnp.ones((S, T), bool),
        jnp.ones((1, B, T, S), bool), aj.causal_mask() & aj.padding_mask(jnp.array([1, 2, 3])),
        ~aj.segment_mask(jnp.zeros((B, T), int), jnp.zeros((B, T), int)),
    ],
    "bias": [jnp.ones((B, S, T)), jnp.ones((T, S), bool)],
    "score": ["skaled", Transposed(), Forgetful(), lambda q, k: None],
    "params": [
        None, kernel(DK), 3.0, kernel(DK, DQ), kernel(3, DK, DK), kernel(DK, DK, dtype=int),
        {"v": jnp.ones(17)},
    ],
    "dropout_rate": [1.0, -0.1, np.nan, None],
    "dropout_rng": [None, jax.random.split(RNG, 3), 7, np.zeros(3, np.uint32)],
    "implementation": ["flash", ["reference"]],
    "block_sizes": [(2, 3)],
}  # fmt: skip
BESIDE = {"params": {"score": "general"}, "dropout_rng": {"dropout_rate": 0.1}}
CASES = [
    *(
        (name, {name: wrong, **BESIDE.get(name, {})})
        for name, values in MISTAKES.items()
        for wrong in values
    ),
    ("params", {"score": "dot", "params": kernel(DK, DK)}),
    ("params", {"score": aj.Additive(5), "params": aj.Additive(17).init(RNG, DK, DK)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong"), CASES, ids=[f"{name}{number}" for number, (name, _) in enumerate(CASES)]
)
def test_the_error_begins_with_the_argument(name, wrong):
    with pytest.raises(ValueError, match=f"^{name}.* must ") as error:
        aj.attention(**TOKENS | wrong)
    assert "\n" not in str(error.value)


def test_params_that_are_missing_are_told():
    with pytest.raises(ValueError, match=r"give params=score.init\(rng, 11, 11\)"):
        aj.attention(**TOKENS, score="general")


def test_a_traced_dropout_rate():
    with pytest.raises(ValueError, match=r"^dropout_rate must"):
        jax.jit(lambda x: aj.attention(**TOKENS, dropout_rate=x, dropout_rng=RNG))(0.5)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None])
@pytest.mark.parametrize("name", ["query", "key"])
def test_block_sizes(name, size):
    with pytest.raises(ValueError, match=f"BlockSizes {name} must be .*; got {size!r}"):
        aj.BlockSizes(**{name: size})


@pytest.mark.parametrize(("name", "wrong"), [("key", jnp.ones((3, S, DK))), ("score", "kosine")])
def test_attention_weights_checks_too(name, wrong):
    with pytest.raises(ValueError, match=f"^{name} must"):
        aj.attention_weights(**{"query": TOKENS["query"], "key": TOKENS["key"]} | {name: wrong})
