"""`jax.export` with a batch size that is not known yet: one program for every batch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx
from jax import export
from oracles import normal

import attention_jax as aj
from attention_jax import analysis, nn
from attention_jax.positions.dropout import DropoutMask
from attention_jax.tasks.vocabulary import Batch

T, S, D = 5, 7, 3


def attend(query, key, value, lengths, implementation):
    """With everything whose shape has the batch size in it."""
    return aj.attention(
        query, key, value, mask=aj.padding_mask(lengths), dropout_rate=0.5,
        dropout_rng=jax.random.key(1), implementation=implementation,
        block_sizes=aj.BlockSizes(3, 4),
    )  # fmt: skip


def inputs_of(examples):
    tokens = [normal(examples, n, D, seed=i) for i, n in enumerate((T, S, S))]
    return *tokens, np.arange(examples, dtype=np.int32) % S + 1


def results_and_gradients(function, *inputs):
    def loss(*tokens):
        output = function(*tokens, inputs[-1])
        return jnp.sum(output**2), output

    return quick_jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs[:3])


def test_one_program_for_every_batch_size():
    """As the direct call, which knows its batch size and has no tiles."""
    (batch,) = export.symbolic_shape("b")
    call = functools.partial(attend, implementation="tiled")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in inputs_of(2)]
    program = export.export(jax.jit(call), platforms=["cpu"])(*shapes)
    program = export.deserialize(program.serialize(vjp_order=1))
    got = results_and_gradients(program.call, *inputs_of(3))
    direct = functools.partial(attend, implementation="reference")
    expected = results_and_gradients(direct, *inputs_of(3))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["scaled", "additive"])
def test_lengths_that_are_not_known(name):
    """With the parts whose programs depend on lengths."""
    batch, target, source = export.symbolic_shape("b, t, s")
    shapes = [jax.ShapeDtypeStruct((batch, n, D), jnp.float32) for n in (target, source, source)]
    options = {"score": name, "params": aj.get_score(name).init(jax.random.key(0), D, D)}
    if name == "additive":
        bias = aj.relative_bias(jnp.arange(5.0)) + aj.t5_bias(jnp.cos(jnp.arange(32.0)))
        options |= {"bias": bias, "normalizer": "entmax"}

    def call(query, key, value, implementation=None):
        mask = aj.causal_mask(1)
        return aj.attention(query, key, value, mask=mask, implementation=implementation, **options)

    def program(implementation):
        attend = functools.partial(call, implementation=implementation)
        return export.export(jax.jit(attend), platforms=["cpu"])(*shapes)

    inputs = [normal(2, n, D, seed=i) for i, n in enumerate((T, S, S))]
    expected = call(*inputs, implementation="reference")
    np.testing.assert_allclose(program(None).call(*inputs), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"'tiled' needs lengths .*; got T = t, S = s"):
        program("tiled")


# --- arguments and results that are pytrees of this library ---


def pytrees():
    """One of each public class, with every static option that it has."""
    query, key, lengths = normal(2, T, D), normal(2, S, D), jnp.array([4, 7])
    model = nn.Model(nn.ModelConfig("decoder", score="general", dim=4), 11, rngs=nnx.Rngs(0))
    source, ends = jnp.ones((2, 3), int), {"max_length": 2, "sos": 1, "eos": 2, "pad": 0}
    block = nn.Block(nn.ModelConfig(dim=4, attention="coverage"), is_cross=True, rngs=nnx.Rngs(0))
    memory = nn.Source(jnp.ones((2, S, 4)), aj.padding_mask(lengths), lengths)
    heads = nn.MultiHeadAttention("additive", 4, num_heads=2, rngs=nnx.Rngs(0))
    alibi = aj.alibi_bias(jnp.array(0.5))
    return {
        "masks": [
            aj.causal_mask(1) & aj.padding_mask(lengths, lengths),
            ~aj.local_mask(2, None) | jnp.ones((2, T, S), bool),
            aj.segment_mask(jnp.zeros((2, T), int), jnp.zeros((2, S), int)),
            aj.token_mask(jnp.ones((2, S), bool)), aj.window_mask(jnp.ones((2, T)), 1),
            DropoutMask(0.25, lengths),
        ],
        "biases": [
            alibi + jnp.ones((2, 1, 1)), aj.forgetting_bias(jnp.ones(T)),
            aj.relative_bias(jnp.ones(5)),
            aj.t5_bias(jnp.ones(8), max_distance=np.int64(16)),
            aj.gaussian_bias(jnp.ones(T), 2.0),
        ],
        "statistics": aj.attention(query, key, key, return_statistics=True),
        "coverage": aj.coverage_attention(
            query, key, key, score="dot", coverage_kernel=jnp.ones(D), return_weights=False
        ),
        "memory": heads.remember(jnp.ones((2, S, 4))), "cache": heads.empty_cache((2,), 3),
        "block": (block.attend(jnp.ones((2, T, 4)), memory), memory),
        "state": model.start_decoding(source, None, max_length=2),
        "answer": model.greedy_decode(source, return_weights=True, **ends),
        "beams": model.beam_decode(source, beams=2, **ends),
        "captured": analysis.capture(aj.attention, query, key, key),
        "gradients": analysis.attention_gradients(query, key, key, doutput=query, bias=alibi),
        "summary": analysis.attention_summary(jnp.ones((2, T, S))),
        "batch": Batch(source, lengths, source, source, lengths),
    }  # fmt: skip


def test_a_program_takes_and_returns_every_pytree():
    shapes = jax.eval_shape(pytrees)
    trees = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    program = export.export(jax.jit(lambda trees: trees), platforms=["cpu"])(trees)
    found = export.deserialize(program.serialize()).call(trees)
    chex.assert_trees_all_equal(found, trees, strict=True)
