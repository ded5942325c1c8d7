"""On paper: what do 8 to 4,096 devices exchange in a step, and does computing hide it?

Source:   published speeds of links and chips (MACHINES below names them); the formulas are ours.
          Nothing here was run on such a machine. The library's own training steps were compiled
          for TPUs, by `scripts/compile_report.py --part steps`.
Command:  .venv/bin/python -m experiments.costs.weak_scaling
Time:     a few seconds.
Expected: data and fsdp move 2 and 3 times the parameters, however many devices there are; the ring
          of context parallelism moves more with every device, and its work grows as fast.
          `compiled_steps.py` says what is expected of compiled steps, against these formulas.

Each device has the same number of tokens c however many there are (weak scaling). With P
parameters, L layers of width D, n devices and b bytes per number, each device sends in a step

    data      2 (n - 1) / n P b                     gradients summed (a ring's all-reduce)
    fsdp      3 (n - 1) / n P b                     parameters gathered, and gradients summed
    context   6 n L c D b + data's                  keys and values go round forward and backward,
                                                    their gradients backward

and computes 6 P c operations in matrices of parameters and, with causal attention of T keys,
7 T c D per layer (two products forward and five backward, masked tiles left out). T is a sequence's
length, n c for context parallelism. Communication that takes less time than computing can be hidden
behind it. For a long ring this depends on c alone: with O operations per second and links of W
bytes per second, it takes

    c >= 6 b O / 7 W    tokens per device.

The score is no variable here: the formulas count products of matrices alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.costs import compiled_steps
from experiments.experiment import JSON, Expectation, near, run_experiment, significant

ARRANGEMENTS = ("data", "fsdp", "context")


class Machine(NamedTuple):
    """Published speeds of a device and its links, in bytes per second and direction."""

    operations: float  # bfloat16, per second
    island: int  # devices that the fast links join
    collective: tuple[float, float]  # from each device in a collective: within an island, beyond
    neighbour: tuple[float, float]  # from a device to the next in a ring: within an island, beyond
    source: str


MACHINES = {
    "H100": Machine(
        989e12,
        island=8,
        # Each of a node's eight GPUs has a link of 50 GB/s to other nodes; a collective uses all.
        collective=(450e9, 8 * 50e9),
        neighbour=(450e9, 50e9),
        source="NVIDIA H100 and DGX H100 datasheets: NVLink 900 GB/s (450 each way), InfiniBand NDR"
        " 400 Gbit/s a GPU",
    ),
    "TPU v5p": Machine(
        459e12,
        island=6144,
        # Six links of a 3D torus; a ring uses one of them.
        collective=(600e9, 600e9),
        neighbour=(100e9, 100e9),
        source="Google Cloud, TPU v5p: 1,200 GB/s of inter-chip interconnect, both ways together",
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        devices: numbers of devices.
        parameters: P, parameters of the model.
        layers: L, layers of the model.
        width: D, width of its layers.
        tokens: c, tokens per device and step.
        length: T, length of a sequence, except for context parallelism, whose one sequence has n c.
        number_bytes: b, bytes per number; 4 for float32, in which the library trains.
        utilisation: the share of a chip's operations that a program reaches.
        hop_seconds: latency of a message.
    """

    devices: tuple[int, ...] = (8, 64, 512, 4096)
    parameters: float = 1.3e9
    layers: int = 24
    width: int = 2048
    tokens: float = 8192
    length: int = 2048
    number_bytes: int = 4
    utilisation: float = 0.4
    hop_seconds: float = 5e-6

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "width", "tokens", "length", "number_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0; got {getattr(self, name)}")
        if not self.devices or min(self.devices) < 2:
            raise ValueError(f"devices must be one or more of at least 2; got {self.devices}")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation must be above 0, at most 1; got {self.utilisation}")
        if not self.hop_seconds >= 0:
            raise ValueError(f"hop_seconds must be at least 0; got {self.hop_seconds}")


