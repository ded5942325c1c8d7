"""What README shows runs, and says what the code does."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax

README = Path(__file__).parent.parent / "README.md"
CODE = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
(MY_SCORES,) = (code for code in CODE if code.startswith("# my_scores.py"))
EXAMPLES = [code for code in CODE if code is not MY_SCORES]  # each goes on where the last ended


def test_examples_run_one_after_another():
    namespace: dict = {}
    exec(EXAMPLES[0], namespace)
    gradient = namespace["gradient"]
    assert {name: leaf.shape for name, leaf in gradient.items()} == {
        "query_kernel": (16, 16),
        "key_kernel": (16, 16),
        "v": (16,),
    }
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in gradient.values())
    exec(EXAMPLES[1], namespace)
    assert float(namespace["length"](jnp.array([3.0, 4.0]))) == 5
    exec(EXAMPLES[2], namespace)
    assert namespace["output"].shape == (16384, 16)
    assert 0 < float(namespace["statistics"].entropy[-1]) < np.log(16384)
    exec(EXAMPLES[3], namespace)  # compares the cached decoding with the full pass by itself
    assert namespace["full"].shape == (2, 5, 16)
    assert namespace["windowed"].shape == (2, 5, 16)
    exec(EXAMPLES[4], namespace)
    seen = namespace["seen"]
    assert [array.shape for array in seen] == [(2, 5, 16), (2, 5, 7), (2, 7), (2, 5)]
    assert namespace["found"].tokens[0, 0].tolist() == [1, 2, 2, 2]
    np.testing.assert_allclose(namespace["rollout"].sum(-1), np.ones((2, 7)), atol=1e-6)
    exec(EXAMPLES[5], namespace)
    assert abs(float(namespace["drate"])) > 1e-3
    exec(EXAMPLES[6], namespace)
    assert namespace["output"].shape == (2, 7, 64)
    exec(EXAMPLES[7], namespace)
    blocks = ("encoder_0/self", "decoder_0/self", "decoder_0/cross")
    names = [f"{block}_attention" for block in blocks]
    assert list(namespace["seen"].attentions) == names
    assert namespace["seen"].attentions[names[2]].weights.shape == (2, 4, 8, 7)
    assert namespace["found"].gradients[names[0]].dlogits.shape == (2, 4, 7, 7)
    assert 0 < float(namespace["statistics"][f"{names[2]}/jacobian_norm"]) <= 0.5
    assert float(namespace["edges"](namespace["weights_and_biases"]).largest) > 0
    exec(EXAMPLES[8], namespace)
    tokens, params = namespace["tokens"], namespace["ring_params"]
    mask = attention_jax.causal_mask()
    whole = attention_jax.attention(
        tokens, tokens, tokens, score="additive", params=params, mask=mask
    )
    np.testing.assert_allclose(namespace["ring_output"], whole, atol=1e-5)
    assert len(EXAMPLES) == 9


def test_users_own_score_attends_by_distance():
    namespace: dict = {}
    exec(MY_SCORES, namespace)
    score = namespace["Distance"]()
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(5, 3)), rng.normal(size=(7, 3))
    params = score.init(jax.random.key(0), 3, 3)
    weights = attention_jax.attention_weights(query, key, score=score, params=params)
    sharpness = np.exp(float(params["sharpness"]))
    expected = np.empty((5, 7))
    for i in range(5):
        exponentials = [np.exp(-sharpness * np.sum((query[i] - key[j]) ** 2)) for j in range(7)]
        expected[i] = np.array(exponentials) / sum(exponentials)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_users_own_score_starts_with_logits_near_unit_deviation():
    namespace: dict = {}
    exec(MY_SCORES, namespace)
    score = namespace["Distance"]()
    query, key = (jax.random.normal(jax.random.key(i), (500, 64)) for i in range(2))
    logits = score(score.init(jax.random.key(2), 64, 64), query, key)
    assert 0.8 < float(logits.std()) < 1.25


def test_every_file_it_names_exists():
    root = README.parent
    names = re.findall(
        r"`((?:attention_jax|experiments|scripts|tests)/[\w./]*)`", README.read_text()
    )
    assert names
    assert [name for name in names if not (root / name).exists()] == []
