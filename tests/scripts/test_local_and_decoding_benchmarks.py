"""The benchmarks of local attention, of decoding and of normalisers."""

import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.vocabulary import EOS, PAD, SOS

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # works share small programs


def usual_promotion(function):
    """Calls the function with JAX's default promotion, as a user does."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function()


def trial(monkeypatch, capsys, tmp_path, name, *options):
    """What a run writes and prints."""
    from benchmarks import attention_speed, measure

    monkeypatch.setattr(measure, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(attention_speed, "_SHORTEST_REPEAT", 0.005)
    out = tmp_path / "results.json"
    arguments = ("--benchmarks", name, "--repeats", 3, "--out", out, *options)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stopped:
        usual_promotion(lambda: runpy.run_path(str(SCRIPTS / "benchmark.py"), run_name="__main__"))
    assert not stopped.value.code
    written = json.loads(out.read_text())["benchmarks"]
    return written[name], capsys.readouterr().out, out


def check_medians(row, other):
    """Ratios and milliseconds follow from the measurements, the other's entries under its name."""
    calls = row.get("calls_in_a_repeat", 1)
    assert len(row["repeat_seconds"]) == len(row[f"{other}_repeat_seconds"]) == 3
    median = sorted(row["repeat_seconds"])[1] / calls
    assert row["milliseconds"] == pytest.approx(1000 * median)
    ratio = row[f"{other}_milliseconds"] / row["milliseconds"]
    assert row["times_ours"] == pytest.approx(ratio)
    if "target" in row:
        least = float(row["target"].removeprefix("at least "))
        assert row["met"] == ("yes" if ratio >= least else "no")


# --- windows ---


def test_rows_of_local_attention(monkeypatch, capsys, tmp_path):
    report, printed, out = trial(monkeypatch, capsys, tmp_path, "local", "--shrink", 256)
    rows = report["rows"]
    assert [(row["attention"], row["score"]) for row in rows] == [
        ("local-m", "scaled"),
        ("local-p (Gaussian)", "scaled"),
        ("local-m", "additive"),
    ]
    assert [row.get("target") for row in rows] == ["at least 5", None, None]
    assert rows[2]["shape"] == "B1 N1 T=S=32 D64 A64"
    for row in rows:
        check_medians(row, "global")
        assert row["radius"] == 1
        assert row["direction"] == "forward + backward"
        assert row["temporary_mib"] > 0
    assert "lengths were divided" in printed
    from benchmarks import readme_tables

    readme_tables.main(out)
    table = capsys.readouterr().out
    assert table.startswith("<!-- local -->\n| attention | work | local | global |")
    assert table.count("<!--") == 2
    assert table.count("\n| local-") == 3
    assert f"at least 5: {rows[0]['met']} |" in table


def test_works_of_local_attention(path):
    from benchmarks import local

    scaled, gaussian, additive = (windows.work for windows in local._rows())
    for work in (scaled, gaussian, additive):
        assert (work.lengths, work.dim, work.mask) == ((8192, 8192), 64, "")
        assert (work.batch, work.num_heads, work.backward, work.dtype) == (1, 1, True, "float32")
    assert (scaled.score, additive.score, additive.hidden_dim) == ("scaled", "additive", 64)
    assert local._RADIUS == 64


@pytest.mark.parametrize("gaussian", [False, True])
def test_local_attention_equals_a_masked_softmax(path, gaussian):
    from benchmarks import local
    from benchmarks.attention_works import Work

    work = Work("local", "scaled", 11, num_heads=2, batch=3, dim=5, backward=True)
    contestant = local._local(2, gaussian)(work)
    output, gradients = contestant.call()
    inputs, cotangent = work.arrays()
    distance = np.arange(11)[None, :] - np.arange(11)[:, None]

    def naive(inputs):
        query, key, value = (inputs[name] for name in ("query", "key", "value"))
        logits = query @ key.swapaxes(-1, -2) / 5**0.5
        weights = jax.nn.softmax(jnp.where(abs(distance) <= 2, logits, -jnp.inf))
        if gaussian:
            shifts = jnp.arange(11.0) - inputs["centers"][:, None]
            weights = weights * jnp.exp(-(shifts**2) / 2)  # sigma is half the radius, 1
        return weights @ value

    if gaussian:
        inputs["centers"] = np.arange(11, dtype=np.float32)

    @jax.jit
    def both(inputs, cotangent):
        output, pull_back = jax.vjp(naive, inputs)
        return output, pull_back(cotangent)[0]

    expected, expected_gradients = usual_promotion(lambda: both(inputs, cotangent))
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected_gradient in expected_gradients.items():
        leaves = map(jax.tree.leaves, (gradients[name], expected_gradient))
        for got, want in zip(*leaves, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)


