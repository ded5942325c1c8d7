"""From a run's folder to numbers, figures and the page: scripts/analyze_gradients.py."""

import copy
import json
import re
from unittest import mock

import jax
import numpy as np
import pytest
from command_lines import call, load
from conformance import quick_jit
from html_reader import Reader
from stand_in_training import scaled_at_each_step

from attention_jax.analysis import capture
from attention_jax.analysis.attention_page.page_data import decoded_numbers
from attention_jax.nn.config import ModelConfig
from attention_jax.reports import gradient_report
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run, load_analyzed_run
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import load_states, train_run
from attention_jax.training.task import TrainConfig

script = load("scripts/analyze_gradients.py")
CROSS = "decoder_0/cross_attention"


TASK = Reversal(
    ModelConfig(
        score="general",
        dim=8,
        hidden_dim=12,
        positions="learned",
        position_limit=13,
        encoder_layers=0,
        decoder_self_attention=False,
    ),
    TrainConfig(seeds=2, steps=6, log_every=2, checkpoint_every=2, batch_size=3),
)
LABEL = "general, softmax, positions learned position_limit=13"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with mock.patch("attention_jax.training.run.train", scaled_at_each_step):
        train_run(TASK, folder)
    return folder


# The model has no encoder; the line that was logged has numbers of one.
ENCODER = "encoder_0/self_attention"
LOGGED = {
    f"{CROSS}/entropy": [1.25, 2.5],
    f"{CROSS}/logit_sd": [3.0, 4.0],
    f"{ENCODER}/entropy": [0.25, 0.5],
    "gradient_norm/encoder/0/self_attention/query": [3.0, 6.0],
    "gradient_norm/encoder/0/self_attention/value": [4.0, 8.0],
    "loss": [5.0, 6.0],
}


@pytest.fixture(scope="module")
def run(workdir):
    (workdir / "gradients.jsonl").write_text(json.dumps({"step": 2, **LOGGED}) + "\n")
    analysis = GradientAnalysis(iterations=3, samples=2)
    lines = []
    numbers = analyze_run(load_analyzed_run(workdir), analysis, progress=lines.append)
    assert len(lines) == 4
    assert all("general" in line for line in lines)
    return json.loads(json.dumps(numbers))  # it is JSON


def test_logged_lines_are_read_and_those_of_other_checkpoints_are_computed(run):
    by_step = run["by_step"]
    assert by_step["steps"] == [0, 2, 4, 6]  # made again from the seeds; logged; the newest two
    for name, line in LOGGED.items():
        assert by_step[name][1] == line
        assert np.shape(by_step[name]) == (4, 2)
    # The first loss of a model that knows nothing: about log V.
    assert by_step["loss"][0] == pytest.approx([np.log(TASK.vocabulary.size)] * 2, abs=1.0)
    assert by_step[f"{CROSS}/saturation"][1] == [None, None]  # not in that line
    assert run["attentions"] == [ENCODER, CROSS]
    assert np.shape(run["gradient_norms"]["decoder, cross attention"]) == (4, 2)
    assert run["gradient_norms"]["encoder, self attention"][1] == [5.0, 10.0]


def test_examples_show_the_models_own_weights(workdir, run):
    _, states = load_states(workdir)
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[0], states[6].params)
    batch, labels = TASK.examples()
    assert list(run["examples"]["6"]) == list(labels)

    @quick_jit
    def weights_of(params, *inputs):
        return capture(TASK.bind(params), *inputs).attentions[CROSS].weights

    weights = weights_of(params, *(array[:2] for array in batch.inputs))
    for index, (word, (rows, columns)) in enumerate(labels.items()):
        table = run["examples"]["6"][word]
        assert table["row_labels"] == rows == [*word[::-1], "EOS"]
        assert table["column_labels"] == columns == ["SOS", *word]
        alone = weights[index, : len(rows), : len(columns)]
        np.testing.assert_allclose(table["weights"], alone, atol=1e-5)
        np.testing.assert_allclose(np.sum(table["dlogits"], axis=1), 0, atol=1e-5)
        assert np.abs(table["dlogits"]).max() > 0


