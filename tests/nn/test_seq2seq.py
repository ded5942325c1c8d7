"""The model against float64 NumPy; what it must not see; dropout; blocks computed twice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import decoder_block, encoder_block, linear, normed, run_jit, scrambled

from attention_jax import Score
from attention_jax.analysis import attention_rollout
from attention_jax.nn import ModelConfig, Seq2Seq

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
SCORES = ("additive", "dot", "general", "scaled")
OWN = "test_seq2seq:Distance"
every_score = pytest.mark.parametrize("score", [*SCORES, OWN])
some_scores = pytest.mark.parametrize(
    "score", ["additive", pytest.param("scaled", marks=pytest.mark.slow), OWN]
)


@dataclasses.dataclass(frozen=True)
class Distance(Score):
    """A user's own: minus the squared distance, weighed by a learned rate."""

    def init(self, rng, query_dim, key_dim):
        return {"rate": jnp.full((), 0.25)}

    def pair(self, params, q_features, k_features):
        difference = q_features[:, None, :] - k_features[None, :, :]
        return -params["rate"] * jnp.sum(difference**2, axis=-1)


def make(score="scaled", **settings):
    config = ModelConfig(score=score, **{"dim": 8, "hidden_dim": 13, **settings})
    options = {"deterministic": True, "keep_rngs": False}
    return scrambled(lambda: Seq2Seq(config, V, **options, rngs=nnx.Rngs(0)))


def sources(seed=4):
    return np.random.default_rng(seed).integers(3, V, size=(B, S)).astype(np.int32)


def targets(seed=5):
    return np.random.default_rng(seed).integers(3, V, size=(B, T)).astype(np.int32)


