"""The result of a long run of tests: a JSON file, and the part of a README that shows its table."""

import json
import os
import shlex
import sys
from pathlib import Path

from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import write_json, write_text
from experiments import readme

ROOT = Path(__file__).parents[1]
# {part: (file of the results, README with the part)}
TABLES = {
    "faults": ("tests/faults/results.json", "attention_jax/runs/README.md"),
}


def save(part, rows, seconds, table):
    """Writes the rows of a run with where they come from, and their table into the README.

    Args:
        part: a name in TABLES.
        rows: one dict per row of the table.
        seconds: how long the run took.
        table: rows -> Markdown.
    """
    path, page = (ROOT / name for name in TABLES[part])
    content = {
        "schema": 1,
        # Not sys.argv: for "python -m" its first word is the whole path of a file.
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "seconds": round(seconds),
        "environment": environment(ROOT / "tests"),
        "rows": rows,
    }
    write_json(path, content)
    write_text(page, shown(part, page.read_text(), table))


def shown(part, text, table):
    """Returns the text of a README with the table of the saved results."""
    path, page = (ROOT / name for name in TABLES[part])
    content = json.loads(path.read_text())
    where = content["environment"]
    commit = (where["git_commit"] or "an unknown commit")[:10]
    caption = (
        f"One run of {content['seconds'] / 60:.0f} minutes on {where['cpus']} CPU cores with jax"
        f" {where['packages']['jax']}, commit {commit}"
        f" ([numbers]({os.path.relpath(path, page.parent)})):"
    )
    block = f"{caption}\n\n{table(content['rows'])}"
    return readme.replaced(text, lambda name: block if name == part else None)
