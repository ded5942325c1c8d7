"""Checkpoints, through Orbax and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

State = Any  # a pytree of arrays


class Checkpoints:
    """The newest states of a run, one folder a step.

    Args:
        folder: where they are, made if it is missing.
        keep: how many of the newest to keep.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int = 2):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates every save
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: State) -> None:
        """Begins to save; returns once the state is copied, so that training may go on."""
        # The copy is ours: the next call donates the state's buffers, and the save may read late.
        state = jax.tree.map(jnp.copy, state)
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def wait(self) -> None:
        """Returns once everything begun is on disk."""
        self._manager.wait_until_finished()

    def latest_step(self) -> int | None:
        """The newest step saved, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps that are kept, the newest last."""
        return sorted(self._manager.all_steps())

    def restore(self, like: State, *, step: int | None = None) -> State | None:
        """The newest state, or None if there is none.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct` of the same structure. Leaves that do
                not say where they live are put on the first device.
            step: one of `steps`, for its state in place of the newest.

        Raises:
            ValueError: the state is damaged or of another structure.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            return None
        # Orbax would ask for the very devices that saved; a run may be read on another machine.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here
            ),
            like,
        )
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:  # Orbax and what it stands on raise dozens of kinds
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"checkpoint {self._folder / str(step)} cannot be read: {reason}"
            ) from error

    def close(self) -> None:
        """Waits for saves and lets go of the folder."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
