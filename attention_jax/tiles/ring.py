"""Ring attention: tiled attention over sequences that are sharded over n devices.

Every device keeps its queries. The keys and values go round the ring of devices, one device's share
per round. The work on a tile and its gradients are those of `tiled`, since each row saves its
largest logit and its sum of exponentials over the keys of all devices. In the backward pass keys
and values travel together with their gradients. Each device needs the memory of `tiled` for T / n
queries and S / n keys. Tokens are projected before the first round, so that features travel.

With a causal mask, late queries attend to more keys than early ones. So each device first exchanges
the second half of its tokens with its mirror image, device p with device n - 1 - p. Then each
device has the same work, in every round:

    device        0        1        2        3
    sharded      0 1      2 3      4 5      6 7
    mirrored     0 7      2 5      4 3      6 1

Source: Liu, Zaharia and Abbeel 2023, section 3. Brandon et al. 2023 for the imbalance; they give
each device every n-th token, so that no tile is a run of consecutive positions.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.normalizers import AttentionStatistics
from attention_jax.positions.contract import Mask, ShiftedBias, ShiftedMask, Shifts
from attention_jax.tiles import prepare as tiling
from attention_jax.tiles import tiled
from attention_jax.tiles.options import Inputs, Options, results_of_rows
from attention_jax.tiles.prepare import Arrays, Plan, Round, uncut

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one mesh axis; each sends its keys to the next after every round.

    Attributes:
        axis: the name of the mesh axis.
        lengths: the number of queries and of keys of a device.
        halves: how many of these the device does not exchange, in whole tiles.
    """

    axis: str
    lengths: tuple[int, int]
    halves: tuple[int, int]

    def rounds(self, one_round: Round, arrays: Arrays, of_keys: Any, carry: Any) -> tuple[Any, Any]:
        """`of_keys, carry = one_round(arrays, of_keys, carry)`, on the keys of each device in turn.

        Args:
            one_round: the work of one round, on the keys that are here.
            arrays: with the positions of the first round, and the schedules of all rounds.
            of_keys: a pytree that is sent with the keys to the next device after each round.
            carry: a pytree that stays on its device.

        Returns:
            `of_keys`, back on their first device, and the last carry.
        """
        devices = jax.lax.axis_size(self.axis)
        next_device = [(device, (device + 1) % devices) for device in range(devices)]

        def step_of_ring(state: Any, step_and_schedule: Any) -> tuple[Any, None]:
            (keys, values, of_keys), carry = state
            step, schedule = step_and_schedule
            of_round = self.at_round(arrays._replace(schedule=None), step)
            of_round = of_round._replace(schedule=schedule, keys=keys, values=values)
            of_keys, carry = one_round(of_round, of_keys, carry)
            # The ring can send the keys while the round computes. The last permutation returns them
            # to their first device. Only gradients need it; the forward pass has it too, so that
            # the program holds a single copy of the round.
            sent = jax.lax.ppermute((keys, values, of_keys), self.axis, next_device)
            return (sent, carry), None

        state: Any = (arrays.keys, arrays.values, of_keys), carry
        steps = jnp.arange(devices), arrays.schedule
        ((*_, of_keys), carry), _ = jax.lax.scan(step_of_ring, state, steps)
        return of_keys, carry

    def mirrored(self, tokens: Array, side: int) -> Array:
        """Exchanges the second half of tokens [length, ...] with the mirror image; an involution.

        Args:
            tokens: those of one device.
            side: 0 for queries, 1 for keys.
        """
        devices, half = jax.lax.axis_size(self.axis), self.halves[side]
        mirror_images = [(device, devices - 1 - device) for device in range(devices)]
        second = jax.lax.ppermute(tokens[half:], self.axis, mirror_images)
        return jnp.concatenate([tokens[:half], second])

    def shifts(self, step: Array) -> Shifts:
        """The positions of the queries, and of the keys that are here in round `step`."""
        devices, device = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        owner = (device.astype(step.dtype) - step) % devices  # each round has sent the keys on
        queries, keys = (jnp.stack([first, devices - 1 - first]) for first in (device, owner))
        return Shifts(self.lengths[0] * queries, self.lengths[1] * keys, self.halves)

    def at_round(self, functions: Any, step: Array) -> Any:
        """A pytree of functions of positions, for the keys of round `step`."""

        def shifted(leaf: Any) -> Any:
            return self.shifts(step) if isinstance(leaf, Shifts) else leaf

        return jax.tree.map(shifted, functions, is_leaf=lambda leaf: isinstance(leaf, Shifts))


