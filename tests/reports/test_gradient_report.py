"""From a run's folder to numbers, figures and the page: scripts/analyze_gradients.py."""

import copy
import dataclasses
import json
import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import call, load
from conformance import quick_jit
from html_reader import Reader, decoded_numbers
from stand_in_training import TASK, run_of_two_seeds

from attention_jax.analysis import capture, logit_size
from attention_jax.analysis.curvature import Estimate, SpectrumEdges
from attention_jax.reports import gradient_report
from attention_jax.tasks import gradients
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run, load_analyzed_run
from attention_jax.training.run import load_states

script = load("scripts/analyze_gradients.py")
CROSS = "decoder_0/cross_attention"
LABEL = "general, softmax, positions learned position_limit=13"

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
def workdir(tmp_path_factory):
    folder = shutil.copytree(run_of_two_seeds(), tmp_path_factory.mktemp("run") / "run")
    (folder / "gradients.jsonl").write_text(json.dumps({"step": 2, **LOGGED}) + "\n")
    return folder


def quick_curvature(loss, params, rngs, iterations, samples):
    """Stands for products with the Hessian, which take long to compile: the loss and settings."""
    ends = jnp.array([-loss(params), loss(params)])
    return SpectrumEdges(*ends, ends, jnp.array([1.0, iterations])), Estimate(1.5, samples)


@pytest.fixture(scope="module")
def run(workdir):
    analysis = GradientAnalysis(iterations=3, samples=2)
    with mock.patch.object(gradients, "edges_and_trace", quick_curvature):
        numbers = analyze_run(load_analyzed_run(workdir), analysis, progress=lambda line: None)
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


@pytest.mark.parametrize("rates", [{"dropout_rate": 0.5}, {"attention_dropout_rate": 0.5}])
def test_an_analysis_is_without_dropout(workdir, monkeypatch, rates):
    task, states = load_states(workdir)
    noisy = dataclasses.replace(task, model=dataclasses.replace(task.model, **rates))
    monkeypatch.setattr(gradients, "load_states", lambda *_, **__: (noisy, states))
    loaded = load_analyzed_run(workdir)
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[0], states[6].params)
    of_loss = quick_jit(lambda loss, params: loss(params, loaded.batch)[0], static_argnums=0)
    assert loaded.task == noisy
    still = of_loss(lambda *each: task.loss(*each, jax.random.key(0)), params)
    np.testing.assert_allclose(of_loss(loaded.loss, params), still, rtol=1e-6)


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


def test_the_size_of_the_logits_is_that_of_a_capture(workdir, run):
    params = load_analyzed_run(workdir).states[6].params
    batch, _ = TASK.examples()
    is_real = np.arange(batch.targets.shape[1]) < np.asarray(batch.target_lengths)[:, None]

    @quick_jit
    @jax.vmap
    def size_of(params):
        logits = capture(TASK.bind(params), *batch.inputs).attentions[CROSS].logits
        return logit_size(logits, rows=is_real, axis=0)

    for name, by_seed in size_of(params)._asdict().items():
        np.testing.assert_allclose(run["logit_size"]["6"][CROSS][name], by_seed, rtol=1e-4)
    table = gradient_report.logit_size_table([run])
    assert [table.count(step) for step in (">0<", ">6<")] == [1, 1]


def test_the_sweep_meets_the_model_at_scale_1_and_curvature_is_that_of_the_loss(run):
    sweep, curvature = run["scale_sweep"], run["curvature"]
    middle = int(np.argmin(np.abs(np.log(sweep["scales"]))))
    assert sweep["scales"][middle] == pytest.approx(1)
    for step in ("0", "6"):
        entropy = np.array(sweep[step]["entropy"])  # [seeds, scales]
        assert np.all(np.diff(entropy, axis=1) <= 1e-5)  # larger logits, less entropy
        assert np.all(entropy[:, middle] < np.log(8))
        assert np.all(np.array(sweep[step]["logit_sd"]) > 0)
        found = {name: by_seed[0] for name, by_seed in curvature[step].items()}
        assert found.pop("largest") == -found.pop("smallest") > 0
        errors = {"largest_error": 3, "smallest_error": 1, "trace_error": 2}
        assert found == {**errors, "trace": 1.5}
    assert curvature["0"]["largest"] == pytest.approx([np.log(TASK.vocabulary.size)] * 2, abs=1.0)


