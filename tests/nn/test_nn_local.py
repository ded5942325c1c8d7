"""The local modules against the functions that they hold parameters for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit

from attention_jax import get_score, padding_mask
from attention_jax.functional.centers import monotonic_centers, predicted_centers
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.nn.local import LocalMAttention, LocalPAttention

B, T, S, DV = 2, 5, 7, 13
LENGTHS = jnp.array([7, 4])
# With and without parameters, with unequal sizes of query and key and with equal ones.
every_score = pytest.mark.parametrize(
    "score",
    [
        "additive",
        "cosine",
        pytest.param("general", marks=pytest.mark.slow),
        pytest.param("scaled", marks=pytest.mark.slow),
    ],
)


def arrays(score):
    """(query, key, value) for one score."""
    query_dim = 11 if get_score(score).needs_equal_dims else 3
    rng = np.random.default_rng(3)
    shapes = ((B, T, query_dim), (B, S, 11), (B, S, DV))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def local_m(score, **options):
    query_dim = arrays(score)[0].shape[-1]
    return LocalMAttention(score, query_dim, 11, **{"radius": 2, **options}, rngs=nnx.Rngs(2))


def local_p(score, **options):
    query_dim = arrays(score)[0].shape[-1]
    return LocalPAttention(score, query_dim, 11, **{"radius": 2, **options}, rngs=nnx.Rngs(2))


def pure_params(module):
    return nnx.to_pure_dict(nnx.state(module))


def seen(weights):
    """The keys of each query, in the first example and the last."""
    return [[np.flatnonzero(row).tolist() for row in weights[b]] for b in (0, -1)]


@every_score
def test_local_m_is_the_function_with_its_parameters(score):
    query, key, value = arrays(score)
    module, mask = local_m(score), padding_mask(LENGTHS)
    bias = jnp.asarray(np.random.default_rng(4).normal(size=(T, S)), jnp.float32)
    arguments = {
        "centers": monotonic_centers(T), "radius": 2, "score": score, "mask": mask, "bias": bias,
        "params": pure_params(module).get("params", {}),
    }  # fmt: skip

    def calls(query, key, value):
        pairs = {"mask": mask, "bias": bias}
        return (
            module(query, key, value, **pairs, return_weights=True),
            local_attention(query, key, value, **arguments),
            local_attention_weights(query, key, **arguments),
            module(query, key, **pairs),
        )

    (output, weights), *expected, of_keys = run_jit(calls, query, key, value)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(weights, expected[1])
    np.testing.assert_allclose(of_keys, weights @ np.asarray(key), atol=1e-5)


@every_score
def test_local_p_is_the_function_with_its_parameters(score):
    query, key, value = arrays(score)
    module, mask = local_p(score, hidden_dim=4), padding_mask(LENGTHS)
    params = pure_params(module)
    assert params["position_kernel"].shape == (query.shape[-1], 4)
    positions = {"kernel": params["position_kernel"], "v": params["position_v"]}

    def calls(query, key, value):
        arguments = {
            "centers": predicted_centers(query, positions, LENGTHS), "radius": 2, "sigma": 1.0,
            "score": score, "params": params.get("params", {}), "mask": mask,
        }  # fmt: skip
        options = {"source_lengths": LENGTHS, "mask": mask, "return_weights": True}
        return (
            module(query, key, value, **options),
            local_attention(query, key, value, **arguments),
            local_attention_weights(query, key, **arguments),
            module(query, key, return_weights=True),
        )

    (output, weights), *expected, (_, without_lengths) = run_jit(calls, query, key, value)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(weights, expected[1])
    # Without lengths every key is real: windows begin near the middle, S / 2.
    weights = without_lengths
    assert np.all(weights[..., 3:5] > 0)
    assert not np.any(weights[..., 0])


def test_alignments_and_parts_of_a_longer_sequence():
    query, key, _ = arrays("additive")
    ahead, back = local_m("additive", radius=1), local_m("additive", radius=0, alignment="reversed")
    own = jnp.array([[0, 1, 2, 3, 9], [6, 5, 4, 3, -9]])

    def calls(query, key, first):
        lengths, asked = {"source_lengths": LENGTHS}, {"return_weights": True}
        weights = {
            "monotonic": ahead(query, key, **asked)[1],
            "reversed": back(query, key, **asked)[1],
            "lengths": back(query, key, **lengths, **asked)[1],
            "two steps": ahead(query[:, 3:], key, first=3, **asked)[1],
            "centers": back(query, key, centers=own, **asked)[1],
        }
        # A step of decoding: its query stands at `first`.
        step = back(query[:, 2:3], key, **lengths, first=first, **asked)
        return weights, step, back(query, key, **lengths)

    weights, (output, weights["step"]), whole = run_jit(calls, query, key, 2)
    found = {name: seen(array) for name, array in weights.items()}
    assert found["monotonic"][0] == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert found["reversed"] == [[[6], [5], [4], [3], [2]]] * 2
    assert found["lengths"] == [[[6], [5], [4], [3], [2]], [[3], [2], [1], [0], []]]
    assert found["step"] == [[[4]], [[1]]]
    np.testing.assert_allclose(output, whole[:, 2:3], atol=1e-6)
    assert found["two steps"][0] == [[2, 3, 4], [3, 4, 5]]
    assert found["centers"] == [[[0], [1], [2], [3], []], [[6], [5], [4], [3], []]]


@pytest.mark.parametrize(
    ("make", "score"), [(local_m, "cosine"), (local_m, "scaled"), (local_p, "additive")]
)
def test_a_memory_is_the_keys_it_was_made_of(make, score):
    query, key, value = arrays(score)
    module = make(score)
    options = {"source_lengths": LENGTHS, "mask": padding_mask(LENGTHS), "return_weights": True}

    def calls(query, key, value):
        memory = module.remember(key, value)
        return (
            (module(query, memory, **options), module(query, key, value, **options)),
            (module(query, memory), module(query, key, value)),
        )

    (got, expected), without_lengths = run_jit(calls, query, key, value)
    for name, found, wanted in zip(("output", "weights"), got, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6, err_msg=name)
    # Nor does it need to be told how long its keys are.
    np.testing.assert_allclose(*without_lengths, atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_gradients_reach_every_parameter(implementation):
    query, key, value = arrays("additive")
    module = local_p("additive", implementation=implementation)
    graph, state = nnx.split(module)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        output = nnx.merge(graph, params)(query, key, value, source_lengths=LENGTHS)
        return jnp.sum(output**2)

    params = nnx.to_pure_dict(state)
    before, gradient = loss(params)
    assert set(gradient) == {"params", "position_kernel", "position_v"}
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)), path
        assert np.count_nonzero(leaf) > leaf.size / 2, path
    # A step against it goes downhill.
    lower = jax.tree.map(
        lambda leaf, slope: np.asarray(leaf) - np.float32(1e-3) * slope, params, gradient
    )
    assert loss(lower)[0] < before


@pytest.mark.parametrize("make", [local_m, local_p])
def test_an_explicit_rng_drops_whatever_the_setting(make):
    module = make("additive", dropout_rate=0.5, deterministic=True)
    plain = make("additive")

    def calls(query, key, value, rng):
        arguments = (query, key, value)
        return module(*arguments), plain(*arguments), module(*arguments, dropout_rng=rng)

    undropped, expected, dropped = run_jit(calls, *arrays("additive"), jax.random.key(0))
    np.testing.assert_array_equal(undropped, expected)
    assert np.any(dropped != undropped)


def test_narrow_inputs_give_narrow_outputs():
    arguments = [np.asarray(x).astype(jnp.bfloat16) for x in arrays("additive")]
    for make in (local_m, local_p):
        module = make("additive")

        def calls(query, key, value, module=module):
            memories = key, module.remember(key, value)
            return [module(query, memory, return_weights=True) for memory in memories]

        for output, weights in jax.eval_shape(calls, *map(jnp.asarray, arguments)):
            assert output.dtype == weights.dtype == jnp.bfloat16


def test_sigma_is_half_the_radius_unless_it_is_given():
    assert local_p("dot", radius=3).sigma == 1.5
    assert local_p("dot", radius=0, sigma=0.75).sigma == 0.75
    assert local_m("dot").sigma is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local_m("dott"), "did you mean 'dot'?"),
        (lambda: local_m("dot", alignment="sideways"), "alignment must be .*; got 'sideways'"),
        (lambda: local_m("dot", dropout_rate=1.5), "dropout_rate"),
        (lambda: local_m("dot", radius=-1), "radius must be at least 0"),
        (lambda: local_p("dot", radius=-1, sigma=1.0), "radius must be at least 0"),
        (lambda: local_p("dot", radius=0), "radius must be at least 1, or sigma given; got radius"),
        (lambda: local_p("dot", sigma=-1.0), "sigma must be greater than 0; got -1.0"),
        (lambda: local_p("dot", hidden_dim=0), "hidden_dim must be at least 1; got 0"),
        (lambda: LocalMAttention("dot", 3, 4, radius=1, rngs=nnx.Rngs(0)), "key_dim must be 3"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
