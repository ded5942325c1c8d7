"""Devices to compile for. Their compilers are needed, but no TPU or GPU.

libtpu compiles for TPUs (`pip install -e ".[tpu]"`), the CUDA plugin for an H100
(`pip install -e ".[cuda13]"`, with Python 3.11 `".[cuda12]"`).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

H100 = "H100"
_ONE_CHIP = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
TARGETS = tuple(_ONE_CHIP)  # the TPUs
# No metadata server is asked, and two processes may load libtpu at once.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def missing_compiler(target: str) -> str:
    """Why a target's programs cannot be compiled; "" if its compiler is installed."""
    names = ["jax_cuda12_plugin", "jax_cuda13_plugin"] if target == H100 else ["libtpu"]
    is_there = any(importlib.util.find_spec(name) is not None for name in names)
    return "" if is_there else f"{' or '.join(names)} is not installed"


def device(target: str) -> Any:
    """A device of a target, one of `TARGETS` or `H100`: programs compile for it and do not run.

    Raises:
        RuntimeError: the compiler for the target is not installed.
    """
    if reason := missing_compiler(target):
        raise RuntimeError(f"cannot compile for {target}: {reason}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: Any = {"chips_per_host_bounds": (1, 1, 1)}
    if target == H100:
        config = Path(__file__).with_name("h100.textproto").read_text()
        options = {"target_config": config, "topology": "1x1x1"}
    chip, platform = (target, "cuda") if target == H100 else (_ONE_CHIP[target], "tpu")
    return topologies.get_topology_desc(chip, platform, **options).devices[0]


def array(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    """The type of an array on the device."""
    mesh = Mesh(np.array([device]), ("device",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
