"""The model over a table of configurations: it is its formula, token by token and all at once."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from flax import nnx
from score_cases import slow_unless

from attention_jax.nn import ANY_LENGTH, Model, ModelConfig, bind, initial_params

B, T, S, V = 3, 5, 7, 11
PAD, SOS = 0, 1
LENGTHS = [4, 7, 1]
GAPS = (2, 3, 7, 8, 13, 14, 15, 21, 22, 29, 30, 31, 39)  # position ids, some of them neighbours
BARE = {"encoder_layers": 0, "decoder_self_attention": False}
HEADS = {"num_heads": 4, "num_key_heads": 2, "normalize_qk": True}


def config_of(**settings):
    usual = {
        "score": "additive", "dim": 8, "hidden_dim": 13, "position_limit": 40,
        "max_wavelength": 50.0, "min_wavelength": 0.5, "position_scale": 2.0,
    }  # fmt: skip
    return ModelConfig(**{**usual, **settings})


# The settings, and the position ids that are given. Each value of each setting stands in a case.
CASES = {
    "heads, rotary": ({"norm": "post", "positions": "rotary", "position_anchor": "end",
                       "score": "general", "self_attention_score": None, "activation": "swiglu",
                       "output_gate": True, "normalizer": "log_scaled(start=2)", **HEADS}, GAPS),
    "local-m": ({"attention": "local-m", "radius": 1, **BARE, "tied_embeddings": "all",
                 "mask_padding": False, "positions": "none"}, None),
    "local-p": ({"attention": "local-p", "num_heads": 2, "encoder_layers": 0,
                 "positions": "learned", "position_draw": "subset", "position_anchor": "both",
                 "self_attention_normalizer": "log_scaled(start=2)"}, None),
    "coverage": ({"attention": "coverage", "decoder_layers": 2, "activation": "gelu", **BARE,
                  "remat": True}, None),
    "monotonic": ({"attention": "monotonic", "score": "scaled", "tied_embeddings": "output",
                   **BARE}, GAPS),
    "decoder, rotary": ({"architecture": "decoder", "positions": "rotary", "score": "general",
                         "decoder_layers": 2, "normalizer": "log_scaled(start=3)", **HEADS}, GAPS),
    "heads": ({"norm": "post", "activation": "gelu", **HEADS,
               "self_attention_normalizer": "log_scaled(start=2)"}, GAPS),
    "any length": ({**BARE, **ANY_LENGTH, "position_limit": 64, "score": "scaled",
                    "normalizer": "log_scaled(start=3)", "tied_embeddings": "output"}, None),
    "decoder": ({"architecture": "decoder", "tied_embeddings": "output", "hidden_dim": 0,
                 "mask_padding": False}, None),
    "plain": ({}, None),
    "both ends": ({"score": "dot", "self_attention_score": "additive", "position_anchor": "both",
                   "position_draw": "window", "norm": "post"}, None),
    "modern": ({"num_heads": 2, "dim": 12, "activation": "swiglu", "output_gate": True,
                "positions": "rotary", "score": "cosine", "encoder_layers": 2}, None),
    "local-m, monotonic": ({"attention": "local-m", "alignment": "monotonic", **BARE}, None),
    "decoder, learned": ({"architecture": "decoder", "positions": "learned", "score": "distance",
                          "norm": "post"}, None),
}  # fmt: skip
FAST = [*CASES][:6]  # test_a_decoder_without_a_source has a decoder with sines
every_case = pytest.mark.parametrize("case", slow_unless(FAST, CASES))


def make(config, noise=0.2, seed=1):
    return numpy_model.scrambled(lambda: Model(config, V, rngs=nnx.Rngs(0)), seed, noise)


def tokens(length, seed, size=V):
    return np.random.default_rng(seed).integers(3, size, size=(B, length)).astype(np.int32)


def stepped(model, source, lengths, inputs, ids=None, max_length=T + 1):
    """The logits of all inputs, one token after another."""

    def step(state, tokens):
        logits, state = model.decode_step(state, tokens)
        return state, logits

    state = model.start_decoding(source, lengths, max_length=max_length, position_ids=ids)
    return jnp.swapaxes(jax.lax.scan(step, state, inputs.T)[1], 0, 1)


@functools.cache
def answers(case):
    """Parameters; logits and weights at once, logits by steps; and these with other padding.

    In float64, because some of these models amplify rounding.
    """
    settings, ids = CASES[case]
    model, params = make(config_of(**settings))
    graph = nnx.graphdef(model)

    @jax.jit
    def run(params, source, lengths, inputs, ids):
        model = nnx.merge(graph, params)
        at_once = model(source, lengths, inputs, position_ids=ids, return_weights=True)
        return *at_once, stepped(model, source, lengths, inputs, ids)

    given = None if ids is None else np.array(ids)
    real = np.arange(S)[None, :] < np.array(LENGTHS)[:, None]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = [
            run(params, np.where(real, tokens(S, 4), pad), np.array(LENGTHS), tokens(T, 5), given)
            for pad in (PAD, 9)
        ]
    return model.config, params, *jax.tree.map(np.asarray, found)


@every_case
def test_is_the_formula(case):
    config, params, (logits, weights, _), _ = answers(case)
    assert logits.shape == (B, T, V)
    assert weights.shape == (config.decoder_layers, B, T, S)
    first = config.first_position_id
    ids = CASES[case][1] or range(first, first + S + T)
    source = np.where(np.arange(S) < np.array(LENGTHS)[:, None], tokens(S, 4), PAD)
    for row, length in enumerate(LENGTHS):
        expected_logits, expected_weights = numpy_model.model(
            config, params, source[row], length, tokens(T, 5)[row], ids
        )
        np.testing.assert_allclose(logits[row], expected_logits, atol=1e-5)
        np.testing.assert_allclose(weights[:, row], expected_weights, atol=1e-6)


@every_case
def test_step_by_step_is_all_at_once(case):
    _, _, (logits, _, by_steps), _ = answers(case)
    np.testing.assert_allclose(by_steps, logits, atol=1e-7)
    assert np.min(np.std(logits, axis=1)) > 1e-4  # positions differ


@every_case
def test_padding_is_invisible(case):
    config, _, one, other = answers(case)
    if config.mask_padding:
        chex.assert_trees_all_equal(one, other)
    else:  # rows 0 and 2 have padding, row 1 has none
        changed = np.max(np.abs(one[0] - other[0]), axis=(1, 2))
        assert min(changed[0], changed[2]) > 1e-3 > changed[1]


@every_case
def test_bfloat16_is_float32_up_to_the_rounding_of_tokens(case):
    """Parameters, logits and gradients are float32, and steps are one call."""
    config, params, (logits, _, _), _ = answers(case)
    params = jax.tree.map(np.float32, params)

    @jax.jit
    def run(params, inputs):
        model = bind(dataclasses.replace(config, dtype="bfloat16"), params, V)
        real = np.arange(S)[None, :] < np.array(LENGTHS)[:, None]
        source = np.where(real, tokens(S, 4), PAD), np.array(LENGTHS)
        call, ids = functools.partial(model, *source), CASES[case][1]
        ids = None if ids is None else np.array(ids)
        at_once = call(inputs, position_ids=ids)
        return at_once, stepped(model, *source, inputs, ids), model.features(*source, inputs)

    at_once, by_steps, features = run(params, tokens(T, 5))
    assert (at_once.dtype, features.dtype) == (jnp.float32, jnp.bfloat16)
    for found in (at_once, by_steps):
        assert np.sqrt(np.mean((found - logits) ** 2)) < 0.03 * np.std(logits)
        assert np.max(np.abs(found - logits)) > 1e-4 * np.std(logits)


def test_remat_stores_less_for_the_same_gradient():
    settings = {"architecture": "decoder", "decoder_layers": 2, "dropout_rate": 0.2}
    _, params = make(config_of(**settings))
    params = jax.tree.map(np.float32, params)

    def stored(remat):
        model = functools.partial(bind, config_of(**settings, remat=remat))

        def loss(params):
            logits = model(params, V)(None, None, tokens(T, 5), rng=jax.random.key(0))
            return jnp.sum(jnp.sin(logits))

        loss, pullback = jax.vjp(loss, params)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback)), loss, pullback(loss)

    stored = jax.jit(stored, static_argnums=0)
    (most, *expected), (least, *found) = stored(False), stored(True)
    assert least < 0.7 * most
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_without_a_source():
    """A language model: its first token is the first of the sequence; a vector may be a token."""
    model, params = make(config_of(architecture="decoder", score="general"))
    inputs, nothing = tokens(T, 5), (jnp.zeros((B, 0), int), jnp.zeros(B, int))
    alone, by_steps, vectors = numpy_model.run_jit(
        lambda inputs: (
            model(None, None, inputs), stepped(model, *nothing, inputs, max_length=T - 1),
            model(*nothing, jax.nn.one_hot(inputs, V)),
        ),
        inputs,
    )  # fmt: skip
    np.testing.assert_allclose(vectors, alone, atol=1e-5)
    np.testing.assert_allclose(by_steps[:, :-1], alone[:, :-1], atol=5e-5)
    assert np.all(np.isnan(by_steps[:, -1]))  # beyond `max_length`
    for row in range(B):
        expected, _ = numpy_model.model(
            model.config, params, np.zeros(0, int), 0, inputs[row], range(T)
        )
        np.testing.assert_allclose(alone[row], expected, atol=1e-4)


def test_the_gradient_sees_neither_later_tokens_nor_padding():
    graph, params = nnx.split(make(config_of(architecture="decoder", hidden_dim=0))[0])
    inputs, source = np.array([[SOS, 3, 4, 5, 6]]), np.array([[7, 8, 9, 10]])  # all different

    def mixed(params):
        logits = nnx.merge(graph, params)(source, jnp.array([3]), inputs)
        return jnp.sum(logits[0] * jnp.linspace(-1.0, 1.0, V)[None, :], axis=-1)

    found = numpy_model.run_jit(jax.jacrev(mixed), params)
    table = nnx.to_pure_dict(found)["target_embedding"]["embedding"]  # [T, V, dim]
    touched = np.any(table != 0, axis=-1)
    np.testing.assert_array_equal(touched[:, inputs[0]], np.tri(T, dtype=bool))
    np.testing.assert_array_equal(touched[:, source[0]], [[True] * 3 + [False]] * T)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_an_id_outside_the_vocabulary_makes_its_example_nan(architecture):
    """Where ids are traced; those that are known are refused, see test_wrong_modules.py."""
    model, _ = make(config_of(architecture=architecture))
    inputs, source = tokens(T, 5), tokens(S, 4)
    inputs[0, 2], source[1, 3] = -1, V
    missing = np.isnan(jax.jit(model)(source, jnp.full(B, S), inputs))
    assert missing[0, 2:].all()
    assert missing[1].all()
    assert not missing[2].any()


# --- random position ids ---


def test_source_and_target_share_the_drawn_ids():
    """Letters from the source's end have the ids of the answer's letters: their dot is larger."""
    config = config_of(
        **BARE, score="dot", dim=64, position_draw="subset", position_limit=4096,
        position_anchor="end", position_scale=50.0,
    )  # fmt: skip
    model, _ = make(config, noise=0)
    source, lengths, inputs = tokens(S, 4), jnp.full(B, S), tokens(S, 5)

    def weights(rng):
        return model(source, lengths, inputs, rng=rng, return_weights=True)[1][0]

    found = numpy_model.run_jit(jax.vmap(weights), jax.random.split(jax.random.key(0)))
    right = np.arange(S), np.arange(S)[::-1]  # token i of the answer is the i-th from the end
    assert np.mean(found[:, :, *right]) > 0.9
    assert np.any(found[0] != found[1])


# --- parameters ---

TABLES = ("source_embedding", "target_embedding", "logits")


@pytest.mark.parametrize(("tie", "count"), [("none", 3), ("output", 2), ("all", 1)])
def test_tables_of_each_tie(tie, count):
    config = config_of(tied_embeddings=tie, **BARE)
    params = jax.eval_shape(lambda: initial_params(config, V, jax.random.key(7)))
    assert [name for name in TABLES if name in params] == [*TABLES[:count]]


# --- settings ---


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
@pytest.mark.parametrize("anchor", ["start", "end", "both"])
def test_sizes_that_can_be_encoded(positions, anchor):
    """Each id needs pairs of features: a sine and a cosine, or two features to rotate."""
    if (positions, anchor) == ("rotary", "both"):
        with pytest.raises(ValueError, match="position_anchor must be start or end with rotary"):
            ModelConfig(positions=positions, position_anchor=anchor)
        return
    for dim in (2, 3, 6, 8, 10):
        settings = {"dim": dim, "positions": positions, "position_anchor": anchor}
        if positions == "none" or dim % (4 if anchor == "both" else 2) == 0:
            ModelConfig(**settings)
            continue
        with pytest.raises(ValueError, match=f"{positions} positions anchored at {anchor}; got"):
            ModelConfig(**settings)


def test_scores_and_normalizers_of_self_attention():
    config = ModelConfig(score="dot", normalizer="sigmoid")
    assert (config.self_score, config.self_normalizer) == ("scaled", "softmax")
    assert dataclasses.replace(config, self_attention_score=None).self_score == "dot"
    config = dataclasses.replace(config, architecture="decoder")
    assert (config.self_score, config.self_normalizer) == ("dot", "sigmoid")
    assert ModelConfig(normalizer=None).cross_normalizer == "softmax"
