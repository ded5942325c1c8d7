"""The model against numpy by hand; what it must not see; greedy decoding against a naive loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_transformer import (
    SCORES,
    numpy_decoder_block,
    numpy_encoder_block,
    numpy_norm,
    scrambled,
)

from attention_jax import Score
from attention_jax.nn import Seq2Seq, Seq2SeqConfig

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
OWN = "test_seq2seq:Distance"
every_score = pytest.mark.parametrize("score", [*SCORES, OWN])


@dataclasses.dataclass(frozen=True)
class Distance(Score):
    """A user's own: minus the squared distance, weighed by a learned rate."""

    def init(self, rng, query_dim, key_dim):
        return {"rate": jnp.full((), 0.25)}

    def pair(self, params, q_features, k_features):
        difference = q_features[:, None, :] - k_features[None, :, :]
        return -params["rate"] * jnp.sum(difference**2, axis=-1)


def make(score="scaled", **settings):
    config = Seq2SeqConfig(score=score, dim=8, hidden_dim=13, **settings)
    return scrambled(Seq2Seq(config, V, rngs=nnx.Rngs(0)))


def sources(seed=4):
    return np.random.default_rng(seed).integers(3, V, size=(B, S)).astype(np.int32)


def targets(seed=5):
    return np.random.default_rng(seed).integers(3, V, size=(B, T)).astype(np.int32)


