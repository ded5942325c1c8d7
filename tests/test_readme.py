"""Each README: its Python blocks run, its shell commands parse, its links lead somewhere."""

import functools
import importlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import load
from stand_in_training import run_of_two_seeds, scaled

import attention_jax
from attention_jax.commands.command_line import parse
from experiments import lab

ROOT = Path(__file__).parent.parent
FOLDERS = ("attention_jax", "benchmarks", "docs", "experiments", "findings", "scripts", "tests")
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide"
ROOM = ROOT / "attention_jax" / "normalizers" / "README.md"
RUNS = ROOT / "attention_jax" / "runs" / "README.md"
READMES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(GUIDE.glob("[!R]*.md")),
    *sorted((ROOT / "experiments").glob("[!R]*.md")),
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md")),
]
every_readme = pytest.mark.parametrize(
    "readme", READMES, ids=lambda path: str(path.relative_to(ROOT))
)


def blocks(readme: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", readme.read_text(), flags=re.DOTALL)


MY_FILES = {  # modules that a user writes, by name
    name: code
    for page in (README, GUIDE / "tasks.md")
    for code in blocks(page, "python")
    for name in re.findall(r"^# (my_\w+)\.py", code)
}
MY_SCORES, TASK = MY_FILES["my_scores"], "my_tasks:Recall"


# --- Python ---


def run_python(*readmes: Path) -> dict:
    """Runs the blocks of READMEs one after another; returns the variables at the end."""
    namespace: dict = {}
    for code in (code for readme in readmes for code in blocks(readme, "python")):
        if code not in MY_FILES.values():
            exec(code.replace("16384", "512"), namespace)  # many pairs take long without optimising
    return namespace


def test_python_of_the_front_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = run_python(README)
    printed = [[0.89, 0, 0.11], [0.05, 0.77, 0.19], [0.64, 0.04, 0.32]]
    np.testing.assert_allclose(variables["weights"]["scaled"], printed, atol=0.005)
    assert Path("weights.png").stat().st_size > 5_000
    gradient = variables["gradient"]
    assert gradient.keys() == {"query_kernel", "key_kernel", "v"}
    assert all(map(np.any, gradient.values()))
    assert variables["y"].shape == (2, 7, 64)


def check_own_derivative(variables):
    assert float(variables["length"](jnp.array([3.0, 4.0]))) == 5


def check_answers(variables):
    assert variables["answers"].tokens[0, 0].tolist() == [1, 2, 2, 2]


def check_loops(variables):
    q, k = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    for name in ("pair", "pair_on_all_threads"):
        expected = -np.abs(q[:, None] - k[None]).sum(-1)
        np.testing.assert_allclose(variables[name](*map(jnp.asarray, (q, k))), expected, rtol=1e-6)
    assert variables["mended"] == 0


CHECKS = {
    "derivatives": check_own_derivative,
    "decoding": check_answers,
    "jax_releases": check_loops,
}


@pytest.mark.parametrize(
    "page", [page.stem for page in GUIDE.glob("[!R]*.md") if blocks(page, "python")]
)
def test_python_of_the_guide(page):
    variables = run_python(GUIDE / "README.md", GUIDE / f"{page}.md")
    CHECKS.get(page, lambda variables: None)(variables)


def test_python_of_the_room_of_normalizers():
    variables = run_python(ROOM)
    assert variables["output"].shape == variables["heavy"].shape == (3, 7, 4)


def test_python_of_the_page_on_runs(tmp_path, monkeypatch):
    shutil.copytree(run_of_two_seeds(), tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    variables = run_python(RUNS)
    assert variables["logits"].shape[:2] == variables["batch"].targets.shape


def test_users_own_score_attends_by_distance_with_logits_near_unit_deviation():
    namespace: dict = {}
    exec(MY_SCORES, namespace)
    score, rng = namespace["Distance"](), np.random.default_rng(0)
    query, key = rng.normal(size=(5, 3)), rng.normal(size=(7, 3))
    params = score.init(jax.random.key(0), 3, 3)
    weights = attention_jax.attention_weights(query, key, score=score, params=params)
    squares = np.sum((query[:, None] - key) ** 2, axis=-1)
    expected = np.exp(-np.exp(float(params["sharpness"])) * squares)
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True), rtol=1e-5)
    query, key = (jax.random.normal(jax.random.key(i), (500, 64)) for i in range(2))
    logits = score(score.init(jax.random.key(2), 64, 64), query, key)
    assert 0.8 < float(logits.std()) < 1.25


