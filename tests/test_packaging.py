"""The wheel and the sdist: built, installed without the checkout, and used from another folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_readme import MY_SCORES, README, blocks

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
USE = """
from pathlib import Path

import attention_jax
from attention_jax import nn
from attention_jax.reports.gradient_report import report
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run, load_analyzed_run
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import train_run
from attention_jax.training.task import TrainConfig

assert Path(attention_jax.__file__).parents[1] == Path(SITE), attention_jax.__file__
assert set(gradient) == {"query_kernel", "key_kernel", "v"}

import optax
from flax import nnx
from my_scores import Distance

attend = nn.Attention(Distance(), 16, 16, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(attend, optax.adam(0.1), wrt=nnx.Param)


def loss_of(attend):
    return jnp.mean((attend(query, key, key) - query) ** 2)


losses = []
for _ in range(5):
    loss, slopes = nnx.value_and_grad(loss_of)(attend)
    optimizer.update(attend, slopes)
    losses.append(float(loss))
assert losses[-1] < losses[0], losses

train = TrainConfig(steps=4, seeds=1, batch_size=3, log_every=2, checkpoint_every=4)
model = nn.ModelConfig(score="my_scores:Distance", dim=8, hidden_dim=8)
task = Reversal(model, train, source_start=False)
train_run(task, Path("run"), log_gradients=2)
loaded = load_analyzed_run(Path("run"))
numbers = analyze_run(loaded, GradientAnalysis(iterations=0), progress=print)
Path("gradients.html").write_text(report([numbers], command="a test"))
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A wheel and an sdist of the files that git knows."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
    (wheel,), (sdist,) = (folder / "out").glob("*.whl"), (folder / "out").glob("*.tar.gz")
    return wheel, sdist


def files_of_library() -> set[str]:
    """Modules, and what they read."""
    kinds = (".py", ".js", ".css", ".html", "py.typed")
    paths = (path for path in (ROOT / "attention_jax").rglob("*") if path.name.endswith(kinds))
    return {str(path.relative_to(ROOT)) for path in paths}


@pytest.mark.slow
def test_both_hold_the_library_and_nothing_else(archives):
    wheel, sdist = archives
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == files_of_library()
    with tarfile.open(sdist) as content:
        in_sdist = {name.partition("/")[2] for name in content.getnames()}
    assert files_of_library() | {"README.md", "LICENSE", "CHANGELOG.md", "setup.cfg"} <= in_sdist
    assert not [
        name
        for name in in_sdist
        if name.startswith(("benchmarks", "experiments", "scripts", "tests"))
    ]


@pytest.mark.slow
def test_the_wheel_is_used_from_another_folder(archives, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)
    python = tmp_path / "env" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
    packages = Path(site.stdout.strip())
    zipfile.ZipFile(archives[0]).extractall(packages)  # what an installer does
    # Of the environment of the tests only what the library needs: a path that a .pth file names is
    # searched, but its own .pth files, with this checkout, are not read.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "my_scores.py").write_text(MY_SCORES)
    examples = [block for block in blocks(README, "python") if block != MY_SCORES]
    script = "\n".join([f"SITE = {str(packages)!r}", *examples, USE])
    (tmp_path / "use.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    used = subprocess.run([python, "use.py"], cwd=tmp_path, env=environment, capture_output=True)
    assert used.returncode == 0, used.stderr.decode()
    assert "<!doctype html>" in (tmp_path / "gradients.html").read_text()


def test_pickles_of_before_find_what_has_moved():
    """A pickle names the module in which its class or function was defined."""
    names = (
        "pairwise.masks causal_mask", "pairwise.masks LocalMask", "pairwise.mask_algebra AndMask",
        "pairwise.biases t5_bias", "pairwise.position_functions array_field",
        "implementations.contract BlockSizes", "implementations.masked_softmax masked_softmax",
        "functional.local window_mask", "functional.interop dot_product_attention",
        "functional.capture_point CapturedAttention", "normalizers.rows AttentionStatistics",
        "scores.soft_cap SoftCap", "training.loop TrainState", "training.export export",
        "training.task TrainConfig",
    )  # fmt: skip
    read = (
        "import pickle, sys\n"  # the library is not imported before it reads a pickle
        "for name in sys.argv[1:]:\n"
        "    module, attribute = name.split()\n"
        "    text = f'cattention_jax.{module}\\n{attribute}\\n.'\n"
        "    assert pickle.loads(text.encode()).__name__ == attribute\n"
    )
    subprocess.run([sys.executable, "-c", read, *names], check=True, cwd=ROOT)
