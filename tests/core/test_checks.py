"""Every mistake a user can make at the front door: one line that names the argument."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import DK, DQ, DV, B, S, T

import attention_jax as aj

QUERY, KEY, VALUE = jnp.ones((B, T, DK)), jnp.ones((B, S, DK)), jnp.ones((B, S, DV))
RNG = jax.random.key(0)
ADDITIVE = aj.Additive(17).init(RNG, DK, DK)


@dataclasses.dataclass(frozen=True)
class Transposed(aj.Score):
    def pair(self, params, q_features, k_features):
        return k_features @ q_features.T


@dataclasses.dataclass(frozen=True)
class Forgetful(aj.Score):
    def pair(self, params, q_features, k_features):
        q_features @ k_features.T  # without return


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # shapes and dtypes
        ({"query": jnp.ones(DK)}, r"query must be \[\*B, T, Dq\].*; got \[11\]"),
        ({"value": jnp.ones(())}, r"value must be \[\*B, S, Dv\]; got \[\]"),
        ({"query": "tokens"}, "query must be an array; got str"),
        ({"key": [[[1.0], [1.0, 2.0]]]}, "key must be an array; got list"),
        ({"query": jnp.ones((B, T, DK), int)}, "query must be floating-point; got dtype int32"),
        ({"key": jnp.ones((B, S, DK), complex)}, "key must be floating-point; got dtype complex64"),
        ({"value": jnp.ones((B, S, DV), bool)}, "value must be floating-point; got dtype bool"),
        ({"query": jnp.ones((B, T, 0))}, r"query must .* at least one feature; got \[2, 5, 0\]"),
        (
            {"key": jnp.ones((3, S, DK))},
            r"key must have batch axes that broadcast to \[2\], those of query \[2, 5, 11\];"
            r" got \[3, 7, 11\]",
        ),
        (
            {"value": jnp.ones((5, S, DV))},
            r"value must have batch axes that broadcast to \[2\], those of query \[2, 5, 11\];"
            r" got \[5, 7, 13\]",
        ),
        (
            {"value": jnp.ones((B, T, DV))},
            r"value must be \[..., 7, Dv\] to match key \[2, 7, 11\]; got \[2, 5, 13\]",
        ),
        (
            {"score": "dot", "query": jnp.ones((B, T, DQ))},
            r"key must be \[..., S, 3\] to match score Dot\(\) with query \[..., T, 3\];"
            r" got \[2, 7, 11\]",
        ),
        # parameters
        (
            {"score": "general"},
            r"params must be {.kernel.: .*} for score General\(\) with query .*; got {}: its init",
        ),
        (
            {"score": "dot", "params": {"kernel": jnp.ones((DK, DK))}},
            r"params must be {} for score Dot\(\) .* got {'kernel': \[11, 11\]}",
        ),
        (
            {"score": "additive", "params": {"v": jnp.ones(17)}},
            r"params must be {'key_kernel': \[11, 17\], 'query_kernel': \[11, 17\], 'v': \[17\]}"
            r".* got {'v': \[17\]}",
        ),
        ({"score": "general", "params": 3.0}, r"params must be {'kernel': .* got 3.0: its init"),
        (
            {"score": "general", "params": {"kernel": jnp.ones((DK, DQ))}},
            r"params\['kernel'\] must be \[..., 11, 11\] for score General\(\).* got \[11, 3\]",
        ),
        (
            {"score": "general", "params": {"kernel": jnp.ones((3, DK, DK))}},
            r"params\['kernel'\] must broadcast to \[2, 11, 11\]; got \[3, 11, 11\]",
        ),
        (
            {"score": "general", "params": {"kernel": jnp.ones((DK, DK), int)}},
            r"params\['kernel'\] must be floating-point; got dtype int32",
        ),
        (
            {"score": aj.Additive(5), "params": ADDITIVE},
            r"params\['key_kernel'\] must be \[..., 11, 5\] for score Additive\(hidden_dim=5\)",
        ),
        # mask and bias
        (
            {"mask": jnp.ones((T, S), jnp.int32)},
            "mask must be boolean, True = may attend; got dtype int32",
        ),
        ({"mask": "causal"}, "mask must be a Mask or a boolean array; got 'causal'"),
        (
            {"mask": jnp.ones((S, T), bool)},
            r"mask must broadcast to \[2, 5, 7\] \(\*B, T, S\); got \[7, 5\]",
        ),
        (
            {"mask": jnp.ones((1, B, T, S), bool)},
            r"mask must broadcast to \[2, 5, 7\] \(\*B, T, S\); got \[1, 2, 5, 7\]",
        ),
        (
            {"mask": aj.causal_mask() & aj.padding_mask(jnp.array([1, 2, 3]))},
            r"mask key_lengths must broadcast to \[2\] \(\*B\); got \[3\]",
        ),
        (
            {"mask": ~aj.segment_mask(jnp.zeros((B, T), int), jnp.zeros((B, T), int))},
            r"mask key_segments must broadcast to \[2, 7\] \(\*B, S\); got \[2, 5\]",
        ),
        ({"bias": jnp.ones((B, S, T))}, r"bias must broadcast to \[2, 5, 7\] .*; got \[2, 7, 5\]"),
        ({"bias": jnp.ones((T, S), bool)}, "bias must be floating-point; got dtype bool"),
        # options
        (
            {"score": "skaled"},
            "score must be one of additive, concat, cosine, distance, dot, general, scaled, softcap"
            r" or 'module:Name'; got 'skaled'; did you mean 'scaled'\?",
        ),
        ({"score": Transposed()}, r"score Transposed\(\): pair must .*got float32 \[5, 3\]"),
        ({"score": Forgetful()}, r"score Forgetful\(\): pair must return float logits.*; got None"),
        ({"score": lambda q, k: None}, r"pair must return float logits .*; got None"),
        (
            {"dropout_rate": 0.1},
            "dropout_rng must be a PRNG key when dropout_rate is 0.1; got None",
        ),
        ({"dropout_rate": 1.0}, r"dropout_rate must be a Python number in \[0, 1\); got 1.0"),
        ({"dropout_rate": -0.1}, r"dropout_rate must be a Python number in \[0, 1\); got -0.1"),
        ({"dropout_rate": np.nan}, r"dropout_rate must be a Python number in \[0, 1\); got nan"),
        ({"dropout_rate": None}, r"dropout_rate must be a Python number in \[0, 1\); got None"),
        (
            {"dropout_rate": 0.1, "dropout_rng": jax.random.split(RNG, 3)},
            r"dropout_rng must be one PRNG key, .*; got \[3\] of them",
        ),
        ({"dropout_rate": 0.1, "dropout_rng": 7}, "dropout_rng must be one PRNG key, as .*; got 7"),
        (
            {"dropout_rate": 0.1, "dropout_rng": np.zeros(3, np.uint32)},
            "dropout_rng must be one PRNG key, as jax.random.key makes; got array",
        ),
        ({"implementation": "flash"}, "implementation must be None or one of .*; got 'flash'"),
        ({"implementation": ["reference"]}, r"implementation must be .*; got \['reference'\]"),
        ({"block_sizes": (2, 3)}, r"block_sizes must be a BlockSizes or None; got \(2, 3\)"),
    ],
)
def test_mistakes(changed, message):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **changed}
    with pytest.raises(ValueError, match=message) as error:
        aj.attention(**arguments)
    assert "\n" not in str(error.value)


def test_a_traced_dropout_rate():
    def run(rate):
        return aj.attention(QUERY, KEY, VALUE, dropout_rate=rate, dropout_rng=RNG)

    with pytest.raises(ValueError, match="dropout_rate must be a Python number"):
        jax.jit(run)(0.5)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None])
@pytest.mark.parametrize("name", ["query", "key"])
def test_block_sizes(name, size):
    with pytest.raises(ValueError, match=f"BlockSizes {name} must be .*; got {size!r}"):
        aj.BlockSizes(**{name: size})


def test_attention_weights_checks_too():
    with pytest.raises(ValueError, match=r"key must have batch axes that broadcast to \[2\]"):
        aj.attention_weights(QUERY, jnp.ones((3, S, DK)))
    with pytest.raises(ValueError, match="score must be one of"):
        aj.attention_weights(QUERY, KEY, score="kosine")
