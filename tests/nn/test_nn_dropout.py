"""When modules drop, and with which keys: the manners of Flax's own layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import define_prng_impl
from numpy_model import normal
from quick_compilation import quick_jit

from attention_jax.analysis import capture
from attention_jax.nn import (
    Attention,
    Block,
    Model,
    ModelConfig,
    MultiHeadAttention,
    Source,
)
from attention_jax.pairwise.dropout import drop_features

B, T, S, D, V = 2, 5, 7, 12, 11
BLOCK = ModelConfig(dim=D, hidden_dim=13, dropout_rate=0.5)
RATE = {"dropout_rate": 0.5}
MODEL = ModelConfig(score="dot", dim=D, hidden_dim=7, decoder_self_attention=False, **RATE)


QUERY, MEMORY = normal(B, T, D), normal(B, S, D, seed=3)
# name: (how the module is made, the arguments of a call)
MODULES = {
    "attention": (functools.partial(Attention, "scaled", D, D, **RATE), (QUERY, MEMORY)),
    "multi-head": (
        functools.partial(MultiHeadAttention, "scaled", D, num_heads=2, **RATE),
        (QUERY,),
    ),
}


@pytest.mark.parametrize("name", MODULES)
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
            found = [model(*arguments, **options) for _ in range(times)]
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
    model = nnx.eval_shape(lambda: Model(config, V, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), nnx.state(model)))
    one_sentence, drawn = (np.array([[4, 3, 5]]), np.array([3]), np.array([[1, 6]])), []
    call = quick_jit(lambda rng: model(*one_sentence, rng=rng))
    call(recording_key(0, drawn.append))
    jax.effects_barrier()
    # Embeddings; the weights and the output of each attention; each feed-forward layer.
    assert len(drawn) == (1 + 2 * (2 + 1)) + (1 + 2 * (2 + 2 + 1))
    assert len({*drawn}) == len(drawn)


@pytest.mark.parametrize(("features", "weights"), [(0.5, 0.0), (0.0, 0.5), (0.5, None)])
def test_weights_may_have_a_rate_of_their_own(features, weights):
    config = dataclasses.replace(BLOCK, dropout_rate=features, attention_dropout_rate=weights)
    block, x, key = Block(config, rngs=nnx.Rngs(0)), QUERY, jax.random.key(1)
    found = block(x, rng=key)
    assert not np.allclose(found, block(x))
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


def left_of(block, kept):
    """The block with the output of the other layers at 0: what is left adds what it drops from."""
    for layer in {"self_attention", "cross_attention", "feed_forward"} - {kept}:
        for param in jax.tree.leaves(
            nnx.state(getattr(block, layer).output), is_leaf=lambda x: isinstance(x, nnx.Param)
        ):
            param[...] = jnp.zeros_like(param[...])
    return block


@pytest.mark.parametrize("layer", ["self_attention", "cross_attention", "feed_forward"])
def test_every_layer_of_a_block_drops_and_keeps_the_expectation(layer):
    config = ModelConfig(score="additive", dim=D, hidden_dim=13, dropout_rate=0.3)
    block = left_of(Block(config, is_cross=True, rngs=nnx.Rngs(0)), layer)
    x, source = QUERY[0], Source(MEMORY[0])
    rngs = jax.random.split(jax.random.key(0), 3000)
    call = jax.jit(jax.vmap(lambda rng: block(x, source, rng=rng)))
    outputs, plain = np.asarray(call(rngs)), np.asarray(block(x, source))
    error = np.abs(outputs.mean(0) - plain)
    assert np.all(error <= 6 * outputs.std(0) / np.sqrt(len(rngs)) + 1e-6)
    dropped = outputs == x
    assert abs(dropped.mean() - 0.3) < 0.01
    if layer == "feed_forward":  # no weights to drop: what is kept is all scaled alike
        expected = np.broadcast_to(x + (plain - x) / 0.7, outputs.shape)
        np.testing.assert_allclose(outputs[~dropped], expected[~dropped], atol=1e-5)
    else:
        kept = np.where(dropped[:, 0, 0], np.nan, outputs[:, 0, 0])
        assert len(np.unique(kept[~np.isnan(kept)].round(4))) > 5