def test_the_sweep_meets_the_model_at_scale_1(run):
    sweep = run["scale_sweep"]
    middle = int(np.argmin(np.abs(np.log(sweep["scales"]))))
    assert sweep["scales"][middle] == pytest.approx(1)
    for step in ("0", "6"):
        entropy = np.array(sweep[step]["entropy"])  # [seeds, scales]
        assert np.all(np.diff(entropy, axis=1) <= 1e-5)  # larger logits, less entropy
        assert np.all(entropy[:, middle] < np.log(8))
        assert np.all(np.array(sweep[step]["logit_sd"]) > 0)


def test_a_seed_that_diverged_has_no_curve(run):
    run = copy.deepcopy(run)
    for step in ("0", "6"):
        run["scale_sweep"][step]["logit_sd"][0] = None
    gradient_report.scale_curves([run])


@pytest.fixture(scope="module")
def other(run):
    """A run with the same label in another folder, without an encoder, and with one example."""
    by_step = {k: v for k, v in run["by_step"].items() if not k.startswith(ENCODER)}
    first, _ = run["examples"]["6"]
    words = {step: {first: tables[first]} for step, tables in run["examples"].items()}
    return {**run, "workdir": "runs/other", "by_step": by_step, "examples": words}


def with_few_panels(run):
    """A run with one group of parameters: Matplotlib takes long for a panel."""
    groups = {"embeddings": run["gradient_norms"]["embeddings"]}
    return {**run, "gradient_norms": groups, "attentions": [CROSS]}


@pytest.fixture(scope="module")
def page(run, other):
    runs = [*map(with_few_panels, (run, other))]
    return Reader(gradient_report.report(runs, command="analyze --it"))


def test_each_figure_of_the_page_has_a_description(page, run, other):
    assert page.open == []
    images = page.attributes("img")
    assert len(images) == 2 + 1
    assert all(len(image["alt"]) > 40 for image in images)
    assert "analyze --it" in page.text
    for folder in (run["workdir"], other["workdir"]):  # one label, told apart
        assert f"{LABEL} ({folder})" in page.text


def test_the_matrices_of_the_page_can_be_explored(page, run, other):
    (frame,) = page.attributes("iframe")
    (data,) = re.findall(r'id="data">(.*?)</script>', frame["srcdoc"])
    captures = json.loads(data)["captures"]
    assert [(c["panel"], c["step"], c["example"]) for c in captures] == [
        (f"{LABEL} ({each['workdir']})", step, word)
        for each, words in ((run, run["examples"]["6"]), (other, other["examples"]["6"]))
        for step in ("before training", "after training")
        for word in words
    ]
    (attention,) = captures[3]["attentions"]
    word = captures[3]["example"]
    assert attention["query_tokens"] == [*word[::-1], "EOS"]
    for name in ("weights", "dlogits"):
        shown = decoded_numbers(attention["arrays"][name])[0]
        np.testing.assert_allclose(shown, run["examples"]["6"][word][name], rtol=1e-6)


def without_softmax(run):
    run = copy.deepcopy(with_few_panels(run))
    for step in ("0", "6"):
        run["scale_sweep"][step] = None
        for table in run["examples"][step].values():
            table["dlogits"] = None
    del run["curvature"]
    return run


def test_the_script_writes_page_and_numbers(other, workdir, tmp_path, monkeypatch, capsys):
    """The run has no softmax, so its report has no gradients of logits."""
    out = tmp_path / "page.html"
    arguments = ["--workdir", workdir, "--samples", 3]

    def analyzed(run, analysis, *, progress):
        assert (run.workdir, analysis) == (workdir, GradientAnalysis(samples=3))
        return without_softmax(other)

    monkeypatch.setattr(script, "analyze_run", analyzed)
    assert call(script, *arguments, "--out", out, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.split() == [str(out), str(out.with_suffix(".numbers.json"))]
    numbers = json.loads(out.with_suffix(".numbers.json").read_text())
    assert [one["label"] for one in numbers["runs"]] == [LABEL]
    assert out.read_text().startswith("<!doctype html>")
    page = Reader(out.read_text())
    assert len(page.attributes("img")) == 2
    assert len(page.attributes("iframe")) == 1
    assert "Without a softmax over their logits" in page.text
