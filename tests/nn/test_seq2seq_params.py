"""Parameters as a pure dict; tables that embeddings and the output layer share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax.nn import ModelConfig, Seq2Seq
from attention_jax.nn.seq2seq_params import bind, initial_params, output_layer
from attention_jax.runs.checkpoints import Checkpoints

B, T, S, DIM = 3, 5, 7, 8
V, SOURCE_V = 11, 13
LENGTHS = [4, 7, 1]
TIES = ("none", "output", "all")
every_tie = pytest.mark.parametrize("tie", TIES)


def config(tie):
    return ModelConfig(
        score="dot",
        dim=DIM,
        hidden_dim=3,
        encoder_layers=0,
        tied_embeddings=tie,
    )


def shapes(tie, source_size=None):
    make = functools.partial(initial_params, config(tie), V, source_vocabulary_size=source_size)
    return jax.eval_shape(make, jax.random.key(0))


def new_params(tie, seed=0, source_size=None):
    """With no parameter at 0 or 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.25 + 0.5 * rng.normal(size=leaf.shape), leaf.dtype),
        shapes(tie, source_size),
    )


def data(source_size=V):
    rng = np.random.default_rng(4)
    source = rng.integers(3, source_size, size=(B, S)).astype(np.int32)
    inputs = rng.integers(1, V, size=(B, T)).astype(np.int32)
    return source, np.array(LENGTHS), inputs


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def untied(params):
    """The parameters of a model with a table for each use, all of which are equal."""
    target = params.get("target_embedding", params["source_embedding"])
    kernel = jnp.asarray(target["embedding"]).T
    logits = {"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])}
    return {**params, "target_embedding": target, "logits": logits}


# --- which parameters there are ---


@pytest.mark.parametrize(
    ("tie", "source_size", "expected"),
    [
        (
            "none",
            SOURCE_V,
            {
                "source_embedding": {"embedding": (SOURCE_V, DIM)},
                "target_embedding": {"embedding": (V, DIM)},
                "logits": {"kernel": (DIM, V), "bias": (V,)},
            },
        ),
        (
            "output",
            SOURCE_V,
            {
                "source_embedding": {"embedding": (SOURCE_V, DIM)},
                "target_embedding": {"embedding": (V, DIM)},
            },
        ),
        ("all", None, {"source_embedding": {"embedding": (V, DIM)}}),
        ("all", V, {"source_embedding": {"embedding": (V, DIM)}}),
    ],
)
def test_tables(tie, source_size, expected):
    params = shapes(tie, source_size)
    names = ("source_embedding", "target_embedding", "logits")
    tables = {name: params[name] for name in names if name in params}
    assert jax.tree.map(lambda leaf: leaf.shape, tables) == expected
    rest = {name: params[name] for name in params.keys() - tables.keys()}
    assert not any({V, SOURCE_V} & {*leaf.shape} for leaf in jax.tree.leaves(rest))


@every_tie
def test_initial_params_are_those_of_a_new_model(tie):
    rng = jax.random.key(7)
    params = initial_params(config(tie), V, rng)
    model = Seq2Seq(config(tie), V, rngs=nnx.Rngs(params=rng))
    assert_same_bits(params, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    other = initial_params(config(tie), V, jax.random.key(8))
    table = params["source_embedding"]["embedding"]
    assert np.all(table != other["source_embedding"]["embedding"])
    assert 0.5 < np.std(table) * DIM**0.5 < 1.5  # of variance 1 / dim


@every_tie
def test_bound_parameters_are_the_models(tie):
    params = new_params(tie)
    model = bind(config(tie), params, V)
    assert_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)
    assert (model.target_embedding is model.source_embedding) == (tie == "all")
    other = bind(config(tie), new_params(tie, seed=1), V)  # nothing of the first is remembered
    assert_same_bits(nnx.to_pure_dict(nnx.state(other, nnx.Param)), new_params(tie, seed=1))
    assert_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)


# --- what they are used for ---


@functools.partial(jax.jit, static_argnums=0)
def derivative(tie, params):
    """Of some loss of the logits, in the parameters; and logits and features."""

    def loss(params):
        model = bind(config(tie), params, V)
        logits = model(*data())
        return jnp.sum(jnp.sin(logits)), (logits, model.features(*data()))

    return jax.grad(loss, has_aux=True)(params)


@every_tie
def test_logits_are_features_through_the_output_layer(tie):
    params = new_params(tie)
    model = bind(config(tie), params, V)
    kernel, bias = output_layer(model)
    if tie == "none":
        np.testing.assert_array_equal(kernel, params["logits"]["kernel"])
        np.testing.assert_array_equal(bias, params["logits"]["bias"])
    else:
        table = params["target_embedding" if tie == "output" else "source_embedding"]["embedding"]
        np.testing.assert_array_equal(kernel, np.asarray(table).T)
        assert bias is None

    _, (logits, features) = derivative(tie, params)
    assert features.shape == (B, T, DIM)
    expected = np.asarray(features, np.float64) @ np.asarray(kernel, np.float64)
    expected += 0 if bias is None else np.asarray(bias, np.float64)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("tie", ["output", "all"])
