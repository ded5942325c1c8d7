"""Pairs, buckets and batches, against brute force and rows written out by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.tasks.translation.batches import Batches, Pairs, best_widths, encode_pairs
from attention_jax.tasks.translation.text import ParallelText
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Batch


class Letters:
    """Stands in for `Subwords`: one id a letter, "a" is 3."""

    def encode(self, sentences):
        return [[3 + ord(letter) - ord("a") for letter in sentence] for sentence in sentences]


def numbered(lengths) -> Pairs:
    """Pairs of these (source, target) lengths, EOS included; their first ids tell them apart."""
    sides = zip(*lengths, strict=True)
    rows = (
        [[*[10 + number] * (length - 1), EOS] for number, length in enumerate(side)]
        for side in sides
    )
    return Pairs(*rows, 0)


def some_lengths(count: int, longest: int = 13, seed: int = 0) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(a), int(b)) for a, b in rng.integers(2, longest + 1, (count, 2))]


def of_epoch(batches: Batches, seed: int, epoch: int) -> list[Batch]:
    first = epoch * batches.steps_per_epoch
    return [batches.batch(seed, first + step) for step in range(batches.steps_per_epoch)]


def members(batch: Batch) -> list[int]:
    """Which pairs: a source and its target have the same number."""
    used = batch.source_lengths > 0
    numbers = batch.source[used, 0] - 10
    np.testing.assert_array_equal(numbers, batch.targets[used, 0] - 10)
    return numbers.tolist()


def order(batches: Batches, seed: int, epoch: int) -> list[list[int]]:
    return [members(batch) for batch in of_epoch(batches, seed, epoch)]


CASES = settings(deadline=None, max_examples=50)
SHAPES = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 97),
        "most_pairs": st.none() | st.integers(1, 13),
        "buckets": st.integers(1, 5),
        "multiple_of": st.sampled_from([1, 2, 3, 4]),
    }
)
LENGTHS = st.lists(st.tuples(st.integers(2, 11), st.integers(2, 11)), min_size=1, max_size=43)


def test_pairs_end_with_eos_and_what_is_left_out_is_counted():
    text = ParallelText(
        ["ab", "", "abc", "abcd", "c", "", "abcd", "d"],
        ["b", "a", "", "a", "abcd", "", "abcd", "abc"],
    )
    pairs = encode_pairs(text, Letters(), 3)
    assert pairs.source == [[3, 4, 2], [6, 2]]
    assert pairs.target == [[4, 2], [3, 4, 5, 2]]
    assert pairs.skipped == 6
    assert len(encode_pairs(text, Letters(), 4).source) == 5


def test_no_pair_is_left():
    text = ParallelText(["abc", "", "abcde"], ["a", "a", "ab"])
    with pytest.raises(ValueError, match="no pair of sentences is left to learn from: 3 have"):
        encode_pairs(text, Letters(), 2)


def padded_to(lengths: list[int], widths) -> int:
    """Tokens, each length padded to the next of the widths."""
    return sum(min(width for width in widths if width >= length) for length in lengths)


@CASES
@given(st.lists(st.integers(1, 13), min_size=1, max_size=29), st.integers(1, 6))
def test_widths_are_the_best_of_all_choices(lengths, count):
    found = best_widths(np.array(lengths), count)
    assert found == sorted(set(found))
    assert found[-1] == max(lengths)
    assert 1 <= len(found) <= count
    sizes = sorted(set(lengths))
    choices = [
        (*chosen, sizes[-1])
        for number in range(min(count, len(sizes)))
        for chosen in itertools.combinations(sizes[:-1], number)
    ]
    assert padded_to(lengths, found) == min(padded_to(lengths, choice) for choice in choices)


@CASES
@given(LENGTHS, SHAPES)
def test_buckets_are_narrow_and_their_batches_few_and_alike(lengths, options):
    batches = Batches(numbered(lengths), **options)
    bucket_of = {int(row): n for n, bucket in enumerate(batches.buckets) for row in bucket.rows}
    sizes: dict[int, list[int]] = {}
    for numbers in order(batches, 0, 0):
        (bucket,) = {bucket_of[number] for number in numbers}
        sizes.setdefault(bucket, []).append(len(numbers))
    assert 1 <= len(batches.buckets) <= options["buckets"]
    seen = []
    for number, bucket in enumerate(batches.buckets):
        inside = [lengths[row] for row in bucket.rows]
        assert bucket.source_width == max(source for source, _ in inside)
        assert bucket.target_width == max(target for _, target in inside)
        seen.append((min(max(pair) for pair in inside), max(max(pair) for pair in inside)))
        most = max(options["tokens"] // (bucket.source_width + bucket.target_width), 1)
        most = min(options["most_pairs"] or most, most)
        assert len(sizes[number]) == bucket.batches == -(-len(bucket.rows) // most)
        assert max(sizes[number]) - min(sizes[number]) <= 1
        multiple = options["multiple_of"]
        assert bucket.batch_size == -(-max(sizes[number]) // multiple) * multiple
    assert all(left[1] < right[0] for left, right in itertools.pairwise(seen))


@CASES
@given(LENGTHS, SHAPES)
def test_rows_are_the_pairs_shifted_and_padded_and_each_comes_once(lengths, options):
    pairs, found = numbered(lengths), []
    alone = order(Batches(pairs, **{**options, "multiple_of": 1}), 3, 1)
    for batch in of_epoch(Batches(pairs, **options), 3, 1):
        found.append(numbers := members(batch))
        rows, source_width = batch.source.shape
        target_width = batch.targets.shape[1]
        for name, array in batch._asdict().items():
            assert array.dtype == np.int32, name
        for row in range(rows):
            source, target = (
                (pairs.source[numbers[row]], pairs.target[numbers[row]])
                if row < len(numbers)
                else ([], [])
            )
            assert batch.source[row].tolist() == source + [PAD] * (source_width - len(source))
            assert batch.targets[row].tolist() == target + [PAD] * (target_width - len(target))
            inputs = [SOS, *target[:-1]]
            expected = inputs + [PAD] * (target_width - len(inputs))
            assert batch.target_inputs[row].tolist() == expected
            assert batch.source_lengths[row] == len(source)
            assert batch.target_lengths[row] == len(target)
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    assert found == alone  # rows that fill up devices change no batch


def test_epochs_and_seeds_have_orders_of_their_own():
    batches = Batches(numbered(some_lengths(97)), tokens=101, buckets=3)
    orders = [order(batches, seed, epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert one != other
        assert sorted(map(sorted, one)) != sorted(map(sorted, other))  # not the same batches either


def test_all_seeds_take_the_buckets_in_the_same_turns():
    batches = Batches(numbered(some_lengths(97)), tokens=101, buckets=3)

    def turns(seed, epoch):
        return [
            batch.source.shape + batch.targets.shape for batch in of_epoch(batches, seed, epoch)
        ]

    assert turns(0, 0) == turns(1, 0) == turns(2**31 - 1, 0)
    assert len(set(turns(0, 0))) == 3
    assert turns(0, 0) not in (turns(0, 1), sorted(turns(0, 0)))


def test_the_order_of_an_epoch_is_pinned():
    """A run that goes on under another NumPy must meet the same batches."""
    lengths = [(2 + number % 5, 2 + number % 3) for number in range(17)]
    batches = Batches(numbered(lengths), tokens=31, buckets=2)
    assert order(batches, 3, 11) == [
        [2, 16, 10],
        [0, 7, 1],
        [3, 8, 13],
        [6, 5, 11],
        [4, 14, 9],
        [12, 15],
    ]
