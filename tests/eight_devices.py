"""Checks on eight devices made of the CPU: in a process of their own, since JAX makes them once.

A file of checks is run as a script with their names, and says of each None or why it fails; a test
file asks for those of its cases that this run has.
"""

import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import jax

COUNT = 8


def results_of(checks, request):
    """{name: None or why not} of the cases of the requesting file's `test_on_eight_devices`."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", None) == "test_on_eight_devices"
        and item.path == request.path
    ]
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={COUNT}",
        "JAX_PLATFORMS": "cpu",
    }
    script = Path(checks.__file__)
    done = subprocess.run(
        [sys.executable, script, *names], env=environment, cwd=script.parent.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def run(checks, names):
    """What the script does: each check, and a line of JSON about it."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.simplefilter("error")
    assert jax.device_count() == COUNT
    stdout, sys.stdout = sys.stdout, sys.stderr  # where checks may say what they like
    for name in names:
        try:
            why_not = checks[name]()
        except Exception:
            why_not = traceback.format_exc()
        print(json.dumps([name, why_not]), flush=True, file=stdout)
        jax.clear_caches()
