"""A trained model outside of its run: `load_model`, exported files, and runs that begin with it."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from command_lines import check_error
from flax import nnx
from mistakes import refused
from saved_files import assert_bits_equal, snapshot
from stand_in_training import TASK, run_of_two_seeds
from test_contract import Stop, small, tasks
from toy_task import Toy, toy
from translation_cases import tiny_task, write_text

import attention_jax as aj
from attention_jax.commands.config_file import read_settings
from attention_jax.runs.checkpoints import named_leaves
from attention_jax.runs.parameters_file import read_parameters, write_parameters
from attention_jax.runs.run_folder import read_config, write_json
from attention_jax.training.identity import config_of
from attention_jax.training.run import load_run, load_states, prepare, train_run
from attention_jax.training.saved import export
from attention_jax.training.step import initial_state

pytestmark = pytest.mark.usefixtures("standard_promotion")


def one_seed(params, seed):
    return jax.tree.map(lambda leaf: leaf[seed], params)


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


# --- load_model and exported files ---


@pytest.mark.parametrize("name", tasks("reversal", "text", "translation", "user_tasks:Rotate"))
def test_an_exported_model_has_the_bits_of_the_run(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    run, file = tmp_path / "run", tmp_path / "model.safetensors"
    task = small(name, tmp_path)
    run.mkdir()
    write_json(run / "config.json", config_of(task, lambda: task.feed(run)))
    export(load_run(run, 0), file, seed_index=1)
    expected = one_seed(initial_state(task).params, 1)
    for model in (aj.load_model(str(file)), aj.load_model(run, 1, 0)):
        assert_bits_equal(params_of(model), expected)
    read = safetensors.load_file(file)
    assert_bits_equal(read, jax.device_get(named_leaves(expected)))
    assert any(name.startswith("decoder.0.") for name in read)


def test_a_model_is_that_of_a_step_and_a_seed():
    run, (_, states) = run_of_two_seeds(), load_states(run_of_two_seeds())
    for name, step in (("newest", 6), (4, 4), (0, 0)):
        assert_bits_equal(load_run(run, name).params, states[step].params)
        model = aj.load_model(run, 1, name)
        assert_bits_equal(params_of(model), one_seed(states[step].params, 1))
    batch, _ = TASK.examples()
    assert np.all(np.isfinite(model(*batch.inputs)))


@pytest.mark.parametrize(
    ("path", "arguments", "named"),
    [
        ("nowhere", (), "path"),
        (Path("/dev/null"), (), "path"),
        ("no.safetensors", (), "path"),
        (".", (), "config.json"),
        (None, (2,), "seed"),
        (None, ("0",), "seed"),
        (None, (0, 3), "step"),
    ],
)
def test_a_model_that_is_not_there(path, arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(named, lambda: aj.load_model(path or run_of_two_seeds(), *arguments))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "--out"),
        ("--out a.npz", "a.npz"),
        ("--out no/a.safetensors", "no"),
        ("--out a.safetensors --step 3", "step"),
        ("--out a.safetensors --seed-index 2", "seed"),
        ("--out a.safetensors --step 4 --seed-index 1", None),
    ],
)
def test_the_command(command, words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = command("export", "--workdir", run_of_two_seeds(), *words.split())
    if named is not None:
        check_error(found, named)
        assert list(tmp_path.iterdir()) == []
        return
    assert found == (0, f"a.safetensors: reversal {TASK.label}: step 4 of 6, seed 1\n", "")
    expected = one_seed(load_run(run_of_two_seeds(), 4).params, 1)
    assert_bits_equal(params_of(aj.load_model("a.safetensors")), expected)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(load_run(run_of_two_seeds()), folder / "model.safetensors")
    return folder


def configured(**model):
    def change(folder):
        content = json.loads((folder / "config.json").read_text())
        task = dataclasses.replace(TASK, model=dataclasses.replace(TASK.model, **model))
        write_json(folder / "config.json", {**content, **config_of(task)})

    return change


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("change", "arguments", "named"),
    [
        (cut_off, {}, "model.safetensors cannot be read"),
        (configured(dim=16), {}, r"output.kernel was float32\[8, 8\], now float32\[16, 16\]"),
        (configured(score="additive"), {}, r"params.v was nothing, now float32\[8\]"),
        (configured(activation="gelu"), {}, "is of another model than config.json"),  # same shapes
        (lambda folder: (folder / "config.json").unlink(), {}, "config.json beside it"),
        (lambda folder: None, {"seed": 1}, "seed and step must be left out"),
    ],
)
def test_a_file_of_another_model_is_refused(exported, tmp_path, change, arguments, named):
    folder = shutil.copytree(exported, tmp_path / "copy")
    change(folder)
    refused(f".*{named}", lambda: aj.load_model(folder / "model.safetensors", **arguments))


def test_an_export_overwrites_no_other_config(exported, tmp_path, monkeypatch):
    run, folder = load_run(run_of_two_seeds(), 4), shutil.copytree(exported, tmp_path / "copy")
    export(run, folder / "other.safetensors", 1)  # beside the same config.json
    longer = dataclasses.replace(TASK.train, steps=9, schedule="constant")
    write_json(folder / "config.json", config_of(dataclasses.replace(TASK, train=longer)))
    export(run, file := folder / "model.safetensors", 1)  # before and after the run went on
    assert_bits_equal(params_of(aj.load_model(file)), one_seed(run.params, 1))
    assert read_config(folder) == read_config(run.workdir)
    configured(activation="gelu")(folder)
    (tmp_path / "new").mkdir()
    before = snapshot(tmp_path)
    refused("out .* other config.json", lambda: export(run, file))
    refused("out .* folder without runs", lambda: export(run, run.workdir.parent / file.name))
    refused("out must .* ends in .safetensors", lambda: export(run, folder / "model.npz"))
    refused("seed_index must be at most 1", lambda: export(run, file, 2))
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    refused("needs the package safetensors", lambda: export(run, tmp_path / "new" / file.name))
    assert snapshot(tmp_path) == before


def test_an_export_into_the_folder_of_a_run_keeps_its_config(tmp_path):
    run = shutil.copytree(run_of_two_seeds(), tmp_path / "run")
    before = (run / "config.json").stat().st_mtime_ns
    export(load_run(run, 4), run / "model.safetensors")
    assert (run / "config.json").stat().st_mtime_ns == before
    aj.load_model(run / "model.safetensors")


def test_arrays_are_saved_in_order_and_float8_is_one_line(tmp_path):
    package, file = pytest.importorskip("safetensors.numpy"), tmp_path / "x.safetensors"
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"transposed": x.T, "strided": x[:, ::2], "fortran": np.asfortranarray(x)}
    write_parameters(file, arrays, {})
    assert_bits_equal(package.load_file(file), arrays)
    assert_bits_equal(read_parameters(file, arrays)[0], arrays)
    eighth = {"x": jax.numpy.ones(3, "float8_e4m3fn")}
    write_parameters(file, eighth, {})
    refused("x.safetensors cannot be read: .*float8", lambda: read_parameters(file, eighth))


# --- runs that begin with the parameters of another run ---


@dataclasses.dataclass(frozen=True)
class Other(Toy):
    """Another task, with another optimiser, whose parameters have the same shapes."""

    factor: float = 2.0

    def optimizer(self):
        return optax.adam(0.1)


@dataclasses.dataclass(frozen=True)
class Wide(Toy):
    def init(self, rng):
        return {**super().init(rng), "b": jax.numpy.zeros(2)}


def begun_from(source, cls=Toy, **train):
    settings = {"steps": 4, "log_every": 2, "checkpoint_every": 2, "keep": 9, "init_from": source}
    return toy(cls, **{**settings, **train})


@pytest.fixture
def source(tmp_path):
    """The folder of a run of two seeds."""
    return train_run(begun_from(None), tmp_path / "source").workdir


def test_a_run_begins_with_the_newest_parameters_of_another(source, tmp_path):
    whole, stopped, task = tmp_path / "whole", tmp_path / "stopped", begun_from(source, Other)
    train_run(task, whole)
    train_run(task, stopped, interruption=Stop(1))
    _, states = load_states(whole)
    assert sorted(states) == [0, 2, 4]
    start = initial_state(task, params=load_run(source).params)
    assert_bits_equal(states[0], start)
    assert not np.array_equal(states[2].params["w"], start.params["w"])
    # The other run goes on, and is lost.
    train_run(begun_from(None, steps=6, schedule="constant"), tmp_path / "longer")
    shutil.rmtree(source)
    (tmp_path / "longer").rename(source)
    train_run(task, stopped, resume=True)
    shutil.rmtree(source)
    for path in (whole, stopped):
        assert_bits_equal(load_states(path)[1], states)
    assert (stopped / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    refused("init_from .* has no config.json", lambda: prepare(task, tmp_path / "new"))


def test_seeds_files_and_chains(source, tmp_path):
    pytest.importorskip("safetensors")
    file, single = tmp_path / "exported" / "w.safetensors", tmp_path / "single"
    file.parent.mkdir()
    train_run(begun_from(source), tmp_path / "chained")
    chained = load_run(tmp_path / "chained").params
    export(load_run(tmp_path / "chained"), file, 1)
    train_run(begun_from(file, seeds=1), single)
    for start, params in (
        (file, one_seed(chained, 1)),
        (single, one_seed(load_run(single).params, 0)),
    ):
        folder = train_run(begun_from(start, seeds=3), tmp_path / f"from_{start.stem}").workdir
        assert_bits_equal(one_seed(load_run(folder, 0).params, 2), params)


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (lambda source: begun_from(source, seeds=3), "1 seed, or 3 .* got 2"),
        (lambda source: begun_from(source, Wide), r"b was nothing, now float32\[2\]"),
        (lambda source: begun_from(source / "no"), "no config.json"),
        (lambda source: begun_from(source / "config.json"), "config.json cannot be read"),
        (lambda source: begun_from(source / "checkpoints"), "no config.json"),
        (lambda source: begun_from(str(source)), "a Path or None"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(source, tmp_path, task, named):
    before = snapshot(tmp_path)
    refused(f"init_from .*{named}", lambda: train_run(task(source), tmp_path / "run"))
    assert snapshot(tmp_path) == before


def test_other_parameters_than_those_of_the_start_are_noticed(source, tmp_path):
    """Where the run was stopped before it had its copy."""
    train_run(begun_from(source), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "initial")
    assert_bits_equal(load_run(tmp_path / "run", 0).params, load_run(source).params)
    shutil.rmtree(source / "checkpoints" / "4")
    changed = "init_from .* has other parameters than when"
    refused(changed, lambda: load_run(tmp_path / "run", 0))
    assert train_run(begun_from(source), tmp_path / "run", resume=True).step == 4
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused(changed, lambda: train_run(begun_from(source), tmp_path / "run", resume=True))


def test_a_repeated_run_begins_with_the_copy(source, tmp_path):
    """--config RUN/config.json, where the other run has trained on since."""
    first = train_run(begun_from(source), tmp_path / "first").workdir
    shutil.rmtree(source / "checkpoints" / "4")
    settings = read_settings(first / "config.json")
    again = begun_from(Path(settings["train"]["init_from"]))
    train_run(again, tmp_path / "again")
    assert_bits_equal(load_states(tmp_path / "again")[1], load_states(first)[1])
    other_seeds = dataclasses.replace(again, train=dataclasses.replace(again.train, seeds=3))
    refused("^init_from .* w was ", lambda: train_run(other_seeds, tmp_path / "no"))
    shutil.rmtree(first / "initial")
    refused(f"init_from .* {first / 'initial'}", lambda: read_settings(first / "config.json"))


def test_subwords_are_those_of_the_embeddings(tmp_path):
    text = write_text(tmp_path / "text")
    task = tiny_task(text)
    train_run(task, tmp_path / "source", interruption=Stop(0))
    (text / "train.de").write_text((text / "train.de").read_text().upper())
    train = dataclasses.replace(task.train, init_from=tmp_path / "source")
    train_run(dataclasses.replace(task, train=train), tmp_path / "run", interruption=Stop(0))
    one, other = ((tmp_path / name / "subwords.model").read_bytes() for name in ("source", "run"))
    assert one == other
