"""What befalls files: damaged ones, missing ones, and ones that nobody put there."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from .findings import Findings
from .processes import Place, every_byte
from .small_run import BEFORE, NEWEST, STEPS, result, resumed, resumed_from, template

# --- what is done to a file ---


def truncated(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))] if data else b"")


def deleted(path: Path, rng: random.Random) -> None:
    del rng
    path.unlink()


def bit_flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zeroed(path: Path, rng: random.Random) -> None:
    del rng
    path.write_bytes(bytes(path.stat().st_size))


def garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


# --- to which ---


METADATA = (
    "_CHECKPOINT_METADATA",
    "record/metadata",
    "state/_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "state/manifest.ocdbt",
)


def data_file(step: Path, rng: random.Random) -> Path:
    """One of those that the arrays lie in, or that say where."""
    return rng.choice(sorted(path for path in step.glob("state/**/*") if path.is_file()))


def metadata_file(step: Path, rng: random.Random) -> Path:
    return step / rng.choice(METADATA)


Damage = Callable[[Path, random.Random], None]


def newest_step(
    pick: Callable[[Path, random.Random], Path], *damages: Damage
) -> Callable[[Place, random.Random, Findings], None]:
    """A fault: one file of the newest step is damaged, and the run goes on."""

    def case(place: Place, rng: random.Random, found: Findings) -> None:
        folder = place.fresh()
        origin, wanted = template(place.home)
        shutil.copytree(origin, folder)
        path = pick(folder / "checkpoints" / str(NEWEST), rng)
        damage = rng.choice(damages)
        found.case += f", {path.relative_to(folder)} {damage.__name__}"
        damage(path, rng)
        ended = resumed(folder)
        first = resumed_from(folder)
        if first == NEWEST:
            found.said(ended, status=0)
            found.ended("harmless, went on from it")
        else:
            warning = rf"warning: the checkpoint of step {NEWEST} is damaged \(.+\) and was moved"
            line = f"{warning} to .+; that of step {BEFORE} is used"
            found.said(ended, status=0, line=line)
            found.ended("told, fell back to the one before")
        found.steps_lost(NEWEST - first, allowed=NEWEST - BEFORE)
        found.same(result(folder), wanted)
        shutil.rmtree(folder)

    return case


def every_step(place: Place, rng: random.Random, found: Findings) -> None:
    """All steps damaged: an error, and everything stays for the user to look at."""
    folder = place.fresh()
    origin, _ = template(place.home)
    shutil.copytree(origin, folder)
    for step in sorted((folder / "checkpoints").iterdir()):
        for path in step.glob("state/**/d/*"):
            rng.choice([truncated, deleted, zeroed])(path, rng)
    before = every_byte(folder)
    line = rf"error: no checkpoint in .+: step {NEWEST}: .+; step {BEFORE}: .+\. Train into .+"
    found.said(resumed(folder), status=2, line=line)
    found.expect(every_byte(folder) == before, "something changed on disk")
    found.ended("refused, nothing changed")
    shutil.rmtree(folder)


# --- what nobody put there ---


def _empty_step(folder: Path, rng: random.Random) -> str:
    step = rng.choice([NEWEST + 1, STEPS, STEPS + 1, 10**6, 10**12])
    (folder / "checkpoints" / str(step)).mkdir()
    return rf"warning: the checkpoint of step {step} is damaged \(.+\) and was moved to .+"


def _step_with_a_file(folder: Path, rng: random.Random) -> str:
    line = _empty_step(folder, rng)
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    (newest / "notes.txt").write_text("mine")
    return line


def _stray_file(folder: Path, rng: random.Random) -> str:
    name = rng.choice(["notes.txt", ".DS_Store", "5", "007", "tmp", "6.orbax-checkpoint-tmp"])
    (folder / "checkpoints" / name).write_text("mine")
    return ""


def _stray_folder(folder: Path, rng: random.Random) -> str:
    name = rng.choice(["old", "4.backup", "4 (copy)", "-1", "6.orbax-checkpoint-tmp", "step_9"])
    shutil.copytree(folder / "checkpoints" / str(NEWEST), folder / "checkpoints" / name)
    return ""


def _beside(folder: Path, rng: random.Random) -> str:
    name = rng.choice(["config.json.new", "env.json.new", "metrics.jsonl.new", "notes.txt"])
    (folder / name).write_text('{"mo')
    return ""


def stray(place: Place, rng: random.Random, found: Findings) -> None:
    """Something lies among the checkpoints, or beside them, that no run put there."""
    folder = place.fresh()
    origin, wanted = template(place.home)
    shutil.copytree(origin, folder)
    put = rng.choice(
        [_empty_step, _empty_step, _step_with_a_file, _stray_file, _stray_folder, _beside]
    )
    line = put(folder, rng)
    found.case += f", {put.__name__} {sorted(p.name for p in (folder / 'checkpoints').iterdir())}"
    found.said(resumed(folder), status=0, line=line)
    found.steps_lost(NEWEST - resumed_from(folder), allowed=0)
    found.same(result(folder), wanted)
    found.ended("told, moved aside" if line else "passed over in silence")
    shutil.rmtree(folder)


# --- a start that was cut off ---

STARTED = ("lock", "config.json.new", "config.json", "env.json.new", "env.json", "checkpoints")


def half_made(place: Place, rng: random.Random, found: Findings) -> None:
    """The folder as the first writes leave it, one after another, the last of them cut off."""
    origin, wanted = template(place.home)
    folder = place.fresh()
    folder.mkdir()
    many = found.times % (len(STARTED) + 1)
    for name in STARTED[:many]:
        if name == "checkpoints":
            (folder / name).mkdir()
        elif name == "lock":
            (folder / name).write_text("")
        elif name.endswith(".new"):
            data = (origin / name.removesuffix(".new")).read_bytes()
            (folder / name).write_bytes(data[: rng.randrange(len(data))])
        else:
            shutil.copy(origin / name, folder / name)
            (folder / f"{name}.new").unlink()
    found.case += f", {STARTED[:many]}"
    found.ended("began anew")
    found.said(resumed(folder), status=0)
    found.same(result(folder), wanted)
    shutil.rmtree(folder)


def metrics_cut(place: Place, rng: random.Random, found: Findings) -> None:
    """metrics.jsonl ends within a line, as a crash leaves it; before or after what was saved."""
    folder = place.fresh()
    origin, wanted = template(place.home)
    shutil.copytree(origin, folder)
    path = folder / "metrics.jsonl"
    data = path.read_bytes()
    kept = data.index(b'{"step": 5')
    path.write_bytes(data[: rng.randrange(kept, len(data))])
    found.said(resumed(folder), status=0)
    found.same(result(folder), wanted)
    found.ended("cut line dropped, went on")
    shutil.rmtree(folder)
