"""Kernels of Mosaic GPU compiled for an H100: registers, spills, and instructions of each loop.

The CUDA plugin of JAX (the extra `[cuda12]`) compiles the kernels, and no GPU is needed. It tells
registers and spills, and the instructions too if the package triton is installed, which
has `nvdisasm`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;/]*)")
_LABEL = re.compile(r"^\.(L_x_\d+):")
_TARGET = re.compile(r"`\(\.(L_x_\d+)\)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """The instructions of an innermost loop over features, for one thread."""

    instructions: int
    features_of_pairs: int  # 1 + x y, which is computed once for each feature of each pair
    special: int  # of the special function unit (MUFU)

    @property
    def special_per_feature(self) -> float:
        """Operations of the special function unit per pair and feature."""
        return self.special / self.features_of_pairs


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel: what the assembler says, and its loops of products."""

    registers: int
    spills: int  # bytes that are stored and loaded
    loops: tuple[Loop, ...]  # for features that are not large; () without `nvdisasm`


def kernels_of(function: Any, *args: Any) -> dict[str, Kernel]:
    """Compiles a jitted function for the device of its arguments: its Mosaic GPU kernels."""
    with tempfile.TemporaryDirectory() as folder, _dumping_to(folder):
        function.lower(*args).compile()
        files = sorted(Path(folder).glob("*.ptxas"))
        return {re.sub(r"_\d+$", "", file.stem): _kernel(file) for file in files}


@contextlib.contextmanager
def _dumping_to(folder: str) -> Iterator[None]:
    """The environment in which JAX writes to the folder what it compiles."""
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # it sets MOSAIC_GPU_CUDA_ROOT
    flags = dict.fromkeys(("PTX", "PTXAS", "SASS"), "1") | {"TO": folder}
    variables = {f"MOSAIC_GPU_DUMP_{name}": value for name, value in flags.items()}
    toolkit, nvdisasm = _folder("nvidia", "cuda_nvcc"), _folder("triton", "backends/nvidia/bin")
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        if toolkit and nvdisasm:
            _link(toolkit, Path(root), Path(nvdisasm, "nvdisasm"))
            variables["MOSAIC_GPU_CUDA_ROOT"] = root
        before = {name: os.environ.get(name) for name in variables}
        stack.callback(_restore, before)
        os.environ.update(variables)
        yield


def _folder(package: str, inside: str) -> Path | None:
    """A folder of an installed package."""
    spec = importlib.util.find_spec(package)
    paths = (Path(path, inside) for path in (spec and spec.submodule_search_locations) or ())
    return next((path for path in paths if path.is_dir()), None)


def _link(toolkit: Path, root: Path, nvdisasm: Path) -> None:
    """Lays out a CUDA toolkit of links in `root`, with `nvdisasm` among its programs."""
    for path in toolkit.iterdir():
        if path.name != "bin":
            (root / path.name).symlink_to(path)
    (root / "bin").mkdir()
    for path in (*(toolkit / "bin").iterdir(), nvdisasm):
        if not (root / "bin" / path.name).exists():
            (root / "bin" / path.name).symlink_to(path)


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def _kernel(file: Path) -> Kernel:
    text = file.read_text()
    (registers,) = re.findall(r"Used (\d+) registers", text)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
    listings = file.parent.glob(f"{glob.escape(file.stem)}.sass*")
    loops = (_loops_of_products(listing.read_text()) for listing in listings)
    return Kernel(int(registers), spills, tuple(next(loops, ())))


def _loops_of_products(listing: str) -> list[Loop]:
    """The innermost loops that compute 1 + x y and its reciprocal, and no exponential."""
    labels: dict[str, int] = {}
    instructions: list[tuple[str, str]] = []
    spans: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if match := _LABEL.match(line.strip()):
            labels[match[1]] = len(instructions)
        elif match := _INSTRUCTION.search(line):
            instructions.append((match[1], match[2]))
            target = _TARGET.search(line)
            if match[1] == "BRA" and target and target[1] in labels:
                spans.append((labels[target[1]], len(instructions)))
    loops = []
    for first, end in spans:
        others = (span for span in spans if span != (first, end))
        contains_loop = any(first <= start and stop <= end for start, stop in others)
        body = instructions[first:end]
        products = sum(
            name == "FFMA" and operands.rstrip().endswith(", 1") for name, operands in body
        )
        special = [name for name, _ in body if name.startswith("MUFU")]
        if not contains_loop and products and "MUFU.RCP" in special and "MUFU.EX2" not in special:
            loops.append(Loop(len(body), products, len(special)))
    return loops
