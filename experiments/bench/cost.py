"""How long does a training step take with each score, beside one with scaled dot?

Answer: With additive 1.63 times as long (1.58 to 1.70), with neural and tropical 1.7 times. Dot,
    scaled dot and l2 cannot be told apart.
Source: ours.
Command: .venv/bin/python -m experiments.bench.cost  # 6 minutes on 2 CPU cores

The model and the batches are those of recall in `maps.py`. A program trains a few seeds at once for
four steps. Three programs take turns (a, b, b, a, ...): scaled dot, scaled dot compiled a second
time, and the score. Turns are added until the second program of scaled dot has the time of the
first: the 95 % interval of the median of their ratios by turn covers 1, and lies within 1 ± 0.03.
The ratio of a score is *steady* if this happens before the turns are used up. Otherwise something
besides the score decides the time, and the interval of the score may be too narrow.

The interval of a median is distribution-free: it reaches from one order statistic to another.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import score_folder
from attention_jax.training.step import train_steps
from experiments import lab
from experiments.bench import maps
from experiments.bench.significance import LEAST, median_interval
from experiments.bench.summary import in_words, time_of_step
from experiments.bench.training import states, with_score
from experiments.lab import Claim, Row, ScoreNames, interleaved, significant
from experiments.reversal.arms import AtRate

STEPS = 4  # of one call of a program
WITHIN = 0.03  # of 1: the interval of scaled dot over itself
_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: scores to time.
        seeds: models of a program.
        most_turns: turns of each program at most.
        turn_seconds: time of a turn of one program.
        workdir: folder of what is finished; an unchanged score is not timed again.
    """

    scores: ScoreNames = (
        *("additive", "dot", "general", "scaled", "cosine", "l2", "hyperbolic", "manhattan"),
        *("tropical", "neural"),
    )
    seeds: int = 3
    most_turns: int = 24
    turn_seconds: float = 0.3
    workdir: Path = Path("runs/cost")

    def __post_init__(self) -> None:
        lab.check_least(self, seeds=1, most_turns=LEAST, turn_seconds=0)
        for score in self.scores:
            self.task(score)

    def task(self, score: str) -> Any:
        """The task with this score."""
        return with_score(maps.TASKS["recall"], score)


QUICK = Config(("scaled", "additive"), 1, LEAST, 0.0, Path("runs/quick/cost"))


def run(config: Config) -> list[Row]:
    """A row for each score."""
    make_folder("workdir", config.workdir)
    rows: list[Row] = []
    for index, score in enumerate(config.scores):
        task = config.task(score)
        known_by = [score, repr(task), task.model.known().digest]
        known_by += [config.seeds, config.most_turns, config.turn_seconds]
        path = config.workdir / f"{score_folder(score)}.json"
        found = lab.kept_rows(path, known_by, functools.partial(_measured, config, score))
        rows += found
        text = "" if found else ": missing"
        lab.say(f"time of a step: {index + 1} of {len(config.scores)}: {score}{text}", error=True)
    return rows


def _measured(config: Config, score: str) -> list[Row]:
    """Times the programs in turns until scaled dot over itself is 1."""
    programs = {
        "scaled": _scaled(config, 0),
        "scaled again": _scaled(config, 1),
        "score": _program(config, score),
    }
    turns: dict[str, list[float]] = {name: [] for name in programs}
    steady = False
    while not steady and (number := len(turns["score"])) < config.most_turns:
        more = max(2, LEAST - number)  # an even number: no program leads more often than it follows
        for _ in range(more // 2):
            for name, times in interleaved(programs, 2, config.turn_seconds).items():
                turns[name] += times
        low, _, high = again = _over(turns["scaled again"], turns["scaled"])
        steady = 1 - WITHIN <= low <= 1 <= high <= 1 + WITHIN
    row: Row = {"score": score, "over": _over(turns["score"], turns["scaled"]), "again": again}
    row |= {"steady": steady, "turns": len(turns["score"]), "seeds": config.seeds}
    row["milliseconds"] = significant(np.median(turns["score"]) / STEPS)
    return [row | {"device": jax.devices()[0].device_kind}]


@functools.cache
def _scaled(config: Config, copy: int) -> Callable[[], object]:
    """The program of scaled dot; each copy is compiled on its own, once for all scores."""
    del copy
    return _program(config, "scaled")


def _program(config: Config, score: str) -> Callable[[], object]:
    """Some compiled steps of all seeds."""
    task = config.task(score)
    state = states(task, range(config.seeds))
    steps = functools.partial(train_steps, AtRate(task, _RATE), STEPS)
    program = jax.jit(jax.vmap(steps)).lower(state).compile()
    return lambda: jax.block_until_ready(program(state))


def _over(times: list[float], others: list[float]) -> list[float]:
    """The median of the ratios by turn between the ends of its interval."""
    ratios = np.array([a / b for a, b in zip(times, others, strict=True)])
    low, high = median_interval(ratios)
    return [significant(each) for each in (low, np.median(ratios), high)]


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """What a step costs; all bounds were written before the run."""
    over = {row["score"]: row["over"][1] for row in rows}
    steady = float(np.mean([row["steady"] for row in rows]))
    return [
        Claim("scores whose null ratio covers 1 within 0.03, share", steady, low=0.9),
        Claim("additive's step over scaled dot's", over["additive"], 1.3, 2.0),
        Claim("dot's step over scaled dot's", over["dot"], 0.95, 1.05),
    ]


CAPTIONS: dict[str, str] = {}


def table(rows: list[Row]) -> str:
    """Ratios with their intervals, from the cheapest score to the dearest."""
    head = ["score", "step / scaled dot's (95 % interval)", "scaled dot again / scaled dot"]
    head += ["turns", "milliseconds", "device"]
    lines = []
    for row in sorted(rows, key=lambda row: row["over"][1]):
        numbers = f"{row['turns']}", f"{row['milliseconds']:.3g}", row["device"]
        lines.append([row["score"], time_of_step(row), in_words(row["again"]), *numbers])
    return lab.markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Any]:
    """No figure."""
    del rows
    return {}


if __name__ == "__main__":
    lab.main(__name__)
