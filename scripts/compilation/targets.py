"""Devices to compile for that are not there. A compiler is needed, and no TPU or GPU.

libtpu compiles for TPUs (`pip install -e ".[tpu]"`), the CUDA plugin for an H100
(`pip install -e ".[cuda12]"`).
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = ("v5e", "v6e", "tpu7x")  # the TPUs
H100 = "H100"
_ONE_CHIP = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
_SLICES = {("v5e", 8): "v5e:2x4", ("v5e", 256): "v5e:16x16"}
# No metadata server is asked, and two processes may load libtpu at once.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

# What XLA reads of an H100, from its data sheet and the CUDA programming guide.
_H100 = """gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def missing_compiler(target: str) -> str:
    """Why nothing can be compiled for a target here; "" if its compiler is installed."""
    if target == H100:
        installed = importlib.util.find_spec("jax_cuda12_plugin") is not None
        return "" if installed else "the CUDA plugin is not installed"
    return "" if importlib.util.find_spec("libtpu") is not None else "libtpu is not installed"


def devices(target: str, count: int = 1) -> list[Any]:
    """Devices of a target, which programs can be compiled for but not run on.

    Args:
        target: one of `TARGETS`, or `H100`.
        count: 1 for any target; 8 or 256 chips of a v5e; GPUs of one node for an H100.

    Raises:
        RuntimeError: the compiler for the target is not installed.
    """
    if reason := missing_compiler(target):
        raise RuntimeError(f"cannot compile for {target}: {reason}")
    if target == H100:
        description = topologies.get_topology_desc(
            "h100", "cuda", target_config=_H100, topology=f"1x1x{count}"
        )
        return list(description.devices)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if count == 1:
        one_chip: Any = {"chips_per_host_bounds": (1, 1, 1)}
        return [topologies.get_topology_desc(_ONE_CHIP[target], "tpu", **one_chip).devices[0]]
    return list(topologies.get_topology_desc(_SLICES[target, count], "tpu").devices)


def array(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    """The type of an array on the device."""
    mesh = Mesh(np.array([device]), ("device",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
