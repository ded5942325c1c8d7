"""A save is killed at each change of the disk: no checkpoint is lost, and the run goes on."""

import contextlib
import functools
import itertools
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from saved_files import assert_bits_equal

from attention_jax.runs import checkpoints as checkpoints_module
from attention_jax.runs.checkpoints import Checkpoints


class Killed(BaseException):
    pass


class QuickOrbax:
    """Writes and reads as Orbax does, in a hundredth of the time: a file per leaf."""

    def save(self, path, state, force):
        path.mkdir(parents=True)
        for index, leaf in enumerate(jax.tree.leaves(state)):
            (path / f"{index}").write_bytes(leaf.tobytes())

    def restore(self, path, like):
        leaves, tree = jax.tree.flatten(like)
        read = [
            np.frombuffer((path / f"{index}").read_bytes(), leaf.dtype).reshape(leaf.shape)
            for index, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, read)


def small(step):
    return {"count": np.array(step, np.int32), "w": np.array([step, 0.5], np.float32)}


# (step, metric, temporary); a step comes twice where it is validated after a stop or an error.
SAVES = (
    (10, 0.5, False), (20, None, True), (20, 0.7, False), (35, None, True), (40, 0.6, False),
    (40, 0.4, False),
)  # fmt: skip
CHANGES = [(os, n) for n in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")]


def killed_at(monkeypatch, last, save):
    """Whether a save is over before the change of the disk with the number `last`."""
    numbers = itertools.count()

    def patched(original):
        def change(*arguments, **options):
            if next(numbers) < last:
                return original(*arguments, **options)
            if original.__name__ == "write_bytes":
                original(arguments[0], arguments[1][:-1])
            raise Killed

        return change

    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        for owner, name in (*CHANGES, (Path, "write_bytes")):
            patches.setattr(owner, name, patched(getattr(owner, name)))
        save()
        return False
    return True


@pytest.mark.parametrize(("keep", "keep_best"), [(1, 0), (2, 0), (1, 1)])
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path, monkeypatch, keep, keep_best):
    quick = lambda folder: contextlib.nullcontext((QuickOrbax(), folder))  # noqa: E731
    monkeypatch.setattr(checkpoints_module, "_orbax", quick)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a kill loses nothing of a disk's cache
    opened = functools.partial(Checkpoints, keep=keep, keep_best=keep_best)

    def save_all(checkpoints, saves):
        for step, metric, temporary in saves:
            checkpoints.save(step, small(step), metric=metric, temporary=temporary)
        return checkpoints.steps(), checkpoints.best_step()

    kept = [save_all(opened(tmp_path / f"{n}"), SAVES[:n])[0] for n in range(len(SAVES) + 1)]
    killed = tmp_path / "killed"
    for count, ((step, _, _), before, after) in enumerate(zip(SAVES, kept, kept[1:], strict=False)):
        for last in itertools.count():
            shutil.copytree(tmp_path / f"{count}", killed)
            save = functools.partial(save_all, opened(killed), SAVES[count : count + 1])
            if not killed_at(monkeypatch, last, save):
                break
            found = opened(killed, read_only=True)
            assert {*before} & {*after} <= {*found.steps()}
            assert not before or found.steps()[-1] in (before[-1], step)
            for each in found.steps():  # all are whole
                assert_bits_equal(found.restore(small(0), each), small(each))
            assert opened(killed).steps() == found.steps()
            # Goes on: the same again, as a resumed run does, and the next one.
            again = SAVES[count : count + 2]
            expected = opened(tmp_path / f"{count + len(again)}", read_only=True)
            assert save_all(opened(killed), again) == (expected.steps(), expected.best_step())
            assert sorted(killed.glob("*")) == [killed / f"{each}" for each in expected.steps()]
            shutil.rmtree(killed)
        assert last >= 3
        shutil.rmtree(killed)
