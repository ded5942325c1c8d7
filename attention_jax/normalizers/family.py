"""`Family`, the functions of one number that turn shifted logits into weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.programs import is_of_this_package

Array = jax.Array


class Family(NamedTuple):
    """The `weight` and `inverse` of a normaliser, with its parameters."""

    normalizer: Any  # a `Normalizer` that is its own family
    params: Any

    def weight(self, shifted: Array) -> Array:
        """The weights, with derivative 0 at -inf in parameters too, where 0 * -inf would be NaN."""
        # The families of this library read no parameters.
        if not jax.tree.leaves(self.params) or is_of_this_package(self.normalizer.__class__):
            return self.normalizer.weight(self.params, shifted)
        masked = shifted == -jnp.inf
        weights = self.normalizer.weight(self.params, jnp.where(masked, 0, shifted))
        return jnp.where(masked, 0, weights)

    def inverse(self, weight: Array) -> Array:
        """The shifted logits with these weights."""
        return self.normalizer.inverse(self.params, weight)

    def weights_and_slopes(self, shifted: Array) -> tuple[Array, Array]:
        """The weights of shifted logits, and their derivatives."""
        return jax.jvp(self.weight, (shifted,), (jnp.ones_like(shifted),))

    def constant(self) -> Family:
        """The family with parameters that are not differentiated."""
        return self._replace(params=jax.lax.stop_gradient(self.params))
