"""Where numbers come from: versions, machine, commit and a digest of the sources."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

_LIBRARY = Path(__file__).parents[1]
_PACKAGES = ("attention-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment(*folders: Path, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Versions, device, load, commit and sources, to be stored with results.

    "git_commit" ends with "-dirty" where a Python file or setup.cfg differs from that commit or is
    not in it; it is None without git. "sources" is `sources_digest` of the library and of
    `folders`. "load" is the average number of busy processes in the last minute; None
    on Windows.

    Args:
        folders: further folders of sources that results depend on.
        packages: further packages, which need not be installed.
    """
    versions = {}
    for package in (*_PACKAGES, *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "git_commit": _git_commit(),
        "sources": sources_digest(_LIBRARY, *folders),
    }


def usable_cpus() -> int | None:
    """How many processors this process may use, on which XLA divides its work; None if unknown."""
    on_linux = hasattr(os, "sched_getaffinity")  # what `taskset` and containers leave
    return len(os.sched_getaffinity(0)) if on_linux else os.cpu_count()


def _processor() -> str:
    """The processor's name and, on Linux, the width of its vectors, such as "..., 512 bits"."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("model name")]
    bits = 512 if "avx512f" in text else 256 if "avx2" in text else 128
    name = f"{lines[0].partition(': ')[2]}, {bits} bits" if lines else platform.processor()
    return name or platform.machine()


def sources_digest(*folders: Path) -> str:
    """The SHA-256 digest of the names and contents of all Python files in folders, as 64 digits."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.parts):
            content, name = path.read_bytes(), path.relative_to(folder.parent).as_posix()
            digest.update(f"{name}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _git_commit() -> str | None:
    # Results are written into the working tree too, so that only sources count.
    options = ("--porcelain=v2", "--branch", "--untracked-files=all", "--", ":/*.py", ":/*.cfg")
    command = ["git", "-C", str(_LIBRARY), "status", *options]
    try:
        status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    head, *others = status.splitlines()  # "# branch.oid COMMIT"; more of "# branch"; the changes
    is_dirty = any(not line.startswith("#") for line in others)
    return head.split()[-1] + "-dirty" * is_dirty
