"""The commands of the long runs start, and READMEs show the tables that they saved."""

import json
import os
import subprocess
import sys

import pytest
import saved_table

from tests.faults.findings import table as table_of_faults

COMMANDS = {"faults": ("-m", "tests.faults")}
TABLE_OF = {"faults": table_of_faults}


@pytest.mark.parametrize("part", COMMANDS)
def test_the_command_starts_without_the_paths_of_pytest(part):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *COMMANDS[part], "--help"], cwd=saved_table.ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--save" in done.stdout


@pytest.mark.parametrize("part", saved_table.TABLES)
def test_a_readme_shows_the_table_of_a_whole_run_of_a_commit(part):
    path, page = (saved_table.ROOT / name for name in saved_table.TABLES[part])
    content = json.loads(path.read_text())
    text = page.read_text()
    assert saved_table.shown(part, text, TABLE_OF[part]) == text
    assert f"<!-- begin {part} -->" in text
    assert content["rows"]
    assert "--save" in content["command"]
    commit = content["environment"]["git_commit"]
    assert len(commit) == 40
    assert not commit.endswith("-dirty")


@pytest.mark.parametrize("part", saved_table.TABLES)
def test_a_number_that_was_typed_into_a_readme_is_found(part):
    _, page = (saved_table.ROOT / name for name in saved_table.TABLES[part])
    text = page.read_text()
    begin = text.index(f"<!-- begin {part} -->")
    row = text.index("| ", begin)
    typed = text[:row] + "| 0 " + text[row:]
    assert saved_table.shown(part, typed, TABLE_OF[part]) == text