def test_tied_is_untied_with_equal_tables(tie):
    """The same logits; the gradient of a table is the sum of those of its uses."""
    params = new_params(tie)
    got, (logits, _) = derivative(tie, params)
    parts, (expected, _) = derivative("none", untied(params))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    uses = {
        "source_embedding": parts["source_embedding"]["embedding"],
        "target_embedding": parts["target_embedding"]["embedding"],
        "output layer": parts["logits"]["kernel"].T,
    }
    uses = {name: np.asarray(x, np.float64) for name, x in uses.items()}
    assert all(np.max(np.abs(x)) > 0.1 for x in uses.values())
    table = got["source_embedding" if tie == "all" else "target_embedding"]["embedding"]
    shared = list(uses) if tie == "all" else ["target_embedding", "output layer"]
    np.testing.assert_allclose(table, sum(uses[name] for name in shared), atol=1e-4)
    for name in got.keys() - {"target_embedding", "source_embedding"}:
        for one, other in zip(*(jax.tree.leaves(x[name]) for x in (got, parts)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    if tie == "output":
        np.testing.assert_allclose(
            got["source_embedding"]["embedding"], uses["source_embedding"], atol=1e-4
        )


@pytest.mark.parametrize("tie", [pytest.param("output", marks=pytest.mark.slow), "all"])
def test_steps_are_teacher_forcing(tie):
    model = bind(config(tie), new_params(tie), V)

    @jax.jit
    def both(source, lengths, inputs):
        def step(state, tokens):
            logits, state = model.decode_step(state, tokens)
            return state, logits

        state = model.start_decoding(source, lengths, max_length=T)
        _, logits = jax.lax.scan(step, state, inputs.T)
        memory = model.encode(source, lengths)
        decoded = model.decode(memory, lengths, inputs)
        return model(source, lengths, inputs), decoded, jnp.swapaxes(logits, 0, 1)

    forced, decoded, stepped = both(*data())
    np.testing.assert_allclose(decoded, forced, atol=2e-5)
    np.testing.assert_allclose(stepped, forced, atol=2e-5)
    assert np.min(np.std(np.asarray(forced), axis=1)) > 1e-4


@pytest.mark.parametrize("tie", [pytest.param("none", marks=pytest.mark.slow), "output"])
def test_two_vocabularies(tie):
    params = new_params(tie, source_size=SOURCE_V)
    source, lengths, inputs = data(SOURCE_V)
    source[0, 0] = SOURCE_V - 1  # no id of the target's

    def loss(params):
        logits = bind(config(tie), params, V, SOURCE_V)(source, lengths, inputs)
        return jnp.sum(jnp.sin(logits)), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert logits.shape == (B, T, V)
    touched = np.any(np.asarray(gradient["source_embedding"]["embedding"]) != 0, axis=1)
    real = np.arange(S)[None, :] < lengths[:, None]
    np.testing.assert_array_equal(np.flatnonzero(touched), np.unique(source[real]))
    # A token with the same number in both vocabularies is another one.
    read = np.any(np.asarray(gradient["target_embedding"]["embedding"]) != 0, axis=1)
    seen = np.arange(V) if tie == "output" else np.unique(inputs)
    np.testing.assert_array_equal(np.flatnonzero(read), seen)


# --- in a checkpoint ---


@pytest.mark.parametrize(
    "tie", [*(pytest.param(tie, marks=pytest.mark.slow) for tie in ("none", "output")), "all"]
)
def test_a_checkpoint_and_back(tmp_path, tie):
    params = new_params(tie)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, params)
        checkpoints.wait()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        restored = checkpoints.restore(shapes(tie))
        assert restored.step == 3
        assert_same_bits(restored.state, params)
        for other in set(TIES) - {tie}:
            with pytest.raises(ValueError, match=r"of another configuration: .*(embedding|logits)"):
                checkpoints.restore(shapes(other))


# --- errors ---


@pytest.mark.parametrize(
    "make",
    [
        lambda tied: Seq2Seq(tied, V, source_vocabulary_size=SOURCE_V, rngs=nnx.Rngs(0)),
        lambda tied: initial_params(tied, V, jax.random.key(0), SOURCE_V),
        lambda tied: bind(tied, {}, V, SOURCE_V),
    ],
    ids=["module", "initial_params", "bind"],
)
def test_two_vocabularies_cannot_share_a_table(make):
    expected = (
        "source_vocabulary_size must be 11, that of the target, where all embeddings are tied;"
        " got 13"
    )
    with pytest.raises(ValueError, match=f"^{expected}"):
        make(config("all"))


def test_no_such_tie():
    with pytest.raises(
        ValueError, match="tied_embeddings must be one of none, output, all; got 'both'"
    ):
        config("both")
