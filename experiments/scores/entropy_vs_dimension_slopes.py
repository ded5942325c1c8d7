"""How fast raw entropy falls with the dimension, for few and for many keys (exercise 38.3)."""

from __future__ import annotations

import math

import numpy as np

from experiments.experiment import JSON, Expectation

GROUPS = 10  # independent groups of queries
_T_QUANTILE = 2.262  # 97.5 % quantile of Student's t with GROUPS - 1 degrees of freedom
FALLING_DIMS = (4, 256)  # the source's curve starts at 4 and is at about 0 from 256 on


def slopes(numbers: JSON, keys: int) -> np.ndarray:
    """Returns the fall of raw entropy in nats per doubling of d_k, one number per group.

    The slope of a line fitted to entropy against log2 d_k, with the sign changed.
    """
    dims = np.array(numbers["config"]["dims"])
    falling = (dims >= FALLING_DIMS[0]) & (dims <= FALLING_DIMS[1])
    by_group = np.array(numbers["sweeps"][str(keys)]["dot"]["entropy_by_group"])
    return -np.polyfit(np.log2(dims[falling]), by_group[falling], 1)[0]


def differences(numbers: JSON) -> dict[str, tuple[float, float]]:
    """Returns {unit: (mean, half of the 95 % interval)} of the fall for most keys minus fewest.

    Empty if the numbers of keys or the dimensions are too few to compare.
    """
    config = numbers["config"]
    few, many = min(config["keys"]), max(config["keys"])
    falling = [dim for dim in config["dims"] if FALLING_DIMS[0] <= dim <= FALLING_DIMS[1]]
    if few == many or len(falling) < 2 or "dot" not in config["scores"]:
        return {}
    falls = [slopes(numbers, few), slopes(numbers, many)]
    found = {}
    for unit, scales in (("nats", (1, 1)), ("share of log T", (math.log(few), math.log(many)))):
        of_few, of_many = (fall / scale for fall, scale in zip(falls, scales, strict=True))
        # The groups of few keys and of many keys are independent of each other.
        error = math.hypot(of_few.std(ddof=1), of_many.std(ddof=1)) / math.sqrt(GROUPS)
        found[unit] = float(of_many.mean() - of_few.mean()), _T_QUANTILE * error
    return found


def slope_expectations(numbers: JSON) -> list[Expectation]:
    """The claim that entropy falls faster with more keys, in nats and as a share of log T."""
    config = numbers["config"]
    few, many = min(config["keys"]), max(config["keys"])
    return [
        Expectation(
            f"raw entropy falls faster with {many} keys than with {few} from d_k ="
            f" {FALLING_DIMS[0]} to {FALLING_DIMS[1]}, {unit} per doubling: lower end of the 95 %"
            " interval of the difference",
            "crashes faster",
            mean - half,
            0,
            math.inf,
            "ten independent groups of queries",
        )
        for unit, (mean, half) in differences(numbers).items()
    ]
