"""Models of characters: n-grams against numbers by hand, the choice, and twins."""

import dataclasses

import numpy as np
import pytest

from experiments import lab
from experiments.bench import language, ngrams
from experiments.bench.characters import WORST, bits_of


def test_bigrams_by_hand():
    """abac has the bigrams ab, ba, ac: after a, of two bigrams, b and c each once."""
    unigram = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}  # each follows one byte
    unigram = {w: 0.25 / 3 + 0.75 * p / 256 * 3 for w, p in unigram.items()}
    unigram["z"] = 0.75 / 256
    expected = {
        "ab": (0.25 + 0.75 * 2 * unigram["b"]) / 2,
        "ba": 0.25 + 0.75 * unigram["a"],
        "aa": 0.75 * unigram["a"],
        "az": 0.75 * unigram["z"],
        "zc": unigram["c"],  # z is not read
    }
    for text, probability in expected.items():
        found, size = ngrams.probabilities(b"abac", text.encode(), 2)
        assert found == pytest.approx([probability]), text
    assert size == 3 + 3


@pytest.mark.parametrize("order", language.ORDERS)
def test_the_probabilities_of_the_256_bytes_sum_to_1(order):
    read = bytes(np.random.default_rng(0).integers(97, 101, 300, np.uint8))
    for context in (read[10 : 10 + order - 1], b"\x00a\x00b"[: order - 1]):
        each = [ngrams.probabilities(read, context + bytes([w]), order)[0] for w in range(256)]
        assert np.sum(each) == pytest.approx(1, abs=1e-12)
        assert np.min(each) > 0


def test_bits_of_n_grams_are_per_character_and_know_the_context():
    read, text = b"ab" * 500, b"abababab"
    one, two = ngrams.rows_of(read, text, (1, 2))
    assert one["bits"] == pytest.approx(1, abs=0.02)
    assert two["bits"] < 0.01
    (accents,) = ngrams.rows_of("é".encode() * 500, "éééé".encode(), (1,))
    assert accents["bits"] == pytest.approx(2, abs=0.05)  # two bytes with one bit each


@pytest.fixture
def config(tmp_path):
    words = np.random.default_rng(0).choice(["to", "be", "or", "not", "é"], 8000)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return dataclasses.replace(language.QUICK, text=path, budget=0.01, workdir=tmp_path)


def test_dot_and_scaled_dot_are_twins_and_a_training_that_diverges_guesses(config):
    """A factor of 1 / sqrt(32), the root of the features of a head, makes dot scaled dot."""
    bits = {}
    for score, unit in (("scaled", 1.0), ("dot", 32**-0.5)):
        task = config.task(score)
        cells = [(3, unit, 1e-2), (4, unit, 1e-2), (3, 4 * unit, 1e-2), (3, unit, np.nan)]
        bits[score] = bits_of(task, cells, task.tenths()[1])
    np.testing.assert_allclose(bits["dot"], bits["scaled"], atol=2e-3)
    assert len({*bits["dot"].round(3)}) == 4  # seed and factor matter
    assert np.all(bits["dot"][:3] < 6)
    assert bits["dot"][3] == WORST


@pytest.mark.parametrize(
    ("costs", "first", "least", "tried"),
    [
        ([9, 3, 1, 2, 9, 9], range(1, 5), 2, {1, 2, 3, 4}),
        ([9, 3, 2, 2, 1, 0], range(1, 5), 5, {1, 2, 3, 4, 5}),
        ([1, 2, 3, 4, 5, 6], range(2, 4), 0, {0, 1, 2, 3}),
        ([1], range(1), 0, {0}),
    ],
)
def test_a_sweep_goes_on_where_the_last_value_is_the_best(costs, first, least, tried):
    asked = []
    found = language.least_of(lambda i: asked.append(i) or costs[i], first, len(costs))
    assert (found, {*asked}) == (least, tried)
    assert len(asked) == len(tried)


def test_the_parts_are_tenths_and_in_order(config):
    parts = config.task("scaled").tenths()
    text = config.text.read_text()
    assert b"".join(parts).decode() == text
    for part in parts[1:]:
        assert len(part.decode()) == pytest.approx(len(text) / 10, abs=2)
    config.text.write_text(text[:4000])
    with pytest.raises(ValueError, match=r"^each tenth of .* must have 513 bytes; got \d+$"):
        config.task("scaled").tenths()


def test_parts_of_a_run_fill_one_folder(config, monkeypatch):
    monkeypatch.setattr(language, "measured", lambda _, score: [{"score": score}])
    config = dataclasses.replace(config, scores=("scaled", "dot", "l2"))
    rows, missing = lab.rows_of(language, config, "2/2")
    assert ([each["score"] for each in rows], missing) == (["scaled", "l2"], 2)
    rows, missing = lab.rows_of(language, config, "1/2")
    assert (len(rows), missing) == (3 + len(language.ORDERS), 0)
    other = config.text.rename(config.text.with_name("other.txt"))
    monkeypatch.setattr(language, "measured", pytest.fail)  # the same text elsewhere is kept
    assert len(language.run(dataclasses.replace(config, text=other))) == len(rows)
