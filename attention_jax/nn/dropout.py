"""Dropout in modules: when it is enabled, and its PRNG keys, as in Flax's own layers."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from attention_jax.core.checks import checked_fraction

Array = jax.Array


class RandomModule(nnx.Module):
    """A module whose calls are random in training: `module.train()` and `module.eval()` say which.

    A call with a PRNG key is random. A call without one after `module.train()` is an error: it
    would silently drop nothing. Decoding is never random.
    """

    deterministic: bool | None = None
    is_random: bool = False  # whether a call in training draws numbers
    attend: Callable[..., Any]  # -> `Attended`

    def __getattr__(self, name: str) -> Any:
        # Linen refuses a module with a child "params", the name of before: pickles still have it.
        before = {"params_of_score": "params", "params": "params_of_score"}
        if before.get(name) in vars(self):
            return getattr(self, before[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check_rng(self, rng: Array | None) -> None:
        if rng is None and self.is_random and self.deterministic is False:
            raise ValueError(
                "rng must be given after module.train(), for dropout and noise; without them, call"
                " module.eval()"
            )

    def __call__(self, *tokens: Any, **arguments: Any) -> Any:
        """Calls `attend`; returns the output, or (output, weights) with `return_weights`."""
        self._check_rng(arguments.get("rng"))
        output, weights, _ = self.attend(*tokens, **arguments)
        return output if weights is None else (output, weights)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Called by `nnx.view`: sets `deterministic` of the view, unless it is None."""
        if deterministic is not None:
            self.deterministic = deterministic


class DropoutModule(RandomModule):
    """A module with dropout, whose randomness comes from an rng stream as in `flax.nnx.Dropout`.

    Dropout is enabled in a call with a `dropout_rng`, or with `deterministic=False`: the argument
    of the call, or by default the setting of the module, which `module.train()` and `module.eval()`
    change. Without a `dropout_rng`, each such call takes the next key of the module's stream, which
    is state (`nnx.RngState`) beside the parameters (`nnx.Param`). With a `dropout_rate` above 0 and
    neither argument nor setting, a call is an error: it would silently drop nothing.
    """

    dropout_rate: float
    rngs: nnx.RngStream | None

    def _set_dropout(
        self, rate: float, deterministic: bool | None, keep_rngs: bool, rngs: nnx.Rngs
    ) -> None:
        """Call this last in `__init__`, so that dropout does not change the initial parameters.

        If `rngs` has a single stream, the fork here advances it.
        """
        self.dropout_rate = checked_fraction("dropout_rate", rate)
        self.deterministic = deterministic
        keeps = keep_rngs and self.dropout_rate > 0
        if keeps and not {"dropout", "default"} & set(rngs):
            raise ValueError(
                f"rngs must have a stream 'dropout' for dropout_rate {rate}; got {sorted(rngs)}."
                " Give nnx.Rngs(params=..., dropout=...), or keep_rngs=False and a dropout_rng at"
                " each call"
            )
        self.rngs = nnx.data(rngs.dropout.fork() if keeps else None)

    def _dropout_rng(self, dropout_rng: Array | None, deterministic: bool | None) -> Array | None:
        """The PRNG key of a call; None if dropout is not enabled."""
        if deterministic:
            return None
        if dropout_rng is not None:
            return dropout_rng
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None and self.dropout_rate > 0:
            raise ValueError(
                f"deterministic must be given where dropout_rate is {self.dropout_rate}: call"
                " module.train() or module.eval(), or give deterministic=True or False, or a"
                " dropout_rng"
            )
        if deterministic is not False or self.dropout_rate == 0:
            return None
        if self.rngs is None:
            raise ValueError(
                "dropout_rng must be given where deterministic is False and the module keeps no"
                " stream (keep_rngs=False, or dropout_rate 0)"
            )
        return self.rngs()