def numpy_embed(table, tokens):
    dim = table.shape[1]
    angles = np.arange(len(tokens))[:, None] / 10_000 ** (2 * np.arange(dim // 2) / dim)
    return table[tokens] * np.sqrt(dim) + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def numpy_model(config, params, source, length, target_inputs):
    """Logits [T, V] and weights [L, T, S] of one example, in float64."""
    allowed = np.arange(len(source))[None, :] < (length if config.mask_padding else len(source))
    causal = np.tril(np.ones((len(target_inputs), len(target_inputs)), bool))
    self_score = config.self_attention_score or config.score
    x = numpy_embed(params["source_embedding"]["embedding"], source)
    for layer in range(config.encoder_layers):
        x = numpy_encoder_block(self_score, params["encoder"][layer], x, allowed)
    memory = numpy_norm(params["memory_norm"], x)
    x = numpy_embed(params["target_embedding"]["embedding"], target_inputs)
    weights = []
    for layer in range(config.decoder_layers):
        block = params["decoder"][layer]
        x, layer_weights = numpy_decoder_block(
            self_score, config.score, block, x, memory, causal, allowed
        )
        weights.append(layer_weights)
    logits = numpy_norm(params["output_norm"], x) @ params["logits"]["kernel"]
    return logits + params["logits"]["bias"], np.stack(weights)


@pytest.mark.parametrize(
    "settings",
    [
        *({"score": score} for score in SCORES),
        *({"score": score, "self_attention_score": None} for score in ("additive", "general")),
        {"score": "dot", "self_attention_score": "additive"},
        {"score": "additive", "encoder_layers": 2, "decoder_layers": 3},
        {"mask_padding": False},
    ],
    ids=str,
)
def test_is_the_formula(settings):
    model, params = make(**settings)
    source, lengths, inputs = sources(), jnp.array(LENGTHS), targets()
    logits, weights = jax.jit(functools.partial(model, return_weights=True))(
        source, lengths, inputs
    )
    assert logits.shape == (B, T, V)
    assert weights.shape == (model.config.decoder_layers, B, T, S)
    np.testing.assert_allclose(np.sum(weights, axis=-1), np.ones(weights.shape[:-1]), atol=1e-6)
    for row in range(B):
        expected = numpy_model(model.config, params, source[row], LENGTHS[row], inputs[row])
        np.testing.assert_allclose(logits[row], expected[0], atol=3e-5)
        np.testing.assert_allclose(weights[:, row], expected[1], atol=1e-5)


def test_logits_alone_without_return_weights():
    model, _ = make()
    logits = jax.jit(model)(sources(), jnp.array(LENGTHS), targets())
    both = jax.jit(functools.partial(model, return_weights=True))(
        sources(), jnp.array(LENGTHS), targets()
    )
    np.testing.assert_allclose(logits, both[0], atol=1e-5)


def test_a_users_own_score_is_the_one_that_attends():
    # At rate 0 all logits are equal, and the weights spread evenly over the real source.
    model, params = make(OWN)
    assert params["decoder"][0]["cross_attention"]["params"]["rate"].shape == ()
    lengths = jnp.array(LENGTHS)
    model.decoder[0].cross_attention.params["rate"][...] = jnp.float32(0.0)
    forward = jax.jit(functools.partial(model, return_weights=True))
    _, weights = forward(sources(), lengths, targets())
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(weights[0, row, :, :length], 1 / length, atol=1e-6)
        np.testing.assert_array_equal(weights[0, row, :, length:], 0)


def test_where_the_score_under_study_stands():
    def score_params(**settings):
        params = make("additive", **settings)[1]
        return tuple(
            bool(block.get("params"))
            for block in (
                params["decoder"][0].get("cross_attention", {}),
                params["decoder"][0]["self_attention"].get("attention", {}),
                params["encoder"][0]["self_attention"].get("attention", {}),
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


@every_score
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


@every_score
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


# --- greedy decoding ---


def naive_decode(forward, source, length, max_length):
    """One row, one token at a time, in Python; (tokens, weights [L, max_length, S])."""
    tokens = []
    for step in range(max_length):
        # What stands after the prefix must not matter: not PAD, to make sure.
        inputs = np.array([[SOS, *tokens] + [9] * (max_length - 1 - step)], np.int32)
        logits, weights = forward(source[None], jnp.array([length]), inputs)
        tokens.append(int(np.argmax(logits[0, step])))
        if tokens[-1] == EOS:
            break
    return tokens, np.asarray(weights)[:, 0, : len(tokens)]


# The first model never says EOS and repeats itself little; the second says EOS in some rows.
@pytest.mark.parametrize(("seed", "lengths"), [(1, {T}), (7, {2, T})])
def test_greedy_decode_is_the_naive_loop_for_unequal_lengths(seed, lengths):
    config = Seq2SeqConfig(score="additive", dim=8, hidden_dim=13, decoder_layers=2)
    model, _ = scrambled(Seq2Seq(config, V, rngs=nnx.Rngs(0)), seed=seed, noise=1.0)
    decode = functools.partial(model.greedy_decode, max_length=T, sos=SOS, eos=EOS, pad=PAD)
    decoded = jax.jit(decode)(sources(), jnp.array(LENGTHS))
    assert decoded.tokens.shape == (B, T)
    assert decoded.tokens.dtype == jnp.int32
    assert decoded.weights.shape == (2, B, T, S)
    np.testing.assert_allclose(np.sum(decoded.weights, -1), np.ones((2, B, T)), atol=1e-6)
    forward = jax.jit(functools.partial(model, return_weights=True))
    found = set()
    for row in range(B):
        tokens, weights = naive_decode(forward, sources()[row], LENGTHS[row], T)
        np.testing.assert_array_equal(decoded.tokens[row], tokens + [PAD] * (T - len(tokens)))
        np.testing.assert_allclose(decoded.weights[:, row, : len(tokens)], weights, atol=1e-5)
        found.add(len(tokens))
    assert found == lengths


def test_greedy_decode_when_all_stop_at_once():
    model, _ = make()
    model.logits.bias[...] = model.logits.bias[...].at[EOS].add(100.0)
    decoded = model.greedy_decode(
        sources(), jnp.array(LENGTHS), max_length=T, sos=SOS, eos=EOS, pad=PAD
    )
    np.testing.assert_array_equal(decoded.tokens, [[EOS, PAD, PAD, PAD, PAD]] * B)


def test_greedy_decode_stops_at_max_length():
    model, _ = make()
    model.logits.bias[...] = model.logits.bias[...].at[7].add(100.0)
    decoded = model.greedy_decode(
        sources(), jnp.array(LENGTHS), max_length=3, sos=SOS, eos=EOS, pad=PAD
    )
    np.testing.assert_array_equal(decoded.tokens, [[7, 7, 7]] * B)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "adit"}, "did you mean 'additive'"),
        ({"self_attention_score": "skaled"}, "did you mean 'scaled'"),
        ({"dim": 7}, "dim must be even; got 7"),
        ({"dim": 0}, "dim must be at least 1; got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1; got 0"),
        ({"encoder_layers": 0}, "encoder_layers must be at least 1; got 0"),
        ({"decoder_layers": -1}, "decoder_layers must be at least 1; got -1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Seq2SeqConfig(**settings)