def test_users_own_task_is_trained_and_answered_by_the_commands(tmp_path, command, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(MY_FILES["my_tasks"])
    monkeypatch.chdir(tmp_path)
    ((_, _, *words),) = (
        w for w in commands(GUIDE / "tasks.md") if w[1:4:2] == ["scripts/train.py", TASK]
    )
    short = ["--dim", 8, "--hidden-dim", 7, "--steps", 6, "--log-every", 2, "--seeds", 1]
    short += ["--checkpoint-every", 2, "--batch-size", 3]
    short += ["--encoder-layers", 0, "--no-decoder-self-attention"]
    monkeypatch.setattr("attention_jax.training.step.Compiled.advance", scaled)
    assert command("train", *words, *short)[0] == 0
    status, out, _ = command("answers", "--workdir", "runs/recall")
    assert (status, Path("runs/recall/figures/answers.png").exists()) == (0, True)
    assert " -> " in out
    sys.modules.pop("my_tasks")


# --- shell ---


def commands(readme: Path) -> list[list[str]]:
    """The words of each command in the shell blocks of a README, and in the cells of its tables.

    Without the variables that stand before a command.
    """
    text = readme.read_text()
    on_windows = "".join(blocks(readme, "bat")).replace("\\", "/").replace("/Scripts/", "/bin/")
    lines = "".join(blocks(readme, "bash")).replace("\\\n", " ").splitlines()
    lines += on_windows.splitlines()
    lines += re.findall(r"\| `(\.venv/bin/python [^`]*)` \|", text)
    pieces = [piece for line in lines for piece in line.split(" | ")]
    pieces = [re.sub(r"^(\w+=\S+ +|srun +)+", "", piece) for piece in pieces]
    return [words for piece in pieces if (words := shlex.split(piece, comments=True))]


@every_readme
def test_shell_commands_parse(readme, tmp_path, monkeypatch):
    for name, code in MY_FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    for words in commands(readme):
        program, *arguments = words
        if program.startswith("./"):
            assert os.access(ROOT / program, os.X_OK), program
        elif program == ".venv/bin/pip":
            (extra,) = re.findall(r"\[(\w+)\]", " ".join(arguments))
            assert f"\n{extra} =\n" in (ROOT / "setup.cfg").read_text()
        elif program == ".venv/bin/python":
            parse_python_command(*arguments)
        else:
            assert program in ("echo", "git", "pip", "py", ".venv/bin/jupyter"), program
    for name in MY_FILES:
        sys.modules.pop(name, None)


def parse_python_command(script: str, *arguments: str) -> None:
    """Raises unless the script, or the tests, take these arguments."""
    if script == "-m":
        module, *paths = arguments
        if module == "experiments.pages":
            return  # without options
        if module.startswith(("experiments.", "benchmarks.")):
            parse_options(importlib.import_module(module), paths)
            return
        paths = paths if module == "pytest" else [module.replace(".", "/")]
        words = iter(paths)
        paths = [word for word in words if not (word in ("-m", "-k") and next(words))]
        paths = [path for path in paths if not path.startswith("--")]
        assert all((ROOT / path).exists() for path in paths), arguments
        return
    assert (ROOT / script).exists(), script
    parse_options(load(script), arguments)


def parse_options(module, arguments) -> None:
    """Raises unless the command line of a script or an experiment takes these options."""
    if hasattr(module, "CAPTIONS"):
        read = functools.partial(parse, lab.options_of(module))
    else:
        read = getattr(module, "arguments_of", None) or functools.partial(parse, module.Arguments)
    read(list(arguments))


@pytest.mark.parametrize("name", lab.SUBJECT_OF)
def test_the_command_of_every_experiment_parses(name):
    words = shlex.split(lab.labelled(lab.load(name), "Command"), comments=True)
    assert words[:2] == [".venv/bin/python", "-m"]
    parse_python_command(*words[1:])


# --- links ---


def anchors(readme: Path) -> set[str]:
    """The anchors that a Markdown page makes of its headings."""
    text = re.sub(r"```.*?```", "", readme.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_readme
def test_every_link_leads_somewhere(readme):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", readme.read_text()):
        path, _, anchor = link.partition("#")
        target = (readme.parent / path).resolve() if path else readme
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
