"""A wrong call ends in one short line that names the argument, whatever stands in its place.

Each row of a table has a function, a right call of it, and strategies for wrong arguments. An
example draws one wrong value for each argument, and the arguments are tried one after another.
"""

import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

import attention_jax as aj

LIBRARY = Path(aj.__file__).parent
LONGEST_MESSAGE = 600  # characters; the longest messages list all scores or parameters


def ones(*shape, dtype="f4"):
    return np.ones(shape, dtype)


def one_of(*values):
    return st.sampled_from(values)


# --- wrong values of a kind of argument ---

no_arrays = one_of("text", b"text", {"a": 1.0}, [[[1.0], [1.0, 2.0]]], np.array([["a"]]), object())
no_floats = no_arrays | one_of(
    ones(2, 2, dtype=int), 3, ones(2, 2, dtype=bool), ones(2, 2, dtype=complex), {1.0}, len,
    np.array([["2020-01-01"]], "datetime64[D]"),
)  # fmt: skip
no_tokens = no_floats | one_of(None, 1.0, ones(2), ones(7, 2, 9))
no_integers = no_arrays | one_of(ones(2), 2.0, ones(2, dtype=bool), ones(2, dtype=complex))
no_size = one_of("2", [2], 2.5, 2.0, 0) | st.integers(max_value=-1) | st.floats()
no_size_or_none = no_size | st.none()
no_count = one_of("2", [2], 2.5, 2.0, None, True) | st.integers(max_value=-1)  # may be 0
no_word = one_of("x", "", 3, [], ["x"], object) | st.text(st.characters(codec="ascii"), min_size=30)
no_number = one_of("a", None, 1j, {}, [[1.0], []])
no_rate = no_number | one_of(1.0, np.nan, np.inf, [0.1]) | st.floats(max_value=-1e-3)
no_positive = one_of("a", np.nan, [1.0, 0.0], {}) | st.floats(max_value=0)
no_mask = no_arrays | one_of(1, 1.0, ones(2, 3), ones(7, 7, dtype=bool), ones(2, 3, dtype=int))
no_bias = no_floats.filter(lambda x: not isinstance(x, dict)) | one_of(ones(7, 7), ones(7, 1, 1, 1))
no_score = one_of(
    "skaled", "", ":", "nowhere:Score", "os:path", "..:x", 3, None, object(), aj.Mask, "adit(a=1)",
    "nowhere:Name(a=1)", "math:pi", "additive(hiden_dim=3)", "additive(hidden_dim=0)",
    "additive(hidden_dim=__import__('os').getpid())", "softcap(cap=additive)", "softcap(score=3)",
    "softcap(cap=1e-40)", "additive(32)", "additive(**{'hidden_dim': 3})",
    "additive(hidden_dim=3, hidden_dim=4)", "additive(hidden_dim=3", "additive(hidden_dim=3) + dot",
    "additive(hidden_dim=3\0)",
)  # fmt: skip
no_normalizer = one_of(
    "softmx", "", "entmax(", "entmax(alpha=1.0)", "entmax(alpha=1e7)", "entmax(alpha='2')",
    "entmax(1.5, 2)",
    "softmax(sink=1)", "sigmoid(bias=inf)", "log_scaled(normalizer=nothing)", "os:path", 3, None,
    ["softmax"], aj.Normalizer,
)  # fmt: skip
no_params = one_of(3.0, "v", [1.0], {"wrong": ones(2, 2)}, {"kernel": None}, {"kernel": "text"})
no_rng = one_of(
    7, 1.5, "key", {}, [1, 2], np.zeros(3, np.uint32), np.zeros(2, np.int32), np.zeros(2),
    jax.random.split(jax.random.key(0), 3),
)  # fmt: skip
no_offset = one_of(1.0, "1", None, [1]) | st.integers(min_value=2**31)
no_side = one_of("1", [1], 1.5) | st.integers(max_value=-1) | st.integers(min_value=2**31)
no_centers = one_of("text", None, True, 1.0, {}, [[1.0]] * 3, ones(2, dtype=complex), ones(7))

# --- tables of mistakes ---


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
    "num_heads": ("heads", "qkv_dim"), "cache": ("batch_shape", "max_length"),
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
