"""The frame of experiments and scripts/reproduce.py, on experiments that take no time."""

import dataclasses
import json
import sys
import types

import jax
import pytest
from command_lines import call, load
from matplotlib.figure import Figure

from experiments import lab

reproduce = load("scripts/reproduce.py")
DOC = """What is {name}?

Answer:   about 1,
          as expected.
Source:   a book, section 1.
Command:  .venv/bin/python -m experiments.subject.{name}   # a second

More of it.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3


def stand_in(name, calls, measured=1.0, error=None):
    """An experiment that takes no time."""

    def run(config):
        calls.append((name, config.size))
        if error is not None:
            raise error
        return [{"size": config.size, "measured": measured}]

    module = types.ModuleType(f"experiments.subject.{name}", DOC.format(name=name))
    module.__file__ = str(lab.FOLDER / f"{name}.py")
    module.__dict__.update(
        Config=Config, QUICK=Config(size=2), CAPTIONS={name: f"A drawing of {name}."}, run=run,
        plot=lambda rows: {name: Figure(figsize=(1, 1))},
        table=lambda rows: lab.markdown(["measured"], [lab.column(rows, "measured")]),
        claims=lambda rows: [lab.Claim(f"{name} is 1", rows[0]["measured"], 0.9, 1.1, "1.0")],
    )  # fmt: skip
    return module


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Installs three experiments, the second of which fails; returns the list of calls."""
    calls, before = [], jax.config.read("jax_disable_most_optimizations")
    names = ("first", "second", "third")
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(lab, "SUBJECT_OF", dict.fromkeys(names, "subject"))
    monkeypatch.setattr(lab, "SUBJECTS", {"subject": names})
    monkeypatch.setattr(lab, "FOLDER", tmp_path / "experiments")
    (tmp_path / "experiments/subject").mkdir(parents=True)
    marks = [f"<!-- begin {name} -->\n<!-- end {name} -->" for name in names]
    page_of(tmp_path).write_text("\n".join(marks))
    for name in names:
        error = RuntimeError("out of luck") if name == "second" else None
        install(stand_in(name, calls, error=error), monkeypatch)
    yield calls
    jax.config.update("jax_disable_most_optimizations", before)


def install(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, experiment.__name__, experiment)


def run(*arguments, monkeypatch):
    return call(reproduce, *arguments, monkeypatch=monkeypatch)


def page_of(root):
    return root / "experiments/subject/README.md"


def test_one_failure_does_not_keep_the_others_from_running(house, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch=monkeypatch) == 1
    assert house == [("first", 3), ("second", 3), ("third", 3)]
    assert "failed: second" in capsys.readouterr().err
    page = page_of(tmp_path).read_text()
    for name, written in (("first", True), ("second", False), ("third", True)):
        assert (f"![A drawing of {name}.]({name}.png)" in page) == written
        assert (f"| {name} is 1 | 1.0 | 1 | 0.9 to 1.1 | reproduced |" in page) == written


def test_what_misses_data_or_a_package_is_listed(house, monkeypatch, capsys):
    reason = "it needs the package p: pip install p"
    experiment = stand_in("second", house)
    experiment.missing = lambda config: reason
    install(experiment, monkeypatch)
    assert run("second", monkeypatch=monkeypatch) == 1  # it is named
    capsys.readouterr()
    assert run(monkeypatch=monkeypatch) == 0
    assert [name for name, _ in house] == ["first", "third"]
    err = capsys.readouterr().err
    assert err.endswith(f"left out: second: {reason}\n")
    assert err.count(reason) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("package", ["sentencepiece", "sacrebleu.metrics"])
@pytest.mark.parametrize("name", lab.SUBJECTS["translation"])
def test_translation_without_its_packages(name, package, monkeypatch):
    experiment = lab.load(name)
    assert experiment.missing(experiment.QUICK) == ""
    monkeypatch.setitem(sys.modules, package, None)
    assert '".[translate]"' in experiment.missing(experiment.QUICK)


