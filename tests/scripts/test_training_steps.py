"""The training steps of `compile_report.py --part steps`."""

import importlib.metadata
import json
from types import SimpleNamespace

import compile_report
import pytest
from compilation import targets, training_steps
from compilation.training_steps import Step, row_of, steps


def test_each_step_once_and_as_many_examples_per_device():
    assert len({step.name for step in steps()}) == len(steps()) == 8
    for task in ("reversal", "translation"):
        assert {
            training_steps._examples(step, step.devices) / step.devices
            for step in steps()
            if step.task == task
        } == {64 if task == "reversal" else 71}


@pytest.mark.parametrize(
    ("target", "reason"),
    [("v5e", "libtpu is not installed"), (targets.H100, "the CUDA plugin is not installed")],
)
def test_without_a_compiler_the_row_says_so(monkeypatch, target, reason):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    step = Step("reversal", target, "data", 8)
    expected = {"task": "reversal", "target": target, "mesh": "data", "devices": 8}
    assert row_of(step) == ({**expected, "error": f"not compiled here: {reason}"}, "")
    with pytest.raises(RuntimeError, match=f"cannot compile for {target}: {reason}"):
        targets.devices(target, 8)


def test_rows_are_kept_while_the_sources_are_the_same(tmp_path, monkeypatch, capsys):
    out = tmp_path / "steps.json"
    made = []

    def compiled(step):
        made.append(step.name)
        failed = {"error": "refused"} if step.devices == 1 else {}
        return {**step.row, "mib": 3.0, **failed}, "text"

    monkeypatch.setattr(compile_report, "row_of", compiled)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1")
    first = compile_report.Arguments(part="steps", only="reversal", out=out, texts=tmp_path / "t")
    compile_report.main(first)
    assert len(made) == 4
    assert (tmp_path / "t" / "reversal, v5e, data=8.hlo").read_text() == "text"
    compile_report.main(compile_report.Arguments(part="steps", out=out))
    assert made[4:].count("reversal, v5e, data=1") == 1  # it failed before
    assert len(made) == 4 + 4 + 1
    rows = json.loads(out.read_text())["benchmarks"]["compiled-steps"]["rows"]
    assert [(row["task"], row["mesh"], row["devices"]) for row in rows] == [
        (step.task, step.mesh, step.devices) for step in steps()
    ]
    rows, packages = compile_report._known_from(
        out, json.loads(out.read_text())["environment"]["sources"]
    )
    assert (len(rows), packages["libtpu"]) == (6, "libtpu 1")
    assert compile_report._known_from(out, "other sources") == ({}, {})


def test_what_a_row_holds():
    memory = SimpleNamespace(
        argument_size_in_bytes=2**20, temp_size_in_bytes=2**21, output_size_in_bytes=2**20 + 2**19,
        alias_size_in_bytes=2**20,
    )  # fmt: skip
    text = """HloModule m, num_partitions=8

ENTRY %main (p: f32[2]) -> f32[2] {
  %fusion.1 = f32[] fusion(p), backend_config={"estimated_cycles":"10"}
  ROOT %sum = f32[2] all-reduce(p), replica_groups={}
}
"""
    state = SimpleNamespace(params={"kernel": SimpleNamespace(shape=(3, 5))})
    row = training_steps._numbers(Step("reversal", "v5e", "data", 8), memory, text, state)
    assert row == {
        "examples_per_device": 64, "parameters": 15, "argument_mib": 1.0, "temporary_mib": 2.0,
        "output_mib": 0.5, "mib": 3.5, "cycles": 10,
        "collectives": {"all-reduce": {"count": 1, "bytes": 8, "sent_bytes": 14}},
    }  # fmt: skip
    gpu = training_steps._numbers(Step("reversal", targets.H100, "data", 8), memory, text, state)
    assert "cycles" not in gpu


@pytest.mark.accelerators
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mesh", ["data"])
def test_a_step_compiled_for_eight_chips(mesh):
    if reason := targets.missing_compiler("v5e"):
        pytest.skip(reason)
    row, _ = row_of(Step("reversal", "v5e", mesh, 8))
    assert "error" not in row
    kinds = {"all-reduce"}
    assert kinds <= row["collectives"].keys()
    gradients = 4 * row["parameters"]
    sent = sum(kind["sent_bytes"] for kind in row["collectives"].values())
    assert 2 * 7 / 8 * gradients <= sent <= 4 * gradients