QUICK = Config()
CAPTIONS = {
    "weak_scaling": "Seconds of communication and of computing per step against the number of"
    " devices, for three ways of sharing the work and two machines. With data and fsdp both stay"
    " constant, communication below computing; with the ring both grow together."
}


def run(config: Config) -> JSON:
    """Computes bytes and seconds by machine, arrangement and number of devices; reads those
    of the compiled steps.
    """
    return {
        "compiled": compiled_steps.read(),
        "sources": {name: machine.source for name, machine in MACHINES.items()},
        "least_tokens": {
            name: significant(_least_tokens(config, machine)) for name, machine in MACHINES.items()
        },
        "steps": {
            name: {
                arrangement: {
                    str(count): significant(_step(config, machine, arrangement, count))
                    for count in config.devices
                }
                for arrangement in ARRANGEMENTS
            }
            for name, machine in MACHINES.items()
        },
    }


def sent_bytes(config: Config, arrangement: str, count: int) -> tuple[float, float]:
    """Returns the bytes that a device sends in a step: in collectives, and to its neighbour."""
    parameters = config.parameters * config.number_bytes
    times = {"data": 2, "fsdp": 3, "context": 2}[arrangement]
    collective = times * (count - 1) / count * parameters
    if arrangement != "context":
        return collective, 0.0
    tokens = config.tokens * config.width * config.number_bytes
    return collective, 6 * count * config.layers * tokens


def _step(config: Config, machine: Machine, arrangement: str, count: int) -> JSON:
    beyond = count > machine.island
    collective, ring = sent_bytes(config, arrangement, count)
    seconds = collective / machine.collective[beyond] + ring / machine.neighbour[beyond]
    if ring:
        seconds += config.layers * 2 * count * config.hop_seconds
    length = count * config.tokens if arrangement == "context" else config.length
    operations = config.tokens * (6 * config.parameters + 7 * config.layers * length * config.width)
    return {
        "gigabytes": (collective + ring) / 1e9,
        "communication_seconds": seconds,
        "computing_seconds": operations / (config.utilisation * machine.operations),
    }


def _least_tokens(config: Config, machine: Machine) -> float:
    """The tokens per device from which the largest ring hides its communication, by bisection."""
    few, many = 1.0, 1e9
    while many / few > 1.001:
        tokens = math.sqrt(few * many)
        step = _step(
            dataclasses.replace(config, tokens=tokens), machine, "context", max(config.devices)
        )
        hidden = step["communication_seconds"] <= step["computing_seconds"]
        few, many = (few, tokens) if hidden else (tokens, many)
    return many


def plot(numbers: JSON) -> Mapping[str, Figure]:
    """Draws seconds of communication and computing against devices, one panel per machine."""
    machines = numbers["steps"]
    figure, axes = plotting.new_figure(4.5 * len(machines), 4.4, columns=len(machines), sharey=True)
    for panel, (machine, arrangements) in zip(axes, machines.items(), strict=True):
        for index, (arrangement, steps) in enumerate(arrangements.items()):
            counts = [int(count) for count in steps]
            _draw(panel, counts, steps, "communication", index, f"{arrangement}, communication")
            if arrangement == "data":
                _draw(panel, counts, steps, "computing", 4, "data and fsdp, computing")
            elif arrangement == "context":
                _draw(panel, counts, steps, "computing", index, "context, computing")
        panel.set(title=machine, xlabel="devices", xticks=counts, xticklabels=counts)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("seconds per step (calculated)")
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper center", ncols=3, fontsize=9)
    return {"weak_scaling": figure}


def _draw(panel: Axes, counts: list[int], steps: JSON, kind: str, index: int, label: str) -> None:
    seconds = [step[f"{kind}_seconds"] for step in steps.values()]
    panel.loglog(
        counts,
        seconds,
        "-" if kind == "communication" else ":",
        color=plotting.COLORS[index],
        marker=plotting.MARKERS[index],
        markersize=5,
        label=label,
    )