def test_finished_experiments_run_again_only_with_force(house, tmp_path, monkeypatch):
    figure = tmp_path / "experiments/subject/first.png"
    for _ in range(2):
        assert run("first", "third", monkeypatch=monkeypatch) == 0
        figure.unlink()  # it is drawn from the rows
    assert house == [("first", 3), ("third", 3)]
    assert run("first", "--force", monkeypatch=monkeypatch) == 0
    assert house[2:] == [("first", 3)]


def test_quick_leaves_the_rows_of_the_default_settings_alone(house, tmp_path, monkeypatch):
    assert run("first", "--quick", monkeypatch=monkeypatch) == 0
    assert json.loads((tmp_path / "runs/quick/first.json").read_text())["config"]["size"] == 2
    assert "![A drawing of first.](first.png)" in (tmp_path / "runs/quick/README.md").read_text()
    assert (tmp_path / "runs/quick/first.png").exists()
    assert [path.name for path in (tmp_path / "experiments").rglob("*.*")] == ["README.md"]
    assert "drawing" not in page_of(tmp_path).read_text()


def test_misses_count_where_an_experiment_is_named_or_ran(house, tmp_path, monkeypatch, capsys):
    for name in ("second", "third"):
        install(stand_in(name, house, measured=1.2), monkeypatch)
    assert run(monkeypatch=monkeypatch) == 1  # they have run
    assert run(monkeypatch=monkeypatch) == 0  # they were there before
    assert "MISS: third: third is 1" in capsys.readouterr().err
    assert run("third", monkeypatch=monkeypatch) == 1  # it is named
    assert "| 1.2 | 0.9 to 1.1 | MISS |" in page_of(tmp_path).read_text()


def test_an_interrupted_run_writes_its_pages(house, tmp_path, monkeypatch):
    install(stand_in("second", house, error=KeyboardInterrupt()), monkeypatch)
    assert run(monkeypatch=monkeypatch) == 130
    assert house == [("first", 3), ("second", 3)]
    assert "A drawing of first." in page_of(tmp_path).read_text()


def test_mistakes_are_one_line(house, tmp_path, monkeypatch, capsys):
    assert run("fird", monkeypatch=monkeypatch) == 2
    assert "'fird'; did you mean 'third'?\n" in capsys.readouterr().err
    assert run("first", monkeypatch=monkeypatch) == 0
    (tmp_path / "experiments/subject/first.json").write_text('{"config"')
    capsys.readouterr()
    assert run("first", monkeypatch=monkeypatch) == 2
    assert "first.json cannot be read" in capsys.readouterr().err
    assert run("first", "--force", monkeypatch=monkeypatch) == 0


def test_results_that_cannot_be_written_are_an_error_before_the_run(tmp_path):
    calls = []
    experiment = stand_in("mine", calls)
    (tmp_path / "file").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"results .* cannot be made"):
        lab.conduct(experiment, Config(), tmp_path / "file" / "results")
    with pytest.raises(ValueError, match="results must not be"):
        lab.conduct(experiment, Config(size=4), lab.FOLDER)
    with pytest.raises(ValueError, match="scores must be one or more; got none"):
        lab.conduct(experiment, types.SimpleNamespace(scores=()), tmp_path)
    assert calls == []


def test_claims_bind_the_default_settings_alone(tmp_path, capsys):
    experiment = stand_in("mine", [], measured=2.0)
    assert lab.conduct(experiment, Config(), tmp_path) == 1
    assert lab.conduct(experiment, Config(size=4), tmp_path) == 0
    assert "untrained" not in capsys.readouterr().out
    assert lab.conduct(experiment, experiment.QUICK, tmp_path) == 0
    assert "untrained, small settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "source", "denies", "verdict"),
    [
        (1, "1", False, "reproduced"), (1, "2", True, "contradicted"), (1, "", False, "ours"),
        (1.01, "1", False, "MISS"), (float("nan"), "", False, "MISS"),
    ],
)  # fmt: skip
def test_verdicts(measured, source, denies, verdict):
    assert lab.Claim("", measured, 0, 1, source, denies).verdict == verdict
