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
from attention_jax.scores import get_score
from attention_jax.tasks.recall import Recall
from attention_jax.training.task import TrainConfig
from experiments.bench import controls, cost, prediction, significance, training
from experiments.bench.map_rows import against_scaled, best_cell, cells_between, censored, shares
from experiments.bench.training import Start, deviation_of, states, steps_until_solved, with_score

SMALL = dataclasses.replace(
    Recall.model, decoder_layers=1, dim=8, hidden_dim=8, num_heads=1, position_limit=8
)
TINY = Recall(SMALL, TrainConfig(batch_size=4, schedule="constant"), 8, 4, pairs=1)


# --- significance, against numbers computed by hand ---


def seeds(solved, of):
    return np.arange(of) < solved


def test_fishers_exact_test():
    # Of 16 seeds 11 solve it in C(16, 11) = 4368 ways, 56 of them as 8 and 3: p = 112 / 4368.
    assert significance.differ(seeds(8, 8), seeds(3, 8))
    assert significance.differ(seeds(3, 8), seeds(8, 8))
    assert not significance.differ(seeds(8, 8), seeds(4, 8))  # p = 140 / 1820 = 0.077
    assert not significance.differ(seeds(4, 4), seeds(1, 4))  # p = 8 / 56
    assert significance.differ(seeds(4, 4), seeds(0, 4))  # p = 2 / 70
    assert not significance.differ(seeds(0, 8), seeds(0, 8))


def test_wilsons_interval():
    np.testing.assert_allclose(
        significance.share_interval(seeds(4, 8)), (0.2152, 0.7848), atol=1e-4
    )
    np.testing.assert_allclose(significance.share_interval(seeds(8, 8)), (0.6756, 1.0), atol=1e-4)
    np.testing.assert_allclose(significance.share_interval(seeds(0, 8)), (0.0, 0.3244), atol=1e-4)


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


def test_shares_join_sets_of_seeds_and_a_twin_lies_between_the_cells_beside_it():
    first = row([[100, None], [100, 200], [None, None], [100, 100]], [1, 1, 0, 1])
    second = {**first, "kind": "again"}
    joined = shares([first, second])
    assert joined["dot", 3e-3, 0.25].tolist() == [True, False, True, False]
    assert joined["dot", 3e-3, 0.0].tolist() == [True] * 4
    grid = [0.25 * 2**0.5, 0.5 * 2**0.5, 0.9]
    twin = row([[100] * 8, [None] * 8, [100] * 8], [1, 0, 1], score="twin", deviations=grid)
    score = row([[100] * 8, [100] * 8, [100] * 8, [100] * 8], [1, 1, 1, 1])
    assert cells_between([twin, score], "twin", "dot") == [True, False]
    gain = row([[None] * 24] * 4, [0] * 4, kind="gain")  # another map of the same score
    assert cells_between([twin, score, gain], "twin", "dot") == [True, False]


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
    additive = with_score(TINY, "additive")
    assert deviation_of(additive, 0.25) < 0.5 * deviation_of(additive)
    with pytest.raises(ValueError, match=r"^score .*additive.* must give .* deviation of 0\.0$"):
        deviation_of(additive, 0.0)


def test_a_gain_multiplies_the_kernels_of_the_score_alone():
    before = states(with_score(TINY, "additive"), range(2)).params
    after = training.changed(before, 2.0, 3.0)
    ratios = {}
    pairs = zip(*map(jax.tree.leaves_with_path, (before, after)), strict=True)
    for (path, old), (_, new) in pairs:
        names = tuple(entry.key for entry in path if hasattr(entry, "key"))
        if names[-1] == "factor":
            assert np.all(old == 1)
            assert np.all(new == 2)
        else:
            nonzero = old != 0
            ratios[names] = {*np.round(np.asarray(new[nonzero] / old[nonzero]), 4).tolist()}
    grown = {names for names, each in ratios.items() if each == {3.0}}
    assert {names[-2:] for names in grown} == {("score", "query_kernel"), ("score", "key_kernel")}
    assert all(each <= {1.0} for names, each in ratios.items() if names not in grown)
    assert any(names[-1] == "kernel" and each == {1.0} for names, each in ratios.items())