# --- decoding ---


@pytest.mark.slow
def test_rows_of_decoding(monkeypatch, capsys, tmp_path):
    from benchmarks import decoding, readme_tables

    monkeypatch.setattr(decoding, "_BATCH", 3)
    report, printed, out = trial(monkeypatch, capsys, tmp_path, "decoding", "--shrink", 8)
    rows = report["rows"]
    assert [(row["score"], row["heads"]) for row in rows] == [
        ("scaled", 1),
        ("additive", 1),
        ("scaled", 4),
    ]
    assert [row.get("target") for row in rows] == ["at least 3", "at least 3", None]
    for row in rows:
        check_medians(row, "naive")
        assert row["shape"] == "B3 T=S=8 D64"
        assert row["tokens"] == 24
        assert row["tokens_per_second"] == pytest.approx(24_000 / row["milliseconds"])
        assert row["same_tokens"] == 1
    assert report["settings"]["max_length"] == 8
    assert "lengths were divided" in printed
    readme_tables.main(out)
    table = capsys.readouterr().out
    assert table.startswith("<!-- decoding -->\n| score | work | cached |")
    assert "| scaled dot, 4 heads | B3 T=S=8 D64 |" in table
    assert table.endswith("<!-- end of decoding -->\n\n")


@pytest.mark.parametrize(
    "settings",
    [
        {"score": "additive", "num_heads": 4},
        pytest.param({"score": "scaled"}, marks=pytest.mark.slow),
    ],
)
def test_both_ways_emit_the_same_tokens_and_never_end(path, settings):
    from benchmarks import decoding

    config = ModelConfig(dim=8, hidden_dim=8, encoder_layers=0, **settings)
    source = np.random.default_rng(3).integers(EOS + 1, 29, (5, 7)).astype(np.int32)
    lengths = np.full(5, 7, np.int32)

    @jax.jit
    def answers():
        params = decoding._never_ending(config)
        cached, naive = (
            decoding._decoded(config, decode, 7, params, source, lengths)
            for decode in (decoding._cached, decoding._naive)
        )
        # The most likely next token after each prefix, all at once.
        model = decoding.nnx.merge(decoding.nnx.graphdef(decoding._model(config)), params)
        inputs = jnp.pad(cached.tokens[:, :-1], ((0, 0), (1, 0)), constant_values=SOS)
        return cached, naive, model(source, lengths, inputs).argmax(-1)

    cached, naive, by_hand = answers()
    np.testing.assert_array_equal(cached.tokens, naive.tokens)
    np.testing.assert_allclose(cached.weights, naive.weights, atol=1e-6)
    assert not np.any(cached.tokens == EOS)
    assert len(np.unique(cached.tokens)) > 2
    np.testing.assert_array_equal(by_hand, cached.tokens)


def test_naive_decoding_stops_when_every_row_has_ended(path):
    from benchmarks import decoding

    config = ModelConfig(dim=8, hidden_dim=8, encoder_layers=0, decoder_self_attention=False)

    @jax.jit
    def tokens():
        params = decoding._never_ending(config)
        params["logits"]["bias"] = params["logits"]["bias"].at[EOS].set(1e9)
        source, lengths = jnp.full((2, 3), 5), jnp.array([3, 3])
        return decoding._decoded(config, decoding._naive, 4, params, source, lengths).tokens

    assert tokens().tolist() == [[EOS, PAD, PAD, PAD]] * 2


# --- normalisers ---


def test_rows_of_normalizers(monkeypatch, capsys, tmp_path):
    report, printed, _ = trial(monkeypatch, capsys, tmp_path, "normalizers", "--shrink", 256)
    rows = {row["normalizer"]: row for row in report["rows"]}
    peer = rows["softmax"]["milliseconds"]
    assert {"entmax", "sparsemax", "sigmoid", "ssmax", "softmax(sink=True)"} <= rows.keys()
    for name, row in rows.items():
        assert row["milliseconds"] == pytest.approx(1000 * sorted(row["repeat_seconds"])[1])
        assert row["times_softmax"] == pytest.approx(row["milliseconds"] / peer)
        if name != "softmax":
            most = float(row["target"].removeprefix("at most "))
            assert row["met"] == ("yes" if row["times_softmax"] <= most else "no")
    assert rows["entmax"]["memory_target"] == "at most 32"
    assert "softmax(sink=True)" in printed
