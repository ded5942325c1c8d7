"""What train.py prints before the first step: what is trained, on what, and what a step takes."""

from __future__ import annotations

import collections
import math
from typing import Any

import jax
import numpy as np

from attention_jax.analysis.ledger import operation_count
from attention_jax.core.programs import one_line
from attention_jax.runs.progress import Work, say
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.run import TrainedRun
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import Feed

# Operations per second of a device, dense, in bfloat16, by the name that JAX gives it. Sources:
# docs.cloud.google.com/tpu/docs (v4, v5e, v5p, v6e); NVIDIA's data sheets of the GPUs.
PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12,
    "TPU v5p": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip
_SAMPLE = 20  # batches of a feed, over which the number of tokens is averaged


def introduced(run: TrainedRun, feed: Feed | None, *, mesh: MeshShape) -> Work:
    """Prints what begins to train; returns what a step takes. Nothing is compiled."""
    task, train, kind = run.task, run.task.train, jax.devices()[0].device_kind
    sizes: collections.Counter[str] = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.params):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        # The modules of this library keep the parameters of a score under this name.
        sizes["scores" if "params" in names[1:] else names[0]] += leaf.size // train.seeds
    parts = ", ".join(f"{part} {size:,}" for part, size in sizes.items())
    one_seed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), run.params
    )
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(one_seed)}
    dtypes |= {str(task.model.dtype)} if hasattr(task.model, "dtype") else set()
    batches = _batches(run, feed)
    tokens = None
    if isinstance(batches[0], Batch):
        sides = [(batch.source, batch.target_inputs) for batch in batches]
        tokens = sum(math.prod(ids.shape[:2]) for pair in sides for ids in pair) / len(sides)
    flops, operations = None, ""
    try:
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        flops = operation_count(gradient, one_seed, batches[0], jax.random.key(0)).flops
        operations = f"{flops / 1e9:,.3g} GFLOP"
    except Exception as error:  # a mistake of the task is raised again by the first step
        operations = f"FLOPs not counted ({one_line(error)})"
    step = [f"{train.batch_size} examples"] if train.batch_size else []
    step += [] if tokens is None else [f"{tokens:,.0f} tokens, padding included"]
    say(f"{run.workdir}: {task.label}")
    for name, text in {
        "parameters": f"{sizes.total():,}: {parts}",
        "a step": ", ".join([*step, operations]),
        "steps": f"{run.step:,} of {train.steps:,} done, {train.seeds} seeds each",
        "dtype": " and ".join(sorted(dtypes)),
        "devices": f"{mesh.devices} of {jax.device_count()}: {kind}, seed={mesh.seed}"
        f" data={mesh.data}",
    }.items():
        say(f"  {name:11} {text}")
    peak = PEAKS.get(kind)
    return Work(tokens, flops, None if peak is None else peak * mesh.devices)


def _batches(run: TrainedRun, feed: Feed | None) -> list[Any]:
    """Batches of one seed, or only their shapes, if the device draws them all of one shape."""
    train = run.task.train
    if feed is not None:
        steps = range(run.step, run.step + _SAMPLE)
        return [jax.tree.map(np.asarray, feed.batch(train.first_seed, step)) for step in steps]
    rng = jax.random.key(0)
    return [jax.eval_shape(lambda: run.task.batch(rng, size=train.batch_size))]
