"""When modules drop, and with which keys: the manners of Flax's own layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import define_prng_impl
from numpy_model import normal, scrambled
from quick_compilation import quick_jit

from attention_jax.analysis import capture
from attention_jax.nn import (
    Attention,
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    LocalMAttention,
    LocalPAttention,
    ModelConfig,
    MultiHeadAttention,
    Seq2Seq,
)
from attention_jax.pairwise.dropout import drop_features

B, T, S, D, V = 2, 5, 7, 12, 11
BLOCK = ModelConfig(dim=D, hidden_dim=13, dropout_rate=0.5)
RATE = {"dropout_rate": 0.5}
MODEL = ModelConfig(score="dot", dim=D, hidden_dim=7, decoder_self_attention=False, **RATE)


def token_ids(length):
    return jnp.asarray(np.random.default_rng(length).integers(3, V, (B, length)))


QUERY, MEMORY = normal(B, T, D), normal(B, S, D, seed=3)
SENTENCES = (token_ids(S), jnp.array([4, 7]), token_ids(T))
# name: (how the module is made, the arguments of a call)
MODULES = {
    "attention": (functools.partial(Attention, "scaled", D, D, **RATE), (QUERY, MEMORY)),
    "multi-head": (
        functools.partial(MultiHeadAttention, "scaled", D, num_heads=2, **RATE),
        (QUERY,),
    ),
    "local-m": (functools.partial(LocalMAttention, "dot", D, D, radius=2, **RATE), (QUERY, MEMORY)),
    "local-p": (functools.partial(LocalPAttention, "dot", D, D, radius=2, **RATE), (QUERY, MEMORY)),
    "cross": (
        functools.partial(CrossAttention, "dot", D, D, ModelConfig(), **RATE),
        (QUERY, MEMORY),
    ),
    "encoder": (functools.partial(EncoderBlock, "scaled", BLOCK), (QUERY,)),
    "decoder": (functools.partial(DecoderBlock, "scaled", "dot", BLOCK), (QUERY, MEMORY)),
    "seq2seq": (functools.partial(Seq2Seq, MODEL, V), SENTENCES),
}
every_module = pytest.mark.parametrize("name", MODULES)


def first(found):
    return np.asarray(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "seq2seq")) for name in MODULES],
)
def test_as_flaxs_layers(name):
    make, arguments = MODULES[name]
    module, plain = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0), keep_rngs=False)
    params, own = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (module, plain))
    jax.tree.map(np.testing.assert_array_equal, params, own)  # the stream changes none of them
    # Without it the state is the parameters, as training and checkpoints want it.
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(plain))) == jax.tree.structure(own)
    streams = [path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.RngKey))]
    assert streams == [("rngs", "key")]  # one stream, which the module hands on

    # It drops nothing in silence: who asks for dropout says when.
    with pytest.raises(ValueError, match="deterministic must be given where dropout_rate"):
        module(*arguments)

    @jax.jit
    def calls(params, rest):
        graph = nnx.graphdef(module)

        def call(train, times=1, **options):
            model = nnx.merge(graph, params, rest, copy=True)
            if train is not None:
                (model.train if train else model.eval)()
            found = [first_array(model(*arguments, **options)) for _ in range(times)]
            return found, model.rngs.count[...]

        rng = jax.random.key(3)
        return {
            "train": call(True, times=2),
            "eval": call(False),
            "false at the call": call(False, times=2, deterministic=False),
            "true at the call": call(True, deterministic=True),
            "rng": call(False, times=2, dropout_rng=rng),
            "rng, unset": call(None, dropout_rng=rng),
            "rng, but true": call(None, dropout_rng=rng, deterministic=True),
        }

    def first_array(found):
        return found[0] if isinstance(found, tuple) else found

    found = jax.tree.map(np.asarray, calls(*nnx.state(module, nnx.Param, ...)))
    without = found["eval"][0][0]
    for case, count in (("train", 2), ("false at the call", 2), ("rng", 0)):
        (one, other), last = found[case]
        assert np.max(np.abs(one - without)) > 1e-2, case
        assert int(last) == count, case
        same = np.array_equal(one, other)  # a stream's calls differ, those with one key do not
        assert same == (count == 0), case
    for case in ("eval", "true at the call", "rng, but true"):
        for one in found[case][0]:
            np.testing.assert_array_equal(one, without, err_msg=case)
    np.testing.assert_array_equal(found["rng"][0][0], found["rng, unset"][0][0])
    plain.train()
    with pytest.raises(ValueError, match="dropout_rng must be given"):
        plain(*arguments)


def test_the_share_that_is_dropped():
    """With the unit vectors as values, the output is the weights that dropout left."""
    module = Attention("scaled", D, D, dropout_rate=0.9, rngs=nnx.Rngs(0))
    tokens = normal(1, 300, D) / 100
    module.train()
    left = np.asarray(module(tokens, tokens, np.eye(300, dtype=np.float32)[None]))
    kept = left != 0
    assert abs(kept.mean() - 0.1) < 0.01
    np.testing.assert_allclose(left[kept], 10 / 300, rtol=0.02)


def test_which_streams_there_must_be():
    make = functools.partial(Attention, "dot", D, D, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"rngs must have a stream 'dropout'.*got \['params'\]"):
        make(rngs=nnx.Rngs(params=0))
    assert make(rngs=nnx.Rngs(params=0), keep_rngs=False).rngs is None
    assert Attention("dot", D, D, rngs=nnx.Rngs(params=0)).rngs is None  # no dropout, no stream
    one, other = (make(rngs=nnx.Rngs(params=0, dropout=seed)) for seed in (0, 1))
    assert np.any(one.rngs.key[...] != other.rngs.key[...])


def test_views_and_captures():
    module = MODULES["multi-head"][0](rngs=nnx.Rngs(0))
    view = nnx.view(module, deterministic=True)
    without = np.asarray(view(QUERY))
    np.testing.assert_array_equal(view(QUERY), without)
    module.train()
    captured = capture(module, QUERY)
    assert int(module.rngs.count[...]) == 0  # what is looked at is a copy
    np.testing.assert_allclose(captured.output, module(QUERY), atol=1e-6)
    assert np.any(np.abs(captured.output - without) > 1e-3)


def recording_key(seed, record):
    """A PRNG key whose descendants call `record` with their data whenever one draws bits."""
    data, key_of = jax.random.key_data, jax.random.wrap_key_data

    def random_bits(key, width, shape):
        jax.debug.callback(lambda key: record(tuple(key.tolist())), key)
        return jax.random.bits(key_of(key), shape, f"uint{width}")

    implementation = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: data(jax.random.key(seed)),
        split=lambda key, shape: data(jax.random.split(key_of(key), shape)),
        fold_in=lambda key, number: data(jax.random.fold_in(key_of(key), number)),
        random_bits=random_bits,
        name="recording",
    )
    return jax.random.key(seed, impl=implementation)


def test_every_dropout_of_a_model_has_a_key_of_its_own():
    config = dataclasses.replace(MODEL, encoder_layers=2, decoder_layers=2)
    config = dataclasses.replace(config, dim=4, decoder_self_attention=True)
    model = nnx.eval_shape(lambda: Seq2Seq(config, V, rngs=nnx.Rngs(0), keep_rngs=False))
    nnx.update(model, jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), nnx.state(model)))
    one_sentence, drawn = (np.array([[4, 3, 5]]), np.array([3]), np.array([[1, 6]])), []
    call = quick_jit(lambda rng: model(*one_sentence, dropout_rng=rng))
    call(recording_key(0, drawn.append))
    jax.effects_barrier()
    # Embeddings; the weights and the output of each attention; each feed-forward layer.
    assert len(drawn) == (1 + 2 * (2 + 1)) + (1 + 2 * (2 + 2 + 1))
    assert len({*drawn}) == len(drawn)


def test_seeds_side_by_side():
    """`jax.vmap` over parameters and streams is a loop over modules."""
    make = MODULES["multi-head"][0]
    modules = [make(rngs=nnx.Rngs(seed), deterministic=False) for seed in range(3)]
    graph, params, rest = nnx.split(modules[0], nnx.Param, ...)
    states = [nnx.state(module, nnx.Param, ...) for module in modules]
    params, rest = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def run(params, rest):
        module = nnx.merge(graph, params, rest)
        outputs = module(QUERY), module(QUERY)
        return outputs, nnx.state(module, nnx.RngCount)

    outputs, counts = jax.jit(jax.vmap(run))(params, rest)
    np.testing.assert_array_equal(jax.tree.leaves(counts)[0], [2, 2, 2])
    for index, module in enumerate(modules):
        for call in range(2):
            np.testing.assert_allclose(outputs[call][index], module(QUERY), atol=1e-5)


@pytest.mark.parametrize("settings", [{"attention": "monotonic"}, {"position_draw": "subset"}])
def test_randomness_besides_dropout_is_not_left_out_in_silence(settings):
    config = ModelConfig(dim=8, hidden_dim=7, **settings)
    model, _ = scrambled(lambda: Seq2Seq(config, V, rngs=nnx.Rngs(0)))
    model.train()
    with pytest.raises(ValueError, match="dropout_rng must be given where deterministic is False"):
        jax.eval_shape(lambda: model(*SENTENCES))
    model.eval()
    assert jax.eval_shape(lambda: model(*SENTENCES)).shape == (B, T, V)


def test_decoding_is_evaluation():
    """The stream of a model in training changes nothing, and stays as it is."""
    models = [
        MODULES["seq2seq"][0](rngs=nnx.Rngs(params=0, dropout=seed), deterministic=False)
        for seed in (1, 2)
    ]
    graph = nnx.graphdef(models[0])

    @jax.jit
    def greedy(state):
        model = nnx.merge(graph, state)
        ends = {"max_length": 3, "sos": 1, "eos": 2, "pad": 0}
        decoded = model.greedy_decode(*SENTENCES[:2], **ends, return_weights=True)
        return decoded, nnx.state(model, nnx.RngCount)

    (one, count), (other, _) = (greedy(nnx.state(model)) for model in models)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert [int(number) for number in jax.tree.leaves(count)] == [0]


@pytest.mark.parametrize(("features", "weights"), [(0.5, 0.0), (0.0, 0.5), (0.5, None)])
def test_weights_may_have_a_rate_of_their_own(features, weights):
    config = dataclasses.replace(BLOCK, dropout_rate=features, attention_dropout_rate=weights)
    block, x, key = EncoderBlock("scaled", config, rngs=nnx.Rngs(0)), QUERY, jax.random.key(1)
    found = block(x, dropout_rng=key)
    assert not np.allclose(found, block(x, deterministic=True))
    attend, one, other = jax.random.split(key, 3)
    dropped = features if weights is None else weights
    attention = MultiHeadAttention(
        "scaled", D, num_heads=1, dropout_rate=dropped, rngs=nnx.Rngs(1), keep_rngs=False
    )
    nnx.update(attention, nnx.state(block.self_attention, nnx.Param))
    norms = [residual.norm for residual in (block.self_residual, block.feed_forward_residual)]
    x = x + drop_features(attention(norms[0](x), dropout_rng=attend), one, features)
    x = x + drop_features(block.feed_forward(norms[1](x)), other, features)
    np.testing.assert_allclose(found, x, rtol=1e-6, atol=1e-6)


def test_a_model_that_drops_weights_alone_needs_a_key():
    config = dataclasses.replace(MODEL, dropout_rate=0.0, attention_dropout_rate=0.5)
    model = Seq2Seq(config, V, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"deterministic must be given where dropout_rate is 0\.5"):
        model(*SENTENCES)
    found, plain = model(*SENTENCES, deterministic=False), model(*SENTENCES, deterministic=True)
    assert not np.allclose(found, plain)
