"""The formulas of experiments/scores, against independent numbers and limits."""

import jax
import numpy as np
import pytest

from attention_jax import attention, get_score
from experiments.scores import worked_example
from experiments.torch_random import TorchRandom

# --- worked_example ---


def test_torch_numbers():
    """Compares with PyTorch 2: fewer than 16 numbers, and more, with and without a remainder."""
    np.testing.assert_allclose(
        TorchRandom(0).randn(3), [1.5409961, -0.2934289, -2.1787894], rtol=1e-6
    )
    of_21 = TorchRandom(0).randn(21)[[0, 4, 5, 20]]
    np.testing.assert_allclose(of_21, [-1.1258, 0.8487, -1.5551, 0.6181], atol=6e-5)
    last_row = [0.5616, -0.2481, -1.0800, 0.5916, 0.7242, -0.3492, -0.5290, -0.6895]
    np.testing.assert_allclose(TorchRandom(3).randn(5, 8)[-1], last_row, atol=6e-5)
    # A pair's second number is kept, also from one call to the next.
    one_by_one = TorchRandom(0)
    parts = [one_by_one.randn(1), one_by_one.randn(2)]
    np.testing.assert_array_equal(np.concatenate(parts), TorchRandom(0).randn(3))


def test_steps_of_the_pair_in_numpy():
    random = TorchRandom(11)
    kernel, both, v = (0.3 * random.randn(*shape).astype(float) for shape in ((4, 4), (4, 8), (4,)))
    s, h = np.array(worked_example.QUERY)[0], np.array(worked_example.KEY)[0]
    hidden = np.tanh(both @ np.concatenate([s, h]))
    params = worked_example.source_parameters()
    general = worked_example.steps("general", params["general"])
    additive = worked_example.steps("additive", params["additive"])
    np.testing.assert_allclose(general["step"], s @ kernel, atol=1e-6)
    np.testing.assert_allclose(sum(general["summands"]), s @ kernel @ h, atol=1e-6)
    np.testing.assert_allclose(additive["step"], hidden, atol=1e-6)
    np.testing.assert_allclose(sum(additive["summands"]), v @ hidden, atol=1e-6)


def test_three_tokens_by_hand():
    """E11.1: e^(1/sqrt 2) = 2.0281 and e^(1/(2 sqrt 2)) = 1.4241, so a row sums to 4.4522."""
    weights, output = worked_example.by_hand()
    by_calculator = [[0.4555, 0.2246, 0.3199], [0.2246, 0.4555, 0.3199], [0.3333, 0.3333, 0.3333]]
    np.testing.assert_allclose(weights, by_calculator, atol=6e-5)
    np.testing.assert_allclose(output, [[0.6155, 0.3845], [0.3845, 0.6155], [0.5, 0.5]], atol=6e-5)


def test_general_is_dot_on_projected_keys():
    """Exercise 38.1, on random problems: the keys W h have the same weights with dot."""
    rng = np.random.default_rng(1)
    shapes = ((30, 5, 8), (30, 7, 8), (30, 7, 3), (30, 8, 8))
    query, key, value, kernel = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    kernel /= 8  # logits of standard deviation 1
    general = attention(query, key, value, score="general", params={"kernel": kernel})
    projected = attention(query, key @ kernel.swapaxes(1, 2), value, score="dot")
    np.testing.assert_allclose(general, projected, atol=2e-6)


@pytest.mark.parametrize(("queries", "keys", "dim"), [(5, 7, 3), (32, 1024, 64)])
def test_general_projects_its_queries_once(queries, keys, dim):
    """The traced program takes T D² + T S D multiplications, an addition with each."""
    shapes = (dim, dim), (queries, dim), (keys, dim)
    kernel, query, key = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    program = jax.jit(get_score("general")).lower({"kernel": kernel}, query, key)
    assert program.cost_analysis()["flops"] == 2 * (queries * dim**2 + queries * keys * dim)
