"""Which tiles are visited, and that a batch decides about them together."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from conformance import quick_jit

import attention_jax as aj
from attention_jax.positions.contract import Mask
from attention_jax.positions.function import function_field, position_dataclass
from attention_jax.tiles import BlockSizes, Inputs, Options
from attention_jax.tiles import prepare as tiling

DV = 2
RNG = np.random.default_rng(9)


def test_no_loop_or_branch_of_a_batch_is_decided_example_by_example():
    """Such a loop copies all it carries in every step, such a branch runs both its sides."""
    query, key, value = (jnp.ones((3, 6, 2)) for _ in range(3))

    def run(query, lengths):
        return aj.attention(
            query, key, value, mask=aj.padding_mask(lengths, lengths) & aj.causal_mask(),
            implementation="tiled", block_sizes=BlockSizes(2, 3),
        ).sum()  # fmt: skip

    def pushed(query, lengths):
        return jax.jvp(lambda query: run(query, lengths), (query,), (query,))[1]

    for function, fewest in ((jax.grad(run), 4), (jax.grad(pushed), 6)):
        program = jax.jit(function).lower(query, jnp.array([1, 6, 3])).as_text()
        conditions = re.findall(r"\bcond \{(.*?)\} do \{", program, re.DOTALL)
        assert len(conditions) >= fewest
        for condition in conditions:
            operations = set(re.findall(r"stablehlo\.(\w+)", condition))
            assert operations <= {"compare", "constant", "return"}, condition  # no reduction
    # A branch for each example would have become a choice between the results of both sides.
    assert "stablehlo.case" in program


def test_features_of_16_bit_tokens_have_16_bits():
    """Those of both sides, in which they lie in memory and are multiplied."""

    def dtypes(score):
        tokens = jnp.ones((6, 4), jnp.bfloat16)
        params = score.init(jax.random.key(0), 4, 4)
        inputs = Inputs(tokens, tokens, tokens, params, None, None, None)
        arrays = tiling.prepare(Options(score, BlockSizes(2, 3)), inputs)[1]
        return {arrays.queries.dtype.name, arrays.keys.dtype.name}

    for name in ("scaled", "general", "cosine", "l2", "softcap"):
        assert dtypes(aj.get_score(name)) == {"bfloat16"}, name
    assert dtypes(aj.get_score("additive")) == {"float32"}


@dataclasses.dataclass(frozen=True)
class Watched(aj.Dot):
    """Its logits are 0, and it writes down the tiles it is asked for."""

    round = aj.Dot.round
    finite_slopes = aj.Dot.finite_slopes

    def pair(self, params, q_features, k_features):
        # By the second query: the very first may see no key, and what stands there is not its own.
        first = q_features[1, 0] - 1, k_features[0, 0]
        jax.debug.callback(lambda i, j: PAIRED.add((int(i), int(j))), *first)
        return jnp.zeros((len(q_features), len(k_features))) * first[0]


@position_dataclass
class WatchedMask(Mask):
    mask: Mask = function_field()

    def allowed(self, query_positions, key_positions):
        first = query_positions[0], key_positions[0]
        jax.debug.callback(lambda i, j: MASKED.add((int(i), int(j))), *first)
        return self.mask.allowed(query_positions, key_positions)

    def tile_status(self, query_positions, key_positions):
        return self.mask.tile_status(query_positions, key_positions)


PAIRED: set = set()
MASKED: set = set()


def test_empty_tiles_are_not_computed_and_full_ones_not_masked():
    mask = aj.causal_mask(-1) & aj.padding_mask(jnp.array(7))
    positions = [jnp.arange(n, dtype=jnp.float32)[:, None] for n in (8, 9)]
    value = jnp.asarray(RNG.normal(size=(9, DV)), jnp.float32)

    def run(value, query):
        return aj.attention(
            query, positions[1], value, score=Watched(), mask=WatchedMask(mask),
            implementation="tiled", block_sizes=BlockSizes(2, 3),
        ).sum()  # fmt: skip

    tiles = np.asarray(mask.materialize(8, 9)).reshape(4, 2, 3, 3)
    corners = np.stack(np.meshgrid(range(0, 8, 2), range(0, 9, 3), indexing="ij"), -1)
    some, every = tiles.any((1, 3)), tiles.all((1, 3))
    needed, partial = (
        {(int(i), int(j)) for i, j in corners[which]} for which in (some, some & ~every)
    )
    assert some.sum() < some.size
    program = quick_jit(jax.grad(run, (0, 1)))
    program(value, positions[0])  # a score that was not seen before is checked on pairs of its own
    jax.effects_barrier()
    PAIRED.clear()
    MASKED.clear()
    jax.block_until_ready(program(value, positions[0]))
    jax.effects_barrier()
    assert needed == PAIRED
    assert partial == MASKED
