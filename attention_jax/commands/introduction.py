"""The table that train.py prints before the first step: the model, the run and the devices."""

from __future__ import annotations

import collections
import math
from typing import Any

import jax

from attention_jax.analysis.ledger import operation_count
from attention_jax.core.errors import one_line
from attention_jax.runs.checkpoints import named_leaves
from attention_jax.runs.progress import Work, say
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.run import TrainedRun
from attention_jax.training.saved_run import of_one_seed
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import Feed

# Operations per second of a device, dense, in bfloat16, by the names that JAX gives it. Sources:
# docs.cloud.google.com/tpu/docs (v4, v5e, v5p, v6e); NVIDIA's data sheets of the GPUs.
PEAKS = {
    **dict.fromkeys(("TPU v4",), 275e12),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), 197e12),
    **dict.fromkeys(("TPU v5", "TPU v5p"), 459e12),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), 918e12),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
}
_SAMPLE = 20  # batches of a feed, over which the number of tokens is averaged


def introduce(run: TrainedRun, feed: Feed | None, *, mesh: MeshShape) -> Work:
    """Prints a table of the model, the run and the devices; nothing is compiled.

    Args:
        run: the run before its first step.
        feed: its batches, if the host makes them.
        mesh: its devices.

    Returns:
        what a step takes, for the speed in the log.
    """
    task, train, kind = run.task, run.task.train, jax.devices()[0].device_kind
    sizes: collections.Counter[str] = collections.Counter()
    for name, leaf in named_leaves(run.params).items():
        module, *inner = name.split(".")
        group = "scores" if "params_of_score" in inner else module or "all"
        sizes[group] += leaf.size // train.seeds
    by_module = ", ".join(f"{module} {size:,}" for module, size in sizes.items())
    one_seed = of_one_seed(run.params)
    dtypes = [" and ".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(one_seed)}))]
    if hasattr(task.model, "dtype"):
        dtypes.append(f"computed in {task.model.dtype}")
    batch, tokens = _typical_batch(run, feed)
    step = [f"{train.batch_size} examples"] if train.batch_size else []
    step += [] if tokens is None else [f"{tokens:,.0f} tokens, padding included"]
    flops = None
    try:
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        flops = operation_count(gradient, one_seed, batch, jax.random.key(0)).flops
        step.append(f"{flops / 1e9:,.3g} GFLOP")
    except Exception as error:  # a mistake of the task is raised again by the first step
        step.append(f"FLOPs not counted ({one_line(error)})")
    say(f"{run.workdir}: {task.label}")
    for name, text in {
        "parameters": f"{sizes.total():,}: {by_module}",
        "a step": f"of one seed: {', '.join(step)}",
        "steps": f"{run.step:,} of {train.steps:,} done",
        "seeds": f"{train.seeds}, from {train.first_seed} on",
        "dtype": ", ".join(dtypes),
        "devices": f"{mesh.devices} of {jax.device_count()}: {kind}, seed={mesh.seed}"
        f" data={mesh.data}",
    }.items():
        say(f"  {name:11} {text}")
    peak = PEAKS.get(kind)
    return Work(tokens, flops, None if peak is None else peak * mesh.devices)


def _typical_batch(run: TrainedRun, feed: Feed | None) -> tuple[Any, float | None]:
    """Returns a batch of about the mean size (or its shapes), and the mean number of tokens."""
    size, first = run.task.train.batch_size, run.task.train.first_seed
    if feed is None:  # all have one shape
        rng = jax.random.key(0)
        batches = [jax.eval_shape(lambda: run.task.batch(rng, size=size))]
    else:
        batches = [feed.batch(first, step) for step in range(run.step, run.step + _SAMPLE)]
    if not isinstance(batches[0], Batch):
        return batches[0], None
    mean = sum(map(_num_tokens, batches)) / len(batches)
    return min(batches, key=lambda batch: abs(_num_tokens(batch) - mean)), mean


def _num_tokens(batch: Batch) -> int:
    """The positions of a batch, padding included."""
    return sum(math.prod(ids.shape[:2]) for ids in (batch.source, batch.target_inputs))
