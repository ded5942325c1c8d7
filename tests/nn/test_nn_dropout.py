"""When modules drop, and with which keys: the manners of Flax's own layers."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import define_prng_impl
from numpy_model import run_jit
from oracles import normal
from quick_compilation import quick_jit

from attention_jax import nn
from attention_jax.positions.dropout import drop_features

B, T, S, D, V = 2, 5, 7, 12, 11
BLOCK = nn.ModelConfig(dim=D, hidden_dim=13, dropout_rate=0.5)
RATE = {"dropout_rate": 0.5}
QUERY, MEMORY = normal(B, T, D), normal(B, S, D, seed=3)
IDS = ([[3, 4, 5], [6, 7, 8]], None, [[1, 3], [1, 4]])
# name: (how the module is made, the arguments of a call)
MODULES = {
    "attention": (functools.partial(nn.Attention, "scaled", D, D, **RATE), (QUERY, MEMORY)),
    "multi-head": (
        functools.partial(nn.MultiHeadAttention, "scaled", D, num_heads=2, **RATE),
        (QUERY,),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_as_flaxs_layers(name):
    make, arguments = MODULES[name]
    module, plain = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0), keep_rngs=False)
    params, own = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (module, plain))
    chex.assert_trees_all_equal(params, own)  # the stream changes none of them
    # Without it the state is the parameters, as training and checkpoints want it.
    chex.assert_trees_all_equal_structs(nnx.to_pure_dict(nnx.state(plain)), own)
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
            "false at the call": call(False, deterministic=False),
            "rng": call(None, dropout_rng=rng),
            "rng, but true": call(None, dropout_rng=rng, deterministic=True),
        }

    found = jax.tree.map(np.asarray, calls(*nnx.state(module, nnx.Param, ...)))
    without = found["eval"][0][0]
    for case, count in (("train", 2), ("false at the call", 1), ("rng", 0)):
        outputs, last = found[case]
        assert np.max(np.abs(outputs[0] - without)) > 1e-2, case
        assert int(last) == count, case
    first, second = found["train"][0]
    assert np.any(first != second)
    np.testing.assert_array_equal(found["rng, but true"][0][0], without)
    plain.train()
    with pytest.raises(ValueError, match="dropout_rng must be given"):
        plain(*arguments)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (functools.partial(nn.Block, BLOCK), (QUERY,)),
        (functools.partial(nn.CrossAttention, BLOCK), (QUERY, MEMORY)),
        (functools.partial(nn.LocalMAttention, "dot", D, D, radius=1, **RATE), (QUERY, MEMORY)),
        (functools.partial(nn.MonotonicAttention, "dot", D, D), (QUERY, MEMORY)),
        (functools.partial(nn.Model, BLOCK, V), IDS),
        (functools.partial(nn.Model, nn.ModelConfig(dim=D, position_draw="subset"), V), IDS),
    ],
    ids=lambda part: getattr(getattr(part, "func", None), "__name__", ""),
)
def test_training_needs_a_key(make, arguments):
    module = make(rngs=nnx.Rngs(0))
    before = jax.tree.leaves(module(*arguments))[0]
    module.train()
    with pytest.raises(ValueError, match=r"^rng must be given"):
        module(*arguments)
    drawn = jax.tree.leaves(module(*arguments, rng=jax.random.key(0)))[0]
    assert np.any(drawn != before)
    if isinstance(module, nn.Model):  # decoding is never random
        module.greedy_decode(IDS[0], None, max_length=2, sos=1, eos=2, pad=0)
    module.eval()
    np.testing.assert_array_equal(jax.tree.leaves(module(*arguments))[0], before)


def test_which_streams_there_must_be():
    make = functools.partial(nn.Attention, "dot", D, D, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"rngs must have a stream 'dropout'.*got \['params'\]"):
        make(rngs=nnx.Rngs(params=0))
    assert make(rngs=nnx.Rngs(params=0), keep_rngs=False).rngs is None
    assert nn.Attention("dot", D, D, rngs=nnx.Rngs(params=0)).rngs is None  # no dropout, no stream
    one, other = (make(rngs=nnx.Rngs(params=0, dropout=seed)) for seed in (0, 1))
    assert np.any(one.rngs.key[...] != other.rngs.key[...])


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
    config = nn.ModelConfig(
        score="dot", dim=4, hidden_dim=7, encoder_layers=1, decoder_layers=2, **RATE
    )
    model = nnx.eval_shape(lambda: nn.Model(config, V, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), nnx.state(model)))
    one_sentence, drawn = (np.array([[4, 3, 5]]), np.array([3]), np.array([[1, 6]])), []
    call = quick_jit(lambda rng: model(*one_sentence, rng=rng))
    call(recording_key(0, drawn.append))
    jax.effects_barrier()
    # Embeddings; the weights and the output of each attention; each feed-forward layer.
    assert len(drawn) == (1 + 2 + 1) + (1 + 2 * (2 + 2 + 1))
    assert len({*drawn}) == len(drawn)


def test_weights_may_have_a_rate_of_their_own():
    config = dataclasses.replace(BLOCK, attention_dropout_rate=0.25)
    assert (BLOCK.rate_of_weights, config.rate_of_weights) == (0.5, 0.25)
    block = nn.Block(config, rngs=nnx.Rngs(0))
    attention = nn.MultiHeadAttention(
        "scaled", D, num_heads=1, dropout_rate=0.25, rngs=nnx.Rngs(1), keep_rngs=False
    )
    nnx.update(attention, nnx.state(block.self_attention, nnx.Param))
    norms = [residual.norm for residual in (block.self_residual, block.feed_forward_residual)]

    def both(x, key):
        attend, one, other = jax.random.split(key, 3)
        by_hand = x + drop_features(attention(norms[0](x), dropout_rng=attend), one, 0.5)
        layer = block.feed_forward(norms[1](by_hand))
        return block(x, rng=key), by_hand + drop_features(layer, other, 0.5)

    found, expected = run_jit(both, QUERY, jax.random.key(1))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
