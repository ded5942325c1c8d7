"""Parameters of scores as Flax keeps them, and as functions take them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from attention_jax.scores import Params


def score_params(params: Params) -> Any:
    """A pytree of arrays as a module's attribute, each array an `nnx.Param`."""
    return nnx.data(jax.tree.map(nnx.Param, params))


def values_of(params: Any) -> Params:
    """The arrays in a pytree of `nnx.Param`."""
    return jax.tree.map(
        lambda param: param[...], params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
    )
