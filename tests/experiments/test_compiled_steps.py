"""Compiled training steps against the formulas, with numbers by hand."""

import json

import pytest

from experiments.costs import compiled_steps


def row(mesh, devices, sent, cycles, mib, state):
    kinds = {"all-reduce": {"count": 2, "bytes": 0, "sent_bytes": sent}} if sent else {}
    return {
        "task": "translation", "target": "v5e", "mesh": mesh, "devices": devices,
        "parameters": 1000, "collectives": kinds, "cycles": cycles, "mib": mib,
        "argument_mib": state, "temporary_mib": mib - state, "output_mib": 0.0,
    }  # fmt: skip


@pytest.fixture
def compiled(tmp_path):
    rows = [
        row("data", 1, 0, 3_000_000, 50.0, 10.0),
        row("data", 8, 7350, 3_300_000, 48.0, 10.0),  # 5 % above 2 * 7 / 8 * 4000
        row("fsdp", 8, 15000, 2_000_000, 60.0, 2.0),
        {"task": "reversal", "target": "H100", "mesh": "data", "devices": 8, "error": "not here"},
    ]
    file = tmp_path / "steps.json"
    content = {
        "environment": {"git_commit": "abc"},
        "benchmarks": {"compiled-steps": {"rows": rows}},
    }
    file.write_text(json.dumps(content))
    return compiled_steps.read(file)


def test_what_is_read(compiled):
    assert compiled["commit"] == "abc"
    assert compiled["missing"] == [{"name": "reversal, H100, data=8", "reason": "not here"}]
    alone, data, fsdp = compiled["steps"]
    assert alone["formula_bytes"] == alone["sent_bytes"] == 0
    assert data["formula_bytes"] == 7000
    assert fsdp["formula_bytes"] == 10500
    assert data["computing_seconds"] == pytest.approx(2.2e-3)
    assert data["communication_seconds"] == pytest.approx(73.5e-9)


def test_expectations(compiled):
    checks = {check.claim: check for check in compiled_steps.expectations(compiled)}
    name = "translation, v5e, {}=8: {}"
    measured = {
        name.format("data", "bytes that a device sends, compiled over formula"): (1.05, True),
        name.format("fsdp", "bytes that a device sends, compiled over formula"): (1.4286, False),
        name.format("data", "cycles of a device, over those of one device alone"): (1.1, True),
        name.format("fsdp", "cycles of a device, over those of one device alone"): (0.6667, False),
        name.format("fsdp", "MiB of the state per device, over that of data"): (0.2, True),
        name.format("fsdp", "MiB in all per device, over that of data"): (1.25, False),
        name.format("data", "communication over computing"): (3.3409e-5, True),
        name.format("fsdp", "communication over computing"): (1.125e-4, True),
    }
    assert checks.keys() == measured.keys()
    for claim, (number, met) in measured.items():
        assert checks[claim].measured == pytest.approx(number, rel=1e-4)
        assert checks[claim].met == met, claim


def test_report(compiled):
    text = compiled_steps.report(compiled)
    assert "| translation, v5e, data=1 | 10.0 | 50.0 | - | 0 | - | 3 | 0 | 2 |" in text
    assert "| translation, v5e, data=8 | 10.0 | 48.0 | 2 all-reduce | 0.00735 | 1.05 |" in text
    assert text.endswith("reversal, H100, data=8: not here.")


def test_the_committed_file_can_be_read():
    for step in compiled_steps.read()["steps"]:
        assert step["mib"] > 0