def test_a_training_takes_the_same_steps_whatever_trains_beside_it(monkeypatch):
    monkeypatch.setattr(training, "SOLVED", 0.6)
    task = with_score(TINY, "scaled")
    training_of = {seed: Start(1.0, 1e-2, seed) for seed in (3, 5)}
    others = [Start(50.0, 1e-4, 0), Start(0.5, 1e-2, 4)]
    steps = {}
    for seed, start in training_of.items():
        (steps[seed],), _ = steps_until_solved(task, [start], 300)
    beside, accuracy = steps_until_solved(task, [*others, *training_of.values()], 300)
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


def test_a_seed_that_never_solves_counts_twice_the_limit():
    row = {"solved": [[300.0, None, 1000.0]], "steps": 1000}
    assert censored(row).tolist() == [300, 2000, 1000]


# --- prediction: numbers at initialisation that predict a map ---


def test_equal_numbers_share_their_mean_rank():
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3.5, 3.5, by hand: products 3.75, squares 4.5.
    measured = prediction.rank_correlation([10, 20, 20, 30], [1, 5, 7, 7])
    assert measured == pytest.approx(3.75 / 4.5)
    assert prediction.rank_correlation([1, 2, 4], [0.3, 0.2, -9]) == pytest.approx(-1)
    assert np.isnan(prediction.rank_correlation([1, 1], [1, 2]))


def test_noise_leaves_the_diagonal_out():
    change = np.random.default_rng(0).normal(size=(4, 4))
    rows = [np.delete(change[a], a) for a in range(4)]
    by_hand = np.sqrt(np.mean([np.var(row) for row in rows]))
    np.testing.assert_allclose(prediction.noise(jnp.array(change)), by_hand, rtol=1e-5)


@pytest.mark.parametrize("name", ["general", "additive"])
def test_gain_is_the_growth_of_the_margin_in_a_small_sign_step(name):
    score = get_score(name)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, *kernels = (jnp.array(rng.normal(size=shape)) for shape in ((3, 2), (2, 2), (2, 2)))
        own = jax.tree.map(lambda p: p.astype(float), score.init(jax.random.key(0), 2, 2))
        leaves, structure = jax.tree.flatten((*kernels, own))
        measured = prediction.numbers_of(score, x, (*kernels, own))

        def margin(leaves):
            query_kernel, key_kernel, own = jax.tree.unflatten(structure, leaves)
            logits = np.asarray(score(own, x @ query_kernel, x @ key_kernel))
            logits = logits * prediction.DEVIATION / float(measured["own"])
            return np.mean([row[a] - row.mean() for a, row in enumerate(logits)])

        differences = 0.0
        for number, leaf in enumerate(leaves):
            for index in np.ndindex(leaf.shape):
                moved = [
                    margin([*leaves[:number], leaf.at[index].add(size), *leaves[number + 1 :]])
                    for size in (1e-5, -1e-5)
                ]
                differences += abs(moved[0] - moved[1]) / 2e-5
        np.testing.assert_allclose(measured["gain"], differences, rtol=1e-6)


@pytest.mark.parametrize(("score", "multiple"), [("scaled", "dot"), ("additive", "concat")])
def test_a_constant_factor_of_the_score_changes_nothing_but_its_own_deviation(score, multiple):
    row, other = (prediction.at_initialisation(name, seeds=1) for name in (score, multiple))
    ratio = other.pop("own") / row.pop("own")
    assert ratio == pytest.approx(8 if multiple == "dot" else 1, rel=1e-3)
    assert row == pytest.approx(other, rel=1e-2)
    assert row["gain"] > 0
    assert row["signal"] > 0


def test_the_steps_end_where_equal_tokens_are_found():
    found = prediction.at_initialisation("scaled", seeds=2)["steps"]
    assert 1 < found < prediction.MOST_STEPS


def test_no_seeds_are_refused():
    with pytest.raises(ValueError, match="seeds must be at least 1; got 0"):
        prediction.at_initialisation("scaled", seeds=0)
