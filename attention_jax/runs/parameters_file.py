"""Parameters as a safetensors file, which other programs read too; no other file uses safetensors.

A tensor has the name of its leaf, with dots: "decoder.0.cross_attention.output.kernel".
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.core.checks import optional_package
from attention_jax.core.errors import one_line
from attention_jax.runs.checkpoints import earlier_name, first_difference, kinds, named_leaves
from attention_jax.runs.run_folder import write_bytes, writing


def write_parameters(path: Path, params: Any, metadata: dict[str, str]) -> None:
    """Writes a pytree of arrays; the file is never left half written.

    Args:
        path: the file.
        params: the pytree.
        metadata: texts, which the file holds too.

    Raises:
        ValueError: a leaf has a dtype that the format does not have, or two leaves have one name;
            or the file cannot be written; or safetensors is not installed.
    """
    package = _safetensors()
    try:
        # safetensors saves an array in the order of its memory, whatever its strides are.
        leaves = {name: np.asarray(leaf, order="C") for name, leaf in named_leaves(params).items()}
        content = package.numpy.save(leaves, metadata)
    except (package.SafetensorError, TypeError) as error:  # TypeError: a PRNG key
        raise ValueError(f"params cannot be written to {path}: {one_line(error)}") from error
    with writing("file", path):
        write_bytes(path, content)


def read_parameters(path: Path, like: Any) -> tuple[Any, dict[str, str]]:
    """The parameters in a file, as NumPy arrays in a pytree, and the metadata.

    Args:
        path: the file.
        like: a pytree of arrays or `jax.ShapeDtypeStruct`: the names, shapes and dtypes.

    Raises:
        ValueError: the file cannot be read, or holds other parameters or a dtype that NumPy lacks
            (float8); or safetensors is not installed.
    """
    package = _safetensors()
    try:
        with package.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            leaves = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, AttributeError, package.SafetensorError) as error:
        # AttributeError: NumPy lacks a dtype that the format has, such as float8.
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from error
    if different := first_difference(kinds(leaves), kinds(like)):
        raise ValueError(f"{path} holds other parameters than the model has: {different}")
    ordered = [leaves.get(name, leaves.get(earlier_name(name))) for name in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), ordered), metadata


def _safetensors() -> Any:
    """The package, with its module for NumPy."""
    optional_package("safetensors.numpy", "a .safetensors file", extra="export")
    return optional_package("safetensors", "a .safetensors file", extra="export")
