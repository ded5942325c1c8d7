"""Every experiment: its form, its committed rows, its pages, and a run with small settings."""

import dataclasses
import functools
import json
import types

import matplotlib
import pytest

from experiments import lab, pages

NAMES = tuple(lab.SUBJECT_OF)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_rows_are_those_of_the_default_settings(name):
    experiment, content = lab.load(name), lab.content_of(name)
    path = lab.FOLDER / lab.SUBJECT_OF[name] / f"{name}.json"
    assert content["schema"] == lab.SCHEMA
    assert path.stat().st_size <= (300_000 if name in ("maps", "relations") else 100_000)
    assert not content["environment"]["git_commit"].endswith("-dirty")
    settings = json.loads(json.dumps(dataclasses.asdict(experiment.Config()), default=str))
    assert content["config"] == settings
    claims = experiment.claims(content["rows"])
    assert 1 <= len(claims) <= 24
    assert len({claim.text for claim in claims}) == len(claims)
    assert all(isinstance(claim.measured, float | int) for claim in claims)
    assert "| --- |" in experiment.table(content["rows"])
    assert [path.with_name(f"{stem}.png").exists() for stem in experiment.CAPTIONS].count(
        False
    ) == 0


@pytest.mark.parametrize(
    "page", pages.pages(), ids=lambda path: str(path.relative_to(lab.FOLDER.parent))
)
def test_pages_show_what_the_rows_say(page):
    text = page.read_text()
    part = functools.partial(pages.part_of, folder=page.parent)
    assert pages.replaced(text, part) == text
    wrong = pages.replaced(text, lambda name: None if part(name) is None else "stale")
    assert pages.replaced(wrong, part) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_small_settings_run_from_measuring_to_drawing(name, tmp_path):
    experiment = lab.load(name)
    config = experiment.QUICK
    if hasattr(config, "workdir"):
        config = dataclasses.replace(config, workdir=tmp_path / "runs")
    if hasattr(experiment, "missing") and (reason := experiment.missing(config)):
        pytest.skip(reason)
    assert lab.conduct(experiment, config, tmp_path) == 0
    assert lab.content_of(name, tmp_path)["rows"]
    assert {path.stem for path in tmp_path.glob("*.png")} == experiment.CAPTIONS.keys()


def test_figures_do_not_depend_on_the_users_settings(tmp_path):
    seen = []
    drawn = types.SimpleNamespace(plot=lambda rows: seen.append({**matplotlib.rcParams}) or {})
    with matplotlib.rc_context({"image.origin": "lower", "text.usetex": True}):
        assert lab.draw(drawn, [], tmp_path) == []
    assert (seen[0]["image.origin"], seen[0]["text.usetex"]) == ("upper", False)
