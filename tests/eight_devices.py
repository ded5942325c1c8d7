"""Checks on eight CPU devices, in a process of their own: JAX creates devices only once.

A file of checks runs as a script with the names of checks, and prints for each None or the reason
of its failure. A test file requests the checks of its selected cases.
"""

import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

from quick_compilation import install  # first: JAX reads its settings

import jax  # isort: skip

COUNT = 8


def results_of(checks, request):
    """Returns {name: None or the failure} for the selected cases of `test_on_eight_devices`."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", None) == "test_on_eight_devices"
        and item.path == request.path
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),  # this tree, not an installed one
        # The last of two equal flags counts. PARTS is among the flags already.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={COUNT}",
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
    """Runs each check, and prints its outcome as a line of JSON."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    install()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    assert jax.device_count() == COUNT
    stdout, sys.stdout = sys.stdout, sys.stderr  # checks may print to stderr
    for name in names:
        try:
            failure = checks[name]()
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps([name, failure]), flush=True, file=stdout)
        jax.clear_caches()
