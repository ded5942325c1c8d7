"""Devices to compile for. Their compilers are needed, but no TPU or GPU.

libtpu compiles for TPUs (`pip install -e ".[tpu]"`), the CUDA plugin for an H100
(`pip install -e ".[cuda12]"`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention_jax.core.programs import one_line

Rows = list[dict[str, Any]]
TARGETS = ("v5e", "v6e", "tpu7x")  # the TPUs
H100 = "H100"
_H100 = Path(__file__).with_name("h100.textproto")
_ONE_CHIP = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# No metadata server is asked, and two processes may load libtpu at once.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def missing_compiler(target: str) -> str:
    """Why a target's programs cannot be compiled; "" if its compiler is installed."""
    if target == H100:
        plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
        installed = any(importlib.util.find_spec(plugin) for plugin in plugins)
        return "" if installed else "the CUDA plugin is not installed"
    return "" if importlib.util.find_spec("libtpu") is not None else "libtpu is not installed"


def device(target: str) -> Any:
    """A device of a target, one of `TARGETS` or `H100`: programs compile for it and do not run.

    Raises:
        RuntimeError: the compiler for the target is not installed.
    """
    if reason := missing_compiler(target):
        raise RuntimeError(f"cannot compile for {target}: {reason}")
    if target == H100:
        options: Any = {"target_config": _H100.read_text(), "topology": "1x1x1"}
        return topologies.get_topology_desc("h100", "cuda", **options).devices[0]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"chips_per_host_bounds": (1, 1, 1)}
    return topologies.get_topology_desc(_ONE_CHIP[target], "tpu", **options).devices[0]


def array(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    """The type of an array on the device."""
    mesh = Mesh(np.array([device]), ("device",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def rows_or_error(about: dict[str, Any], compiled: Callable[[], Rows]) -> Rows:
    """The rows of a program, each with the entries `about`; "error" says why there are none."""
    try:
        return [about | row for row in compiled()]
    except Exception as error:
        return [about | {"error": f"{type(error).__name__}: {one_line(error)}"}]


def target_row(claim: str, what: str, most: float, number: float) -> dict[str, Any]:
    """A row with a number, the most that it was allowed to be, and whether it is met."""
    met = "yes" if number <= most else "MISS"
    target = f"at most {most:g}"
    return {"claim": claim, "what": what, "target": target, "found": number, "met": met}
