"""attention_masks.py: tables, tile counts and misread masks against tables by hand."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import ROOT

from attention_jax import (
    Mask,
    attention,
    attention_weights,
    causal_mask,
    local_mask,
    mask_dataclass,
)
from experiments.scores import attention_masks as experiment


def tables_by_hand(length):
    """Returns the table of each mask, computed pair by pair."""
    window, real, first = length // 8, length * 2 // 3, length // 12
    ends = length // 4, length * 7 // 12

    def segment(i):
        return sum(i >= end for end in ends)

    rules = {
        "causal": lambda i, j: j <= i,
        "local, to the left": lambda i, j: i - window <= j <= i,
        "padding": lambda i, j: j < real,
        "segments": lambda i, j: segment(i) == segment(j),
        "causal & padding": lambda i, j: j <= i and j < real,
        "causal & segments": lambda i, j: j <= i and segment(i) == segment(j),
        "window & padding": lambda i, j: abs(i - j) <= window and j < real,
        "window | first keys, causal": lambda i, j: j <= i and (i - j <= window or j < first),
        "~causal": lambda i, j: j > i,
    }
    return {
        name: np.array([[rule(i, j) for j in range(length)] for i in range(length)])
        for name, rule in rules.items()
    }


def test_masks_are_what_their_names_say():
    masks, tables = experiment.masks(31), tables_by_hand(31)
    assert list(masks) == list(tables)
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask.materialize(31, 31), tables[name], err_msg=name)


def test_tiles_of_a_causal_mask():
    # 5 tiles in a row: 5 on the diagonal are partial, 10 below full, 10 above empty.
    counts = {"empty": 10, "full": 10, "partial": 5}
    assert experiment.tile_counts(causal_mask(), 35, 7) == {"said": counts, "shown": counts}


def test_a_mask_may_call_a_tile_partial_that_is_empty():
    never = local_mask(3, 0) & ~local_mask(3, 0)
    found = experiment.tile_counts(never, 21, 7)
    assert found["shown"] == {"empty": 9, "full": 0, "partial": 0}
    assert found["said"]["partial"] > 0


@mask_dataclass
class Mistaken(Mask):
    """Calls every tile that is not empty full."""

    def allowed(self, query_positions, key_positions):
        return query_positions[:, None] > key_positions[None, :]

    def tile_status(self, query_positions, key_positions):
        status = causal_mask().tile_status(query_positions, key_positions)
        return status._replace(full=~status.empty)


CHOSEN = ("causal", "window & padding", "~causal")


@pytest.fixture(scope="module")
def quick():
    """A quick run with three masks, because each is compiled; the committed run has all."""
    config, every = experiment.QUICK, experiment.masks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            experiment, "masks", lambda length: {name: every(length)[name] for name in CHOSEN}
        )
        numbers = experiment.run(config) | {"config": dataclasses.asdict(config)}
    return json.loads(json.dumps(numbers, default=str))


def missed(numbers):
    return [one.claim for one in experiment.expectations(numbers) if not one.met]


def test_a_quick_run_meets_what_is_expected(quick):
    assert missed(quick) == []
    assert set(experiment.plot(quick)) == set(experiment.CAPTIONS)
    by_hand = tables_by_hand(24)
    for name, table in quick["tables"].items():
        np.testing.assert_array_equal(table, by_hand[name], err_msg=name)
    # The last query sees no future: zeros, and not NaN.
    assert quick["misread"]["causal"]["misread"][-1] == [0.0] * 6
    assert "| causal | 6 | 6 | 4 |" in experiment.report(quick)


def test_wrong_numbers_miss_their_bounds(quick):
    numbers = json.loads(json.dumps(quick))
    numbers["largest_masked_dlogits"]["~causal"] = 1e-30
    assert missed(numbers) == ["~causal: largest gradient of a masked logit"]


def assert_no_tile_is_overstated(tiles):
    for name, counts in tiles.items():
        for status in ("empty", "full"):
            assert counts["said"][status] <= counts["shown"][status], (name, status)


def test_no_mask_calls_a_tile_empty_or_full_that_is_not(quick):
    assert_no_tile_is_overstated(quick["tiles"])
    with pytest.raises(AssertionError, match="full"):
        assert_no_tile_is_overstated({"mistaken": experiment.tile_counts(Mistaken(), 64, 16)})


def test_misread_masks_put_all_weight_on_forbidden_keys(quick):
    for name, of_mask in quick["misread"].items():
        shares = np.array(of_mask["misread_weight_on_masked_keys"])
        sees_nothing = [query == 5 and name == "causal" for query in range(6)]
        np.testing.assert_allclose(shares, np.where(sees_nothing, 0, 1), atol=1e-5)


def test_weights_and_gradients_of_masked_pairs():
    """Exact zeros where masked; rows sum to 1, or to 0 without a key; d output / d value = A."""
    length = 24
    query, key, value = jax.random.normal(jax.random.key(0), (3, length, 8))
    masks = experiment.masks(length)
    tables = np.stack([np.asarray(mask.materialize(length, length)) for mask in masks.values()])

    @jax.jit  # all masks in one program
    def both(tables):
        def of_mask(table):
            attend = functools.partial(attention, query, key, mask=table)
            return attention_weights(query, key, mask=table), jax.jacrev(attend)(value)

        return jax.vmap(of_mask)(tables)

    weights, dvalue = both(jnp.asarray(tables))  # dvalue: [masks, T, Dv, S, Dv]
    assert not np.where(tables, 0, weights).any()
    assert not np.where(tables[:, :, None, :, None], 0, dvalue).any()
    has_key = tables.any(-1)
    np.testing.assert_allclose(np.sum(weights, -1), has_key, atol=2e-5)
    by_name = dict(zip(masks, has_key, strict=True))
    assert {name for name in masks if not by_name[name].all()} == {"window & padding", "~causal"}
    expected = np.asarray(weights)[:, :, None, :, None] * np.eye(8)[:, None]
    np.testing.assert_allclose(dvalue, expected, atol=2e-5)


def test_a_query_without_keys_by_hand(quick):
    ways = quick["no_keys"]
    # softmax(0.5, -0.25) in every way, where the first query has two keys.
    larger = 1 / (1 + np.exp(-0.75))
    for way in ways.values():
        np.testing.assert_allclose(way["table"][0], [larger, 1 - larger, 0], atol=1e-4)
    assert ways["zeros (ours)"]["table"][1] == ways["-inf, nan_to_num"]["table"][1] == [0, 0, 0]
    assert ways["-inf"]["table"][1] == [None] * 3
    assert ways["-1e9"]["table"][1] == [0.3333] * 3


def test_the_committed_numbers():
    numbers = json.loads((ROOT / "experiments/scores/attention_masks.json").read_text())
    found = experiment.expectations(numbers)
    assert len(found) == 9 + 5 * 3 * 2
    assert missed(numbers) == []
    assert_no_tile_is_overstated(numbers["tiles"])
    assert numbers["tiles"]["causal"]["said"] == {"empty": 496, "full": 496, "partial": 32}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 100}, "length must be at least 16 and a multiple of tile; got 100 and 128"),
        ({"drawn_length": 8}, "drawn_length must be at least 16"),
        ({"drawn_tile": 5}, "drawn_length must be .* a multiple of drawn_tile; got 24 and 5"),
        ({"tile": 0}, "a multiple of tile; got 4096 and 0"),
        ({"samples": 0}, "samples must be at least 1; got 0"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)
