"""The commands of the long runs start, and READMEs show the tables that they saved."""

import os
import subprocess
import sys

import pytest
import saved_table

COMMANDS = {"fuzz": ("tests/fuzz",), "faults": ("-m", "tests.faults")}


@pytest.mark.parametrize("part", COMMANDS)
def test_the_command_starts_without_the_paths_of_pytest(part):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *COMMANDS[part], "--help"], cwd=saved_table.ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--save" in done.stdout