def numpy_embed(params, tokens):
    table = params["embedding"]
    dim = table.shape[1]
    angles = np.arange(len(tokens))[:, None] / 10_000 ** (2 * np.arange(dim // 2) / dim)
    return table[tokens] * np.sqrt(dim) + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def numpy_seq2seq(config, params, source, length, target_inputs):
    """Logits [T, V], weights [L, T, S] and the encoder's [L, N, S, S] of one example."""
    allowed = np.arange(len(source))[None, :] < (length if config.mask_padding else len(source))
    self_score = config.self_attention_score or config.score
    x, weights, encoder_weights = numpy_embed(params["source_embedding"], source), [], []
    for layer in range(config.encoder_layers):
        block = params["encoder"][layer]
        x, found = encoder_block(self_score, config, block, x, allowed)
        encoder_weights.append(found)
    memory = normed(params["memory_norm"], x)
    x = numpy_embed(params["target_embedding"], target_inputs)
    for layer in range(config.decoder_layers):
        block = params["decoder"][layer]
        x, found = decoder_block(self_score, config.score, config, block, x, memory, allowed)
        weights.append(found)
    logits = linear(params["logits"], normed(params["output_norm"], x))
    return logits, np.stack(weights), encoder_weights


@pytest.mark.parametrize(
    "settings",
    [
        {"score": "additive"},
        {"score": "general", "self_attention_score": None},
        pytest.param({"score": "dot", "self_attention_score": "additive"}, marks=pytest.mark.slow),
        pytest.param(
            {"score": "additive", "encoder_layers": 2, "decoder_layers": 3}, marks=pytest.mark.slow
        ),
        {"encoder_layers": 0, "mask_padding": False},
        {
            "score": "additive",
            "num_heads": 4,
            "num_key_heads": 2,
            "norm": "post",
            "encoder_layers": 2,
        },
        {"num_heads": 2, "activation": "swiglu", "normalize_qk": True, "dim": 12, "hidden_dim": 7},
        {"score": "cosine", "activation": "gelu", "norm": "post"},
    ],
    ids=str,
)
def test_is_the_formula(settings):
    model, params = make(**settings)
    source, lengths, inputs = sources(), jnp.array(LENGTHS), targets()
    logits, weights = run_jit(
        functools.partial(model, return_weights=True), source, lengths, inputs
    )
    assert logits.shape == (B, T, V)
    assert weights.shape == (model.config.decoder_layers, B, T, S)
    np.testing.assert_allclose(np.sum(weights, axis=-1), np.ones(weights.shape[:-1]), atol=1e-6)
    for row in range(B):
        expected = numpy_seq2seq(model.config, params, source[row], LENGTHS[row], inputs[row])
        np.testing.assert_allclose(logits[row], expected[0], atol=3e-5)
        np.testing.assert_allclose(weights[:, row], expected[1], atol=1e-5)


def test_logits_alone_without_return_weights():
    model, _ = make()
    logits, both = run_jit(
        lambda *arguments: (model(*arguments), model(*arguments, return_weights=True)),
        sources(),
        jnp.array(LENGTHS),
        targets(),
    )
    np.testing.assert_allclose(logits, both[0], atol=1e-5)


def test_a_users_own_score_is_the_one_that_attends():
    # At rate 0 all logits are equal, and the weights spread evenly over the real source.
    model, params = make(OWN)
    assert params["decoder"][0]["cross_attention"]["attention"]["params"]["rate"].shape == ()
    lengths = jnp.array(LENGTHS)
    model.decoder[0].cross_attention.attention.params["rate"][...] = jnp.float32(0.0)
    forward = functools.partial(model, return_weights=True)
    _, weights = run_jit(forward, sources(), lengths, targets())
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(weights[0, row, :, :length], 1 / length, atol=1e-6)
        np.testing.assert_array_equal(weights[0, row, :, length:], 0)


def test_where_the_score_under_study_stands():
    def score_params(**settings):
        params = make("additive", **settings)[1]
        block, encoder = params["decoder"][0], params["encoder"][0]
        return tuple(
            bool(part.get("params"))
            for part in (
                block["cross_attention"]["attention"],
                block["self_attention"],
                encoder["self_attention"],
            )
        )

    assert score_params() == (True, False, False)
    assert score_params(self_attention_score=None) == (True, True, True)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@every_score
def test_no_recurrence(score):
    model, _ = make(score)
    names = set(primitives(jax.make_jaxpr(model)(sources(), jnp.array(LENGTHS), targets()).jaxpr))
    assert {"dot_general", "exp"} <= names
    assert not names & {"scan", "while"}


@some_scores
def test_a_target_position_sees_nothing_later(score):
    model, _ = make(score, self_attention_score=None)
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    tokens = np.array([[SOS, 3, 4, 5, 6]])  # all different: a row of the embedding is a position

    def mixed(table):
        params["target_embedding"]["embedding"] = table
        logits = nnx.merge(graph, params)(sources()[:1], jnp.array([4]), tokens)
        return jnp.sum(logits[0] * jnp.linspace(-1.0, 1.0, V)[None, :], axis=-1)

    gradients = jax.jit(jax.jacrev(mixed))(params["target_embedding"]["embedding"])  # [T, V, dim]
    touched = np.any(np.asarray(gradients)[:, tokens[0]] != 0, axis=-1)
    np.testing.assert_array_equal(touched, np.tril(np.ones((T, T), bool)))


@some_scores
def test_padding_is_invisible(score):
    model, _ = make(score, self_attention_score=None)
    graph, state = nnx.split(model)
    real = np.arange(S)[None, :] < np.array(LENGTHS)[:, None]

    def loss(params, source):
        logits = nnx.merge(graph, params)(source, jnp.array(LENGTHS), targets())
        return jnp.sum(logits * jnp.linspace(-1.0, 1.0, V)[None, None, :]), logits

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    results = []
    for junk in (PAD, SOS, 9):
        source = np.where(real, sources(), junk).astype(np.int32)
        results.append(gradient(nnx.to_pure_dict(state), source))
    # Bit by bit the same: every logit, and the gradient of every parameter.
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], result)
    # A wider batch is another program: the same within rounding.
    wider = np.pad(sources(), ((0, 0), (0, 4)), constant_values=8)
    wider_logits = jax.jit(model)(wider, jnp.array(LENGTHS), targets())
    np.testing.assert_allclose(wider_logits, results[0][1], atol=1e-5)


def test_without_mask_padding_padding_is_seen():
    model, _ = make(mask_padding=False)
    real = np.arange(S)[None, :] < np.array(LENGTHS)[:, None]
    forward = jax.jit(model)
    logits = [
        np.asarray(forward(np.where(real, sources(), junk), jnp.array(LENGTHS), targets()))
        for junk in (PAD, 9)
    ]
    changed = np.max(np.abs(logits[0] - logits[1]), axis=(1, 2))
    assert np.all(changed[[0, 2]] > 1e-3)  # rows 0 and 2 have padding, row 1 has none
    np.testing.assert_array_equal(changed[1], 0)


