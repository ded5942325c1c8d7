"""TPUs to compile for. Needs libtpu (`pip install -e ".[tpu]"`), and no TPU."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = ("v5e", "v6e", "tpu7x")
_TOPOLOGY = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# No metadata server is asked, and two processes may load libtpu at once.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def device(target: str) -> Any:
    """One device of the target, which programs can be compiled for but not run on.

    Raises:
        RuntimeError: libtpu is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    description = topologies.get_topology_desc(
        _TOPOLOGY[target], "tpu", chips_per_host_bounds=(1, 1, 1)
    )
    return description.devices[0]


def array(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    """The type of an array on the device."""
    mesh = Mesh(np.array([device]), ("device",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
