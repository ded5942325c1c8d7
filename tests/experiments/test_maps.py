"""The leaderboard of maps: tests of significance, best cells, deviations, trainings, controls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import users_settings
from oracles import softmax

import attention_jax as aj
from attention_jax.analysis import capture
from attention_jax.tasks.recall import Recall
from attention_jax.training.task import TrainConfig
from experiments.bench import controls, cost, significance, training
from experiments.bench.map_rows import (
    against_scaled,
    best_cell,
    compared,
    right_edges,
    steps_at,
)
from experiments.bench.training import (
    Start,
    deviation_of,
    query_share_of,
    states,
    steps_until_solved,
    with_score,
)

SMALL = dataclasses.replace(
    Recall.model, decoder_layers=1, dim=8, hidden_dim=8, num_heads=1, position_limit=8
)
TINY = Recall(SMALL, TrainConfig(batch_size=4, schedule="constant"), 8, 4, pairs=1)


# --- significance, against numbers computed by hand ---


def seeds(solved, of):
    return np.arange(of) < solved


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        # Of 16 seeds 11 solve it in C(16, 11) = 4368 ways, 56 of them as 8 and 3.
        (seeds(8, 8), seeds(3, 8), 112 / 4368),
        (seeds(3, 8), seeds(8, 8), 112 / 4368),
        (seeds(8, 8), seeds(4, 8), 140 / 1820),
        (seeds(4, 4), seeds(0, 4), 2 / 70),
        (seeds(0, 8), seeds(0, 8), 1.0),
    ],
)
def test_fishers_exact_test(first, second, p):
    assert significance.fisher(first, second) == pytest.approx(p)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        ([1, 2, 3], [4, 5, 6], 2 / 20),  # the least and the largest of C(6, 3) sums of ranks
        ([1, 2, 4], [3, 5, 6], 4 / 20),  # sums 6, 7, 14, 15
        ([1, 2, 2], [2, 3, 4], 6 / 20),  # ranks 1, 3, 3 and 3, 5, 6: sums 7 (3 ways) and 14 (3)
        ([1, np.inf], [np.inf, np.inf], 1.0),
        ([5, 5], [5, 5], 1.0),
    ],
)
def test_the_exact_rank_sum_test(first, second, p):
    first, second = np.array(first, float), np.array(second, float)
    assert significance.rank_sum(first, second) == pytest.approx(p)
    assert significance.rank_sum(second, first) == pytest.approx(p)


def test_equal_numbers_share_their_mean_rank():
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3.5, 3.5, by hand: products 3.75, squares 4.5.
    measured = significance.rank_correlation([10, 20, 20, 30], [1, 5, 7, 7])
    assert measured == pytest.approx(3.75 / 4.5)
    assert significance.rank_correlation([1, 2, 4], [0.3, 0.2, -9]) == pytest.approx(-1)
    assert significance.rank_correlation([1, np.inf, 2], [1, 3, 2]) == pytest.approx(1)
    assert np.isnan(significance.rank_correlation([1, 1], [1, 2]))


def test_a_ratio_of_medians_has_an_interval_by_resampled_seeds():
    second = np.arange(100.0, 200.0, 10)
    assert significance.ratio_interval(3 * second, second) == pytest.approx((3, 3, 3))
    low, ratio, high = significance.ratio_interval(3 * second[::-1], second)
    assert low < ratio == 3 < high
    never = np.full(10, np.inf)
    assert significance.ratio_interval(never, second) == (np.inf, np.inf, np.inf)
    assert np.isnan(significance.ratio_interval(never, never)).all()


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 2, 3], 2 / 8),
        ([-1, -2, -3], 2 / 8),
        ([1, 2, -3], 1.0),  # ranks 1 + 2 - 3
        ([1, 3, 4, -2], 6 / 16),  # a sum of 6; of 16 sums 10, 8, 6 and their negatives reach it
        ([0, 5, 5], 2 / 4),  # the difference of 0 has no sign
        ([0, 1, -1, 2], 6 / 8),  # ranks 2.5 - 2.5 + 4; of 8 sums 9, 4, 4 and their negatives
        ([*range(1, 11)], 2 / 1024),
        ([0, 0], 1.0),
    ],
)
def test_the_exact_signed_rank_test(differences, p):
    steps = 100.0 + np.arange(len(differences))
    assert significance.p_value(steps + differences, steps) == pytest.approx(p)


def test_holms_correction_is_monotonic_and_at_most_1():
    corrected = significance.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert corrected == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.9})
    assert significance.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(("number", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (60, 22)])
def test_the_interval_of_a_median_has_the_ranks_of_the_tables(number, rank):
    numbers = np.random.default_rng(0).permutation(number) + 1.0
    assert significance.median_interval(numbers) == (rank, number + 1 - rank)


def test_the_interval_of_a_median_needs_six_numbers():
    with pytest.raises(ValueError, match="numbers must be 6 or more; got 5"):
        significance.median_interval(np.arange(5.0))


# --- rows ---


def row(solved, accuracy, rate=3e-3, **more):
    deviations = [0.25, 0.5, 1.0, 0.9]
    found = {"kind": "map", "task": "recall", "score": "dot", "rate": rate, "own": 0.9}
    return {**found, "deviations": deviations, "solved": solved, "accuracy": accuracy} | more


def test_the_best_cell_has_the_fewest_steps_then_the_most_seeds_then_the_accuracy():
    own = [50, 50, 50]  # the constant of the paper is not a cell
    median = [[100, 300, 400], [100, 200, 500], [200, 300, 300], own]
    assert best_cell([row(median, [1, 0.9, 1, 1])]) == (0.5, 3e-3)
    tie = [[100, 200, None], [150, 200, 900], [None, None, 100], own]
    assert best_cell([row(tie, [1, 0.9, 1, 1])]) == (0.5, 3e-3)
    never = [[None, None, 100], [None, None, None], [None, None, 100], own]
    assert best_cell([row(never, [0.3, 0.9, 0.4, 1])]) == (1.0, 3e-3)
    slower, faster = row(tie, [1, 0.9, 1, 1]), row(median, [1, 0.9, 1, 1], 1e-2)
    faster["solved"][2] = [50, 100, 400]
    assert best_cell([slower, faster]) == (1.0, 1e-2)


def test_pairs_of_scores_are_compared_by_steps_and_by_seeds():
    fast, slow, never = np.arange(8.0), np.arange(8.0) + 100, np.full(8, np.inf)
    # Steps: each pair differs (p = 2 / 12870, 3 p < 0.05). Seeds: fast and slow do not.
    assert compared({"fast": fast, "slow": slow, "never": never}) == (2, 2, 3, 3)
    assert compared({"a": fast, "b": fast, "c": never}) == (2, 2, 2, 2)


def test_scores_meet_at_equal_deviations_of_the_logits_and_of_their_query_part():
    rows = [
        row([[400, 500], [100, 150], [200, 200], [None, 300]], [1, 1, 1, 1]),
        row([[400, 100], [90, 150], [150, 200], [1, 1]], [1, 1, 1, 1], rate=1e-3),
        {"kind": "size", "score": "dot", "query_share": 0.25},
        row([[50, None]], [1], kind="own"),
    ]
    found = {
        where: steps_at(rows, where, ["dot"])["dot"].tolist()
        for where in ("constants", "best cells", "deviation", "query part", "own")
    }
    assert found == {
        "constants": [np.inf, 300],  # at rate 0.003
        "best cells": [90, 150],
        "deviation": [400, 100],  # at 0.25, the better rate
        "query part": [90, 150],  # at 0.5
        "own": [50, np.inf],
    }


def test_the_right_edge_lies_between_the_cells_where_half_of_the_seeds_solve_the_task():
    solved = [[1] * 4, [1, 1, 1, None], [None] * 4, [1] * 4]  # 4, 3 and 0 of 4 at 1/4, 1/2 and 1
    rows = [
        row(solved, [1] * 4),
        row([[None] * 4] * 4, [0] * 4, rate=1e-3),
        row([[1] * 4] * 4, [1] * 4, score="l2"),
        row([[None] * 4] * 4, [0] * 4, score="never"),
        {"kind": "size", "score": "dot", "query_share": 0.25},
        {"kind": "size", "score": "l2", "query_share": 1.0},
    ]
    scores = ["dot", "l2", "never"]
    edge = 0.5 * 2 ** (1 / 3)
    assert right_edges(rows, scores) == pytest.approx({"dot": edge, "l2": 1.0})
    of_pairs = right_edges(rows, scores, of_pairs=True)
    assert of_pairs == pytest.approx({"dot": edge / 2, "l2": 1.0})


def test_scores_are_compared_with_scaled_dot_by_seed_and_corrected():
    steps = {"scaled": range(100, 1100, 100), "dot": range(150, 1150, 100), "l2": [None] * 10}
    steps["cosine"] = steps["scaled"]
    rows = [
        row([[*each]], [1], score=score, kind="test", steps=2000) for score, each in steps.items()
    ]
    p_values = against_scaled(rows, "recall")
    assert p_values == pytest.approx({"dot": 6 / 1024, "l2": 6 / 1024, "cosine": 1.0})
    assert against_scaled(rows[1:], "recall") == {}


# --- models ---


def test_the_deviation_is_that_of_the_logits_within_a_row():
    task = with_score(TINY, "general")
    batch = task.batch(jax.random.key(0), size=64)
    squares = []
    for seed in range(4):
        params = jax.tree.map(lambda leaf: leaf[0], states(task, [seed]).params)
        attentions = capture(task.bind(params), *batch.inputs).attentions
        for attention in attentions.values():
            logits = np.asarray(attention.logits, np.float64)
            assert logits.shape[-2:] == (8, 8)
            squares += [row.var() for row in logits[..., 4:, :4].reshape(-1, 4)]
    np.testing.assert_allclose(deviation_of(task), np.sqrt(np.mean(squares)), rtol=1e-5)


def test_the_deviation_is_proportional_to_a_factor_of_the_score():
    dot, scaled = (deviation_of(with_score(TINY, score)) for score in ("dot", "scaled"))
    np.testing.assert_allclose(dot / scaled, 8**0.5, rtol=1e-5)  # of a model of one layer


def test_logits_that_are_all_equal_have_no_deviation():
    nothing = with_score(TINY, "attention_jax:Multiplied(factor=0.0)")
    with pytest.raises(ValueError, match=r"^score .* must give .* deviation of 0\.0$"):
        deviation_of(nothing)


def test_the_query_share_is_that_of_an_analysis_of_variance():
    """Without a mask: what is left of a table without its row and column means."""
    task = with_score(TINY, "additive")
    batch = task.batch(jax.random.key(0), size=64)
    every, of_query = 0.0, 0.0
    for seed in range(4):
        params = jax.tree.map(lambda leaf: leaf[0], states(task, [seed]).params)
        (attention,) = capture(task.bind(params), *batch.inputs).attentions.values()
        block = np.asarray(attention.logits, np.float64)[..., 4:, :4]
        within = block - block.mean(-1, keepdims=True)
        every += np.square(within).sum() / (4 * 3)
        of_query += np.square(within - within.mean(-2, keepdims=True)).sum() / (3 * 3)
    assert query_share_of(task) == pytest.approx(of_query / every, rel=1e-4)
    less = query_share_of(with_score(TINY, "additive(key_part=False)"))
    assert less > query_share_of(task)


def test_a_training_takes_the_same_steps_whatever_trains_beside_it(monkeypatch):
    monkeypatch.setattr(training, "SOLVED", 0.6)
    task = with_score(TINY, "scaled")
    training_of = {seed: Start(1.0, 1e-2, seed) for seed in (3, 5)}
    others = [Start(50.0, 1e-4, 0), Start(0.5, 1e-2, 4)]
    steps = {}
    for seed, start in training_of.items():
        (steps[seed],), _ = steps_until_solved(task, [start], 300)
    both = [*others, *training_of.values()]
    beside, accuracy = steps_until_solved(task, both, 300)
    for together in (1, 3):  # the next one takes the place of one that has ended
        found = steps_until_solved(task, both, 300, together)
        assert np.array_equal(found[0], beside)
        np.testing.assert_allclose(found[1], accuracy, atol=1e-6)
    assert beside[2:].tolist() == [steps[3], steps[5]]
    assert np.isfinite(beside[2:]).all()
    assert np.all((accuracy >= 0) & (accuracy <= 1))
    assert np.all(beside[np.isfinite(beside)] % training.LOOK == 0)


# --- controls ---


def oracle(score, params, query, key):
    """The logits in float64."""
    query, key = (np.asarray(each, np.float64) for each in (query, key))
    params = {name: np.asarray(each, np.float64) for name, each in params.items()}
    if isinstance(score, controls.WithLength):
        logits = query @ key.T + params["w"] * np.sum(key**2, axis=-1)
        return logits / np.sqrt(key.shape[-1])
    query, key = query @ params["query_kernel"], key @ params["key_kernel"]
    if isinstance(score, controls.Features):
        query, key = np.maximum(query, 0), np.maximum(key, 0)
    return query @ key.T / np.sqrt(key.shape[-1])


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize(
    "score",
    [
        controls.Projected(),
        controls.Projected(hidden_dim=5),
        controls.Features(),
        controls.Features(hidden_dim=5),
        controls.WithLength(),
    ],
    ids=repr,
)
def test_controls_are_their_formulas(score, implementation):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.float32(rng.normal(size=(n, 4))) for n in (6, 7, 7))
    params = score.init(jax.random.key(1), 4, 4)
    if isinstance(score, controls.WithLength):
        assert params["w"] == 0
        params = {"w": jnp.float32(0.7)}
    else:
        assert params["query_kernel"].shape == (4, score.hidden_dim or 4)
    logits = oracle(score, params, query, key)
    by_hand = softmax(logits) @ np.asarray(value, np.float64)
    arguments = {"score": score, "params": params, "implementation": implementation}
    with users_settings():
        output = aj.attention(query, key, value, **arguments)
    np.testing.assert_allclose(output, by_hand, rtol=2e-5, atol=2e-6)


# --- cost ---


def test_turns_are_added_until_scaled_dot_over_itself_is_1(monkeypatch, tmp_path):
    times = iter([])

    def interleaved(calls, repeats, turn_seconds):
        assert [*calls] == ["scaled", "scaled again", "score"]
        return {
            "scaled": [10.0] * repeats,
            "scaled again": [10 * next(times) for _ in range(repeats)],
            "score": [15.0] * repeats,
        }

    monkeypatch.setattr(cost, "_program", lambda config, score: None)
    monkeypatch.setattr(cost, "interleaved", interleaved)

    def measured(again, most_turns=60):
        nonlocal times
        times = iter(again)
        (found,) = cost._measured(cost.Config(most_turns=most_turns), "dot")
        return found

    calm = measured([0.99, 1.01, 1.0, 0.98, 1.02, 1.0])
    assert (calm["steady"], calm["turns"]) == (True, 6)
    assert (calm["over"], calm["again"]) == ([1.5, 1.5, 1.5], [0.98, 1.0, 1.02])
    assert calm["milliseconds"] == 15 / cost.STEPS
    late = measured([0.9, 1.1, 1.0, 1.0, 1.0, 1.0, 0.99, 1.01, 1.0, 1.0])
    assert (late["steady"], late["turns"]) == (True, 10)  # the second smallest of 9 or more
    apart = measured([1.01] * 20, most_turns=20)  # narrow, but not around 1
    assert (apart["steady"], apart["turns"]) == (False, 20)


def test_scaled_dot_is_compiled_twice(monkeypatch):
    cost._scaled.cache_clear()
    compiled = []
    monkeypatch.setattr(cost, "_program", lambda config, score: compiled.append(score) or object())
    config = cost.Config(("dot",))
    first, second = cost._scaled(config, 0), cost._scaled(config, 1)
    assert compiled == ["scaled", "scaled"]
    assert first is not second
    assert cost._scaled(config, 0) is first  # for all scores
    cost._scaled.cache_clear()