def attend(options: Options, axis: str, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """Attention for one device's part of one example, under `jax.shard_map`.

    Args:
        options: as for every implementation.
        axis: the mesh axis over which sequences are sharded.
        inputs: query, key and value are the device's part; mask and bias are functions of positions
            in the whole sequences.

    Returns:
        the device's part of the output in the query's dtype, and of the statistics in the compute
        dtype.
    """
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    halves = math.ceil(lengths[0] / 2), math.ceil(lengths[1] / 2)
    plan = tiling.make_plan(options, halves, inputs.compute_dtype)
    ring = Ring(axis, lengths, plan.padded_lengths)
    plan = dataclasses.replace(plan, lengths=lengths, ring=ring)
    rows = tiled.attend_tiles(plan, _arrays_of_device(plan, ring, inputs))
    rows = jax.tree.map(lambda tiles: uncut(tiles, lengths[0]), rows)
    return jax.tree.map(lambda row: ring.mirrored(row, 0), results_of_rows(options, inputs, *rows))


def _arrays_of_device(plan: Plan, ring: Ring, inputs: Inputs) -> Arrays:
    """`tiling.prepare` for the tokens of this device.

    The schedule has an axis [devices] in front, for the rounds. All are made before the first
    round, and the batch decides about all tiles together: a batch that is sharded over another mesh
    axis then needs one small reduction, and none in a round.
    """
    shifts, devices = ring.shifts(jnp.zeros((), int)), jax.lax.axis_size(ring.axis)

    def shifted_mask(plan: Plan, shifts: Shifts) -> Mask | None:
        shifted = None if inputs.mask is None else ShiftedMask(inputs.mask, shifts)
        return tiling.mask_with_padding(plan, shifted)

    def used(lengths: tuple[int, int], **unshifted: Any) -> tuple[Array | None, Array | None]:
        """The used tokens among the queries or the keys of all devices."""
        plan_of_all = dataclasses.replace(plan, lengths=lengths)
        mask = shifted_mask(plan_of_all, dataclasses.replace(shifts, **unshifted))
        if mask is None:
            return None, None
        schedule = tiling.schedule_of(tiling.tile_statuses(plan_of_all, mask))
        return tiling.used_tokens(plan_of_all, mask, schedule)

    mask = shifted_mask(plan, shifts)
    schedule = None
    if mask is not None:
        statuses = jax.lax.map(
            lambda step: tiling.tile_statuses(plan, ring.at_round(mask, step)),
            jnp.arange(devices),
        )
        schedule = tiling.schedule_of(statuses)
    (queries, keys), zero = ring.lengths, jnp.zeros(1, int)
    counts, _ = used((queries, devices * keys), keys=zero)
    _, used_keys = used((devices * queries, keys), queries=zero)
    mirrored = inputs._replace(
        query=ring.mirrored(inputs.query, 0),
        key=ring.mirrored(inputs.key, 1),
        value=ring.mirrored(inputs.value, 1),
        bias=None if inputs.bias is None else ShiftedBias(inputs.bias, shifts),
    )
    arrays = tiling.cut_inputs(plan, mirrored, mask, schedule, (counts, used_keys), devices * keys)
    if arrays.dropout_mask is not None:
        arrays = arrays._replace(dropout_mask=ShiftedMask(arrays.dropout_mask, shifts))
    return arrays
