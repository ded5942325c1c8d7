"""TPUs and GPUs that are not here: their compilers run on a CPU, and say what a program would do.

A test that uses them is marked `accelerators`, and skipped where a compiler is not installed. They
need jax 0.10.2 or newer with the extra `[tpu]` (libtpu) or `[cuda12]` (the CUDA plugin).
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What XLA reads of an H100, from its data sheet and the CUDA programming guide.
H100 = """gpu_device_info {
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


def tpu_devices(topology: str) -> list[Any]:
    """The devices of a topology such as "v5e:2x4"."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('needs libtpu: pip install "attention-jax[tpu]"')
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return list(topologies.get_topology_desc(topology, "tpu").devices)


def h100_devices(count: int = 1) -> list[Any]:
    """The devices of a node of H100s."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip('needs the CUDA plugin: pip install "attention-jax[cuda12]"')
    description = topologies.get_topology_desc(
        "h100", "cuda", target_config=H100, topology=f"1x1x{count}"
    )
    return list(description.devices)


def on_device(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    """An array to compile for, on one device."""
    mesh = Mesh(np.array([device]), ("device",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def custom_calls(compiled: Any) -> list[str]:
    """The targets of the custom calls of a compiled program."""
    return re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())