def expectations(numbers: JSON) -> list[Expectation]:
    """Whether sending hides behind computing, and when, for the default settings."""
    counts = numbers["config"]["devices"]
    most, fewest = max(counts), min(counts)
    # With 8,192 tokens per device: enough for a TPU's torus and for the links within a node, not
    # for the InfiniBand between nodes.
    hidden = {(machine, way, most): (0.0, 1.0) for machine in MACHINES for way in ARRANGEMENTS}
    hidden["H100", "context", most] = (1.0, math.inf)
    hidden |= {(machine, "context", fewest): (0.0, 1.0) for machine in MACHINES}
    checks = [
        Expectation(
            f"{machine}: communication over computing of {way} on {count} devices",
            "", _share(numbers["steps"][machine][way][str(count)]), *bounds,
            "a sketch: hidden, or not",
        )
        for (machine, way, count), bounds in hidden.items()
    ]  # fmt: skip
    config = Config(**numbers["config"])
    for name, machine in MACHINES.items():
        operations = config.utilisation * machine.operations
        formula = 6 * config.number_bytes * operations / (7 * machine.neighbour[1])
        checks.append(
            near(
                f"{name}: tokens per device that hide a ring of {most} devices",
                "", numbers["least_tokens"][name], formula, 0.1 * formula,
                "the formula leaves out parameters and latency",
            )
        )  # fmt: skip
    return checks + compiled_steps.expectations(numbers["compiled"])


def _share(step: JSON) -> float:
    """The time of communication over the time of computing."""
    return float(step["communication_seconds"] / step["computing_seconds"])


def report(numbers: JSON) -> str:
    """Returns what follows for a sketch of a model, and the table of all steps."""
    config, machines = numbers["config"], numbers["steps"]
    constant = [
        _share(step)
        for arrangements in machines.values()
        for way in ("data", "fsdp")
        for step in arrangements[way].values()
    ]
    few, many = min(config["devices"]), max(config["devices"])
    rings = []
    for machine, arrangements in machines.items():
        first, last = (_share(arrangements["context"][str(count)]) for count in (few, many))
        tokens = numbers["least_tokens"][machine]
        rings.append(
            f"{machine}: {first:.2g} times as long as computing on {few:,} devices, {last:.2g}"
            f" times on {many:,}, and no longer from {tokens:,.0f} tokens per device on"
        )
    sources = "; ".join(f"{machine}: {source}" for machine, source in numbers["sources"].items())
    lines = [
        "This is a calculation. Nothing in it ran on such machines. A model of"
        f" {config['parameters'] / 1e9:g} billion parameters ({config['layers']} layers of width"
        f" {config['width']:,}, {config['number_bytes']} bytes per number) trains on"
        f" {config['tokens']:,g} tokens per device and step, and reaches"
        f" {config['utilisation']:.0%} of a chip's published peak. The docstring has the formulas."
        f" Published speeds: {sources}.",
        "",
        "With data and fsdp, a device sends at most 2 and 3 times the parameters, however many"
        f" devices there are. Sending takes {100 * min(constant):.0f} to"
        f" {100 * max(constant):.0f} % of the time of computing.",
        "",
        "With context parallelism, one sequence is as long as the tokens of all devices together."
        " What a device sends and what it computes both grow with the number of devices. Whether"
        " sending hides behind computing then depends on the tokens per device. Within a node of"
        " GPUs, and along the torus of a TPU, it does. Between nodes, where one InfiniBand link"
        f" carries the ring, it does not. Time of sending: {'; '.join(rings)}.",
        "",
        "| machine | devices | shared | GB sent by each device | seconds sending | computing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for machine, arrangements in machines.items():
        for arrangement, steps in arrangements.items():
            for count, step in steps.items():
                lines.append(
                    f"| {machine} | {int(count):,} | {arrangement} | {_digits(step['gigabytes'])}"
                    f" | {step['communication_seconds']:.3g} | {step['computing_seconds']:.3g} |"
                )
    return "\n".join([*lines, "", compiled_steps.report(numbers["compiled"])])


def _digits(number: float) -> str:
    """Four digits, or all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


if __name__ == "__main__":
    run_experiment(__name__)
