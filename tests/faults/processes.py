"""Runs of scripts/train.py in processes of their own: begun, watched, ended, compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_jax.training.run import load_states

from .findings import Ended, Result, hashes

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 150, 5  # so that most of the time goes into saving
TINY = (
    *("--dim", "8", "--hidden-dim", "8", "--batch-size", "8", "--max-length", "3", "--seeds", "1"),
    *("--steps", str(STEPS), "--log-every", str(EVERY), "--checkpoint-every", str(EVERY)),
)
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step folder while it is written
PATIENCE = 600  # seconds after which a process hangs


class Place:
    """A temporary folder with the runs of all faults, and the undisturbed ones to compare with.

    Attributes:
        home: the folder; others than its owner may enter it.
        cache: what JAX compiled, once for all processes.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True)
        self.home = Path(self._folder.name)
        self.home.chmod(0o755)
        self.cache = self.home / "compiled"
        self.cache.mkdir()
        self._undisturbed: dict[tuple[str, ...], Path] = {}
        self._count = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def fresh(self) -> Path:
        """A path where nothing is."""
        self._count += 1
        return self.home / f"run_{self._count}"

    def start(self, workdir: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
        """scripts/train.py with the settings of `TINY`; later words win."""
        return self.start_python(
            [str(ROOT / "scripts" / "train.py"), "--workdir", str(workdir), *TINY, *words],
            **options,
        )

    def start_python(
        self, words: list[str], *, devices: int = 1, under: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """Python with these words; `under` is a command that runs it and becomes it."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        return subprocess.Popen(
            [*under, sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, workdir: Path, *words: str, **options: Any) -> Ended:
        """From its start to its end."""
        return end(self.start(workdir, *words, **options))

    def undisturbed(self, *words: str) -> Path:
        """A finished run with these settings, made once."""
        if words not in self._undisturbed:
            workdir = self.fresh()
            ended = self.run(workdir, *words)
            if ended.status or ended.err:
                raise RuntimeError(f"an undisturbed run failed: {ended}")
            self._undisturbed[words] = workdir
        return self._undisturbed[words]


def end(process: subprocess.Popen[str]) -> Ended:
    """Waits for it."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nit hung for {PATIENCE} s"
    return Ended(process.returncode, out, err)


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> Ended:
    """Sends it a signal and waits for its end."""
    process.send_signal(number)
    return end(process)


# --- looking at a run ---


def wait_for(process: subprocess.Popen[str], truth: Callable[[], bool]) -> None:
    """Returns once something is true, or the process has ended."""
    while process.poll() is None and not truth():
        time.sleep(0.01)


def wait_until_begun(process: subprocess.Popen[str], workdir: Path) -> None:
    """Until it has the folder to itself: it restores, compiles and trains from here on."""
    lock = workdir / "lock"
    name = f"process {process.pid} "
    wait_for(process, lambda: lock.exists() and lock.read_text().startswith(name))


def wait_until_saving(process: subprocess.Popen[str], workdir: Path) -> None:
    """Until it has begun to save for the first time."""
    wait_until_begun(process, workdir)
    known = saved_steps(workdir)
    checkpoints = workdir / "checkpoints"
    wait_for(
        process,
        lambda: (
            checkpoints.is_dir() and bool({path.name for path in checkpoints.iterdir()} - known)
        ),
    )


def saved_steps(workdir: Path) -> set[str]:
    """The names of the steps that are whole, and of nothing that is half done."""
    folder = workdir / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if name.isdecimal()}


def steps_to_lose(workdir: Path) -> int:
    """Those that metrics.jsonl has and no whole checkpoint."""
    newest = max(map(int, saved_steps(workdir)), default=0)
    metrics = workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    whole = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(whole[-1] - newest, 0) if whole else 0


def result(workdir: Path, step: int = STEPS) -> Result:
    """What a run left."""
    _, states = load_states(workdir)
    return Result(hashes(states[step]()), (workdir / "metrics.jsonl").read_bytes())


def every_byte(workdir: Path, *, but: tuple[str, ...] = ("lock",)) -> dict[str, bytes | None]:
    """All that lies in a folder; None for folders. Whose turn it is, is no part of a run."""
    return {
        str(path.relative_to(workdir)): path.read_bytes() if path.is_file() else None
        for path in sorted(workdir.rglob("*"))
        if path.name not in but
    }
