"""scripts/benchmark.py: the table, the JSON, the peer and its absence, without real timing."""

import importlib.util
import itertools
import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy_gru import numpy_logits

from attention_jax.tasks.vocabulary import PAD, SOS

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCORES = ["additive", "dot", "general", "scaled"]
V, E, H, B, S, T = 29, 5, 7, 3, 11, 13  # vocabulary, embedding, hidden, batch, source, target


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def peer():
    pytest.importorskip("torch")
    from benchmarks import pytorch_gru_reverser

    return pytorch_gru_reverser


class NoTorch:
    """A module finder that raises for torch."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoTorch, *sys.meta_path])


def command(monkeypatch, *arguments):
    """Exit status of the script, run in this process."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    monkeypatch.setenv("COLUMNS", "200")  # tyro draws a frame of this width around a mistake
    # The script as a user runs it; optax's schedules do not pass under strict promotion.
    usual = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with pytest.raises(SystemExit) as stopped, usual[0], usual[1]:
        runpy.run_path(str(SCRIPTS / "benchmark.py"), run_name="__main__")
    return stopped.value.code or 0


def tiny(monkeypatch, capsys, tmp_path, *arguments):
    from benchmarks import reversal_training

    monkeypatch.setattr(reversal_training, "_TRIAL_STEPS", 1)
    out = tmp_path / "results.json"
    sizes = ("--repeats", 3, "--steps", 2, "--seeds", 2, "--out", out)
    status = command(monkeypatch, "--benchmarks", "reversal", "--scores", *arguments, *sizes)
    assert status == 0
    return json.loads(out.read_text()), capsys.readouterr().out


@pytest.mark.slow
def test_without_torch_only_the_peer_is_absent(monkeypatch, capsys, tmp_path, no_torch):
    results, printed = tiny(monkeypatch, capsys, tmp_path, "dot")
    *ours, peer = results["benchmarks"]["reversal"]["rows"]
    assert [row["model"] for row in ours] == ["ours", "ours, a seed after another"]
    assert peer["model"] == "PyTorch GRU: absent"
    assert "torch" in peer["absent"]
    assert peer["absent"] in printed
    assert ".venv/bin/pip install -e '.[bench]'" in printed
    for row in ours:
        assert row["times_peer"] is None


def check_ours(row):
    """The row's numbers follow from its measurements."""
    assert row["seeds"] == 2
    assert len(row["repeat_seconds"]) == 3
    rate = 2 * 2 / sorted(row["repeat_seconds"])[1]
    assert row["steps_per_second"] == pytest.approx(rate)
    assert row["seconds"] == pytest.approx(2 * 2500 / rate)
    assert row["seconds_with_compile"] == pytest.approx(row["seconds"] + row["compile_seconds"])


def test_rows_follow_from_the_measurements(monkeypatch, capsys, tmp_path, peer):
    results, printed = tiny(monkeypatch, capsys, tmp_path, "general")
    assert "jax" in results["environment"]["packages"]
    assert len(results["environment"]["sources"]) == 64
    assert results["command"].startswith("python scripts/benchmark.py")
    report = results["benchmarks"]["reversal"]
    assert report["settings"]["steps"] == 2
    together, in_turn, gru = report["rows"]
    for row in (together, in_turn):
        check_ours(row)
        assert row["times_peer"] == pytest.approx(gru["seconds"] / row["seconds"])
        ratio = gru["seconds"] / row["seconds_with_compile"]
        assert row["times_peer_with_compile"] == pytest.approx(ratio)
    assert gru["seeds"] == 1
    assert gru["times_peer"] == 1
    assert gru["parameters"] == 119_197
    assert gru["seconds"] == pytest.approx(2 * 2500 * sorted(gru["repeat_seconds"])[1] / 2)
    assert gru["steps_per_second"] == pytest.approx(2 * 2500 / gru["seconds"])
    for row in report["rows"]:
        assert row["model"] in printed
        assert f"{row['parameters']:,}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scores", "dott"], "did you mean 'dot'?"),
        (["--repeats", 0], "repeats must be at least 1; got 0"),
        (["--seeds", -1], "seeds must be at least 1; got -1"),
        (["--steps", 37], "a multiple of it; got 37"),
        (["--out", "nowhere/results.json"], "got nowhere/results.json"),
        (
            ["--benchmarks", "reversals"],
            "ring, crossover, normalizers, reversal, translation; got 'reversals'; did you"
            " mean 'reversal'?",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capsys, arguments, message):
    assert command(monkeypatch, *arguments) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "must be" in line)
    assert message in line


def test_by_default_scores_are_the_four_of_the_literature():
    from benchmarks.measure import Options

    from experiments.reversal import reversal_comparison as experiment

    assert list(Options().scores) == list(experiment.Config().scores) == SCORES
    # The quickstart leaves the scores to the experiment.
    quickstart = (SCRIPTS / "quickstart").read_text()
    assert "experiments.reversal.reversal_comparison" in quickstart
    assert "--scores" not in quickstart


