"""A wrong call ends in one short line that names the argument, whatever stands in its place.

Each row of a table has a function, a right call of it, and strategies for wrong arguments. An
example draws one wrong value for each argument, and the arguments are tried one after another.
"""

import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

import attention_jax as aj

LIBRARY = Path(aj.__file__).parent
LONGEST_MESSAGE = 600  # characters; the longest messages list all scores or parameters


def using(function, **also):
    """Returns the function with a part of its arguments, under a name for the test."""

    def call(**arguments):
        return function(**also, **arguments)

    call.__name__ = f"{function.__name__}, {', '.join(also)}"
    return call


# A mistake may be told by another argument that it contradicts.
ALSO_NAMED = {
    "query": ("key",), "normalizer": ("alpha", "bias", "scale", "sink"),
    "normalizer_params": ("sink",), "table": ("buckets",),
    "num_heads": ("heads", "qkv_dim"), "cache": ("batch_shape", "max_length", "dtype"),
    "mask": ("centers", "query_segments"), "source": ("target_inputs",),
    "score": ("pair", "scale", "hidden_dim", "cap"), "return_statistics": ("statistics",),
}  # fmt: skip


def refuses(rows):
    """The test that each function refuses each wrong argument.

    Args:
        rows: of (function, a right call, {argument: wrong values}).
    """

    @pytest.mark.parametrize("number", range(len(rows)), ids=[row[0].__name__ for row in rows])
    @examples(4)
    @given(data=st.data())
    def test(number, data):
        function, right, wrong = rows[number]
        for argument, value in data.draw(st.fixed_dictionaries(wrong)).items():
            check_refusal(function, right | {argument: value}, argument)

    return test


def refused(message, *calls):
    """Asserts that each call ends in one short line in which the pattern is; returns the last."""
    for call in calls:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) <= LONGEST_MESSAGE
    return str(caught.value)


def check_refusal(function, arguments, argument):
    """Asserts that the library itself raises a ValueError of one line that names the argument."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is checked below
        function(**arguments)
    raised_in = Path(traceback.extract_tb(caught.value.__traceback__)[-1].filename)
    assert LIBRARY in raised_in.parents, f"{argument}: {raised_in}'s error: {caught.value!r}"
    message = str(caught.value)
    assert "\n" not in message, message
    assert len(message) <= LONGEST_MESSAGE, message
    names = (argument, *ALSO_NAMED.get(argument, ()))
    assert any(name in message for name in names), f"{argument} is not named: {message}"