def test_encoder_weights_are_the_formula_and_roll_out():
    model, params = make(num_heads=4, num_key_heads=2, encoder_layers=2)
    source, lengths = sources(), jnp.array(LENGTHS)
    (memory, weights), alone = run_jit(
        lambda *arguments: (
            model.encode(*arguments, return_weights=True),
            model.encode(*arguments),
        ),
        source,
        lengths,
    )
    np.testing.assert_allclose(memory, alone, atol=1e-5)
    assert weights.shape == (2, B, 4, S, S)
    for row, length in enumerate(LENGTHS):
        expected = numpy_seq2seq(model.config, params, source[row], length, targets()[row])[2]
        np.testing.assert_allclose(weights[:, row], expected, atol=1e-5)
    np.testing.assert_allclose(np.sum(weights, axis=-1), np.ones((2, B, 4, S)), atol=1e-6)
    rollout = np.asarray(attention_rollout(weights))
    assert rollout.shape == (B, S, S)
    np.testing.assert_allclose(rollout.sum(-1), np.ones((B, S)), atol=1e-5)
    first, second = np.asarray(weights, np.float64).mean(2) / 2 + np.eye(S) / 2
    np.testing.assert_allclose(rollout, second @ first, atol=1e-5)
    assert np.all(rollout[0, :4, 4:] == 0)  # nothing of the padding


# --- dropout ---


def test_dropout_is_for_training():
    model, _ = make(dropout_rate=0.2)
    plain, _ = make()
    arguments = (sources(), jnp.array(LENGTHS), targets())

    @jax.jit
    def calls(rng):
        return model(*arguments, dropout_rng=rng), model(*arguments), plain(*arguments)

    (first, undropped, without), (second, _, _) = (
        map(np.asarray, calls(jax.random.key(seed))) for seed in (0, 1)
    )
    np.testing.assert_allclose(undropped, without, atol=1e-5)
    for left, right in ((first, second), (first, without), (second, without)):
        assert np.all(np.max(np.abs(left - right), axis=(1, 2)) > 1e-3)


def test_dropout_reaches_embeddings_and_both_halves():
    model, _ = make(dropout_rate=0.5)
    source, lengths, rng = sources(), jnp.array(LENGTHS), jax.random.key(0)

    def calls(rng):
        memories = model.encode(source, lengths, dropout_rng=rng), model.encode(source, lengths)
        arguments = (jnp.ones((B, S, 8)), lengths, targets())
        return memories, (model.decode(*arguments, dropout_rng=rng), model.decode(*arguments))

    for dropped, whole in run_jit(calls, rng):
        assert np.any(np.abs(dropped - whole) > 1e-2)
    # Without blocks, what is dropped of the embeddings is 0.
    model, _ = make(dropout_rate=0.5, encoder_layers=0)
    model.memory_norm = lambda x: x
    embedded, dropped = run_jit(
        lambda rng: (model.encode(source, lengths), model.encode(source, lengths, dropout_rng=rng)),
        rng,
    )
    kept = dropped != 0
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_allclose(dropped[kept], 2 * embedded[kept], atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "adit"}, "did you mean 'additive'"),
        ({"self_attention_score": "skaled"}, "did you mean 'scaled'"),
        (
            {"dim": 7},
            "dim must be a multiple of 2, for sinusoidal positions anchored at start; got 7",
        ),
        ({"dim": 0}, "dim must be at least 1; got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1; got 0"),
        ({"encoder_layers": -1}, "encoder_layers must be at least 0; got -1"),
        ({"decoder_layers": -1}, "decoder_layers must be at least 1; got -1"),
        ({"num_heads": 3}, "dim must be a multiple of 3 heads; got 64"),
        ({"num_heads": 4, "num_key_heads": 3}, "num_key_heads must divide 4 heads; got 3"),
        ({"attention": "locally"}, "attention must be one of global, local-m, .*; got 'locally'"),
        ({"alignment": "none"}, "alignment must be one of monotonic, reversed; got 'none'"),
        ({"radius": -1}, "radius must be at least 0; got -1"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, swiglu; got 'tanh'"),
        ({"dropout_rate": -0.1}, "dropout_rate must be a Python number in"),
        ({"dim": None}, "dim must be an integer; got None"),
        ({"hidden_dim": 2.5}, "hidden_dim must be an integer; got 2.5"),
        ({"num_heads": "2"}, "num_heads must be an integer; got '2'"),
        ({"radius": 1.5}, "radius must be an integer; got 1.5"),
        ({"encoder_layers": 1.5}, "encoder_layers must be an integer; got 1.5"),
        ({"decoder_layers": True}, "decoder_layers must be an integer; got True"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)


def test_no_examples():
    model, _ = make()
    none = jnp.zeros((0, S), int), jnp.zeros(0, int), jnp.zeros((0, T), int)
    assert jax.jit(model)(*none).shape == (0, T, V)