def test_contestants_take_turns_and_the_first_call_of_a_turn_does_not_count(monkeypatch):
    from benchmarks import measure

    calls, now = [], [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def work(name, durations):
        def one_call():
            calls.append(name)
            now[0] += next(durations)

        return one_call

    contestants = {
        "quick": work("quick", itertools.cycle([0.25, 0.125, 0.125])),
        "slow": work("slow", itertools.repeat(2.0)),
    }
    seconds = measure.interleaved_seconds(contestants, 3, {"slow": 2})
    assert calls == ["quick", "quick", "quick", "slow"] * 2 + ["quick"] * 3
    assert seconds == {"quick": [0.125] * 3, "slow": [2.0] * 2}


# --- the peer is the documented model ---


@pytest.mark.parametrize(
    ("score", "attention", "total", "total_96"),
    [
        ("additive", 8256, 63_773, 128_509),
        ("dot", 0, 55_517, 109_981),
        ("general", 4096, 59_613, 119_197),
        ("scaled", 0, 55_517, 109_981),
    ],
)
def test_parameters_of_the_peer(peer, score, attention, total, total_96):
    # At size 64 the chapter prints them. At size 96, which it trains, they are computed by hand:
    # embeddings 2 * 29 * 32, encoder 3 * 96 * (32 + 96 + 2), decoder 3 * 96 * (32 + 96 + 96 + 2),
    # logits (192 + 1) * 29.
    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    model = peer.Reverser(score, V, embedding_dim=32, hidden_dim=64)
    assert count(model.score) == attention
    assert count(model) == total
    assert count(peer.Reverser(score, V, embedding_dim=32, hidden_dim=96)) == total_96


def small_model(peer, score):
    import torch

    torch.manual_seed(2)
    model = peer.Reverser(score, V, embedding_dim=E, hidden_dim=H).double()
    rng = np.random.default_rng(3)
    return model, rng.integers(0, V, (B, S)), rng.integers(0, V, (B, T))


def state_of(model):
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("score", SCORES)
def test_logits_of_the_peer_equal_a_gru_in_numpy(peer, score):
    import torch

    model, source, target_inputs = small_model(peer, score)
    with torch.no_grad():
        logits = model(torch.as_tensor(source), torch.as_tensor(target_inputs)).numpy()
    expected = numpy_logits(score, state_of(model), source, target_inputs)
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_the_peer_equal_differences_of_the_numpy_model(peer, score):
    import torch

    model, source, target_inputs = small_model(peer, score)
    source, target_inputs = source.clip(1), target_inputs.clip(1)  # PAD's embedding learns nothing
    rng = np.random.default_rng(5)
    cotangent = rng.normal(size=(B, T, V))
    logits = model(torch.as_tensor(source), torch.as_tensor(target_inputs))
    (logits * torch.as_tensor(cotangent)).sum().backward()
    state = state_of(model)
    for name, parameter in model.named_parameters():
        direction, step = rng.normal(size=parameter.shape), 1e-6

        def value(sign, name=name, move=step * direction):
            moved = {**state, name: state[name] + sign * move}
            return (numpy_logits(score, moved, source, target_inputs) * cotangent).sum()

        slope = (parameter.grad.numpy() * direction).sum()
        difference = (value(1) - value(-1)) / (2 * step)
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.fixture
def training(peer):
    return peer.Training(
        "scaled",
        alphabet_size=26,
        batch_size=67,
        min_length=3,
        max_length=8,
        learning_rate=3e-3,
        clip_norm=1.0,
        total_steps=41,
        embedding_dim=E,
        hidden_dim=H,
    )


def test_batches_of_the_peer_are_reversals(training):
    from attention_jax.tasks.vocabulary import EOS, PAD, SOS

    lengths = set()
    for source, inputs, targets in zip(*(x.tolist() for x in training.batch()), strict=True):
        letters = [token for token in source if token != PAD]
        padding = [PAD] * (8 - len(letters))
        assert min(letters) >= 3
        assert max(letters) < V
        assert source == letters + padding
        assert inputs == [SOS, *letters[::-1], *padding]
        assert targets == [*letters[::-1], EOS, *padding]
        lengths.add(len(letters))
    assert lengths == set(range(3, 9))


def test_the_peer_learns_and_its_rate_falls_along_a_cosine(training):
    training.threads = 1
    losses = training.steps(41)
    assert losses[0] == pytest.approx(np.log(V), rel=0.1)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert training._schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("faster", [1, 3])
def test_the_peer_runs_with_the_faster_number_of_threads(peer, training, monkeypatch, faster):
    import torch

    now = 0.0

    def step():
        nonlocal now
        now += 1 if torch.get_num_threads() == faster else 2

    monkeypatch.setattr(training, "step", step)
    monkeypatch.setattr(peer.time, "perf_counter", lambda: now)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        training.choose_threads(2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert training.threads == faster


def test_the_peers_mask_hides_padding():
    torch = pytest.importorskip("torch")
    peer = importlib.import_module("benchmarks.pytorch_gru_reverser")
    torch.manual_seed(0)
    model = peer.Reverser("scaled", 29, embedding_dim=5, hidden_dim=7)
    source, inputs = torch.tensor([[3, 9, 4]]), torch.tensor([[SOS, 4, 9]])
    padded = torch.nn.functional.pad(source, (0, 2), value=PAD)
    expected = model(source, inputs)
    torch.testing.assert_close(model(padded, inputs, True), expected)
    assert (model(padded, inputs) - expected).abs().max() > 1e-4
