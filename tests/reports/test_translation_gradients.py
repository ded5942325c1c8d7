"""Gradients of a translation run: sentences in place of words, subwords as labels."""

import json
from unittest import mock

import jax
import numpy as np
import pytest
from command_lines import call, load
from conformance import quick_jit
from stand_in_training import scaled_at_each_step
from translation_cases import lines_of, run_task, write_text

from attention_jax.analysis import capture
from attention_jax.reports import gradient_report
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run
from attention_jax.tasks.vocabulary import EOS, padded_batch
from attention_jax.training.run import load_states, train_run

script = load("scripts/analyze_gradients.py")
CROSS = "decoder_0/cross_attention"
LINE = 1


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def workdir(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with mock.patch("attention_jax.training.run.train", scaled_at_each_step):
        train_run(run_task(text), folder)
    return folder


@pytest.fixture(scope="module")
def run(workdir):
    analysis = GradientAnalysis(iterations=2, samples=2)
    numbers = analyze_run(workdir, analysis, progress=lambda line: None)
    return json.loads(json.dumps(numbers))


def test_sentences_show_the_models_own_weights_with_subwords_on_the_axes(workdir, run):
    task, states = load_states(workdir)
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[0], states[6]().params)
    subwords = task.subwords(workdir)
    pair = [lines_of("validation", side)[LINE - 1] for side in ("de", "en")]
    sides = [[*ids, EOS] for ids in subwords.encode(pair)]
    # Alone, without the padding that the other sentence needs.
    batch = padded_batch([sides[0]], [sides[1]], 1, *map(len, sides))

    @quick_jit
    def weights_of(params, source, lengths, targets):
        seen = capture(task.bind(params), source, lengths, targets)
        return seen.attentions[CROSS].weights[0]

    weights = weights_of(params, batch.source, batch.source_lengths, batch.target_inputs)
    table = run["examples"]["6"][f"{LINE}: {pair[0]}"]
    assert table["column_labels"] == subwords.labels(sides[0])
    assert table["row_labels"] == subwords.labels(sides[1])
    assert table["row_labels"][-1] == "EOS"
    np.testing.assert_allclose(table["weights"], weights, atol=1e-5)
    np.testing.assert_allclose(np.sum(table["dlogits"], axis=1), 0, atol=1e-5)
    assert np.abs(table["dlogits"]).max() > 0


def test_every_number_of_the_report_is_there(run):
    by_step = run["by_step"]
    assert by_step["steps"][0] == 0
    assert by_step["steps"][-1] == run["step"] == 6
    # The first loss of a model that knows nothing: about log V.
    assert by_step["loss"][0] == pytest.approx([np.log(400)] * 2, abs=1.5)
    assert set(run["gradient_norms"]) >= {"embeddings", "decoder, cross attention"}
    assert np.shape(run["scale_sweep"]["6"]["entropy"])[0] == 2
    assert len(run["curvature"]["6"]["largest"]) == 2
    page = gradient_report.report([run], command="analyze it")
    assert page.count("<img") == 2 + 1 + 1
    assert page.count("<iframe") == 1


def test_text_that_has_changed_is_refused(workdir, text, monkeypatch, capsys):
    monkeypatch.setattr(script, "analyze_run", None)
    path = text / "validation.de"
    before = path.read_text()
    path.write_text(before.replace("e", "a", 1))
    try:
        assert call(script, "--workdir", workdir, monkeypatch=monkeypatch) == 2
    finally:
        path.write_text(before)
    line = capsys.readouterr().err
    assert "the validation text that config.json names" in line
