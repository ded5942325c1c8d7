"""Wrong values of a kind of argument: `no.floats` draws what is no array of floats."""

import jax
import numpy as np
from hypothesis import strategies as st

import attention_jax as aj


def ones(*shape, dtype="f4"):
    return np.ones(shape, dtype)


def one_of(*values):
    return st.sampled_from(values)


arrays = one_of("text", b"text", {"a": 1.0}, [[[1.0], [1.0, 2.0]]], np.array([["a"]]), object())
floats = arrays | one_of(
    ones(2, 2, dtype=int), 3, ones(2, 2, dtype=bool), ones(2, 2, dtype=complex), {1.0}, len,
    np.array([["2020-01-01"]], "datetime64[D]"),
)  # fmt: skip
tokens = floats | one_of(None, 1.0, ones(2), ones(7, 2, 9))
integers = arrays | one_of(
    ones(2), 2.0, ones(2, dtype=bool), ones(2, dtype=complex), np.array([2**40]),
    np.array([2**31], np.uint32),
)  # fmt: skip
size = one_of("2", [2], 2.5, 2.0, 0) | st.integers(max_value=-1) | st.floats()
size_or_none = size | st.none()
count = one_of("2", [2], 2.5, 2.0, None, True) | st.integers(max_value=-1)  # may be 0
word = one_of("x", "", 3, [], ["x"], object) | st.text(st.characters(codec="ascii"), min_size=30)
number = one_of("a", None, 1j, {}, [[1.0], []])
rate = number | one_of(1.0, np.nan, np.inf, [0.1]) | st.floats(max_value=-1e-3)
positive = one_of("a", np.nan, [1.0, 0.0], {}) | st.floats(max_value=0)
mask = arrays | one_of(
    1, 1.0, ones(2, 3), ones(7, 7, dtype=bool), ones(2, 3, dtype=int), aj.causal_mask, aj.Mask
)  # fmt: skip
bias = floats.filter(lambda x: not isinstance(x, dict)) | one_of(
    ones(7, 7), ones(7, 1, 1, 1), aj.causal_mask
)
score = one_of(
    "skaled", "", ":", "nowhere:Score", "os:path", "..:x", 3, None, object(), aj.Mask, "adit(a=1)",
    "nowhere:Name(a=1)", "math:pi", "additive(hiden_dim=3)", "additive(hidden_dim=0)",
    "additive(hidden_dim=__import__('os').getpid())", "softcap(cap=additive)", "softcap(score=3)",
    "softcap(cap=1e-40)", "additive(32)", "additive(**{'hidden_dim': 3})",
    "additive(hidden_dim=3, hidden_dim=4)", "additive(hidden_dim=3", "additive(hidden_dim=3) + dot",
    "additive(hidden_dim=3\0)",
)  # fmt: skip
normalizer = one_of(
    "softmx", "", "entmax(", "entmax(alpha=1.0)", "entmax(alpha=1e7)", "entmax(alpha='2')",
    "entmax(1.5, 2)",
    "softmax(sink=1)", "sigmoid(bias=inf)", "log_scaled(normalizer=nothing)", "os:path", 3, None,
    ["softmax"], aj.Normalizer,
)  # fmt: skip
params = one_of(3.0, "v", [1.0], {"wrong": ones(2, 2)}, {"kernel": None}, {"kernel": "text"})
rng = one_of(
    7, 1.5, "key", {}, [1, 2], np.zeros(3, np.uint32), np.zeros(2, np.int32), np.zeros(2),
    jax.random.split(jax.random.key(0), 3),
)  # fmt: skip
offset = one_of(1.0, "1", None, [1]) | st.integers(min_value=2**31)
side = one_of("1", [1], 1.5) | st.integers(max_value=-1) | st.integers(min_value=2**31)
centers = one_of("text", None, True, 1.0, {}, [[1.0]] * 3, ones(2, dtype=complex), ones(7))