def test_a_seed_that_diverged_has_no_curve_and_leaves_that_of_the_others(run):
    run = copy.deepcopy(run)
    for step in ("0", "6"):
        sweep = run["scale_sweep"][step]
        sweep["logit_sd"][0] = None
        sweep["entropy"][0] = [None] * len(sweep["entropy"][1])
    line = gradient_report.scale_curves([run]).axes[1].lines[2]  # after training
    sweep = run["scale_sweep"]["6"]
    np.testing.assert_allclose(line.get_ydata(), sweep["entropy"][1])
    scaled = np.array(run["scale_sweep"]["scales"]) * sweep["logit_sd"][1]
    np.testing.assert_allclose(line.get_xdata(), scaled)


def test_bands_do_not_leave_the_range_of_a_statistic(run):
    names = (f"{CROSS}/saturation", f"{CROSS}/entropy")
    by_step = {"steps": [0, 1], **{name: [[0.0, 0.9], [0.1, 1.0]] for name in names}}
    drawn = gradient_report.statistics_by_step([{**run, "attentions": [CROSS], "by_step": by_step}])
    edges = {
        axes.get_title().partition("\n")[2]: axes.collections[0].get_paths()[0].vertices[:, 1]
        for axes in drawn.axes
        if axes.collections
    }
    assert {label: float(y.min()) for label, y in edges.items()} == {
        "saturated rows (share)": 0.0,
        "entropy (nats)": 0.0,
    }
    assert edges["saturated rows (share)"].max() == 1 < edges["entropy (nats)"].max()


@pytest.mark.slow
def test_curvature_of_the_loss_of_a_run(workdir):
    loaded, analysis = load_analyzed_run(workdir), GradientAnalysis(iterations=3, samples=2)
    params = loaded.states[6].params
    found = jax.jit(jax.vmap(lambda params: gradients._curvature(loaded, analysis, params)))(params)
    assert np.all(found["smallest"] < found["largest"])
    assert np.all(np.isfinite(found["trace"]))


# --- the page ---


def with_few_panels(run):
    """A run with one group of parameters: Matplotlib takes long for a panel."""
    groups = {"embeddings": run["gradient_norms"]["embeddings"]}
    return {**run, "gradient_norms": groups, "attentions": [CROSS]}


def without_softmax(run):
    """That run in another folder, without an encoder, with one example and no softmax."""
    run = copy.deepcopy(with_few_panels(run))
    run["by_step"] = {k: v for k, v in run["by_step"].items() if not k.startswith(ENCODER)}
    for step in ("0", "6"):
        run["scale_sweep"][step] = None
        first, _ = run["examples"][step]
        run["examples"][step] = {first: {**run["examples"][step][first], "dlogits": None}}
    del run["curvature"]
    return {**run, "workdir": "runs/other"}


@pytest.fixture(scope="module")
def page(run, workdir, tmp_path_factory):
    """What the script writes of two runs with the same label."""
    out = tmp_path_factory.mktemp("pages") / "page.html"
    found = [with_few_panels(run), without_softmax(run)]

    def analyzed(run, analysis, *, progress):
        assert (run.workdir, analysis) == (workdir, GradientAnalysis(samples=3))
        return found.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "analyze_run", analyzed)
        arguments = ["--workdir", workdir, "--compare", workdir, "--samples", 3, "--out", out]
        assert call(script, *arguments, monkeypatch=patch) == 0
    numbers = json.loads(out.with_suffix(".numbers.json").read_text())
    assert [one["label"] for one in numbers["runs"]] == [LABEL] * 2
    assert out.read_text().startswith("<!doctype html>")
    return Reader(out.read_text())


def test_each_figure_of_the_page_has_a_description(page, run):
    assert page.open == []
    images = page.attributes("img")
    assert len(images) == 2 + 1
    assert all(len(image["alt"]) > 40 for image in images)
    assert "python scripts/analyze_gradients.py --workdir" in page.text
    for folder in (run["workdir"], "runs/other"):  # one label, told apart
        assert f"{LABEL} ({folder})" in page.text


def test_the_matrices_of_the_page_can_be_explored(page, run):
    (frame,) = page.attributes("iframe")
    (data,) = re.findall(r'id="data">(.*?)</script>', frame["srcdoc"])
    captures = json.loads(data)["captures"]
    words = list(run["examples"]["6"])
    assert [(c["panel"], c["step"], c["example"]) for c in captures] == [
        (f"{LABEL} ({folder})", step, word)
        for folder, words in ((run["workdir"], words), ("runs/other", words[:1]))
        for step in ("before training", "after training")
        for word in words
    ]
    (attention,) = captures[3]["attentions"]
    word = captures[3]["example"]
    assert attention["query_tokens"] == [*word[::-1], "EOS"]
    for name in ("weights", "dlogits"):
        shown = decoded_numbers(attention["arrays"][name])[0]
        np.testing.assert_allclose(shown, run["examples"]["6"][word][name], rtol=1e-6)
