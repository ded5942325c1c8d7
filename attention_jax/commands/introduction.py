"""The table that train.py prints before the first step: the model, the run and the devices."""

import collections
from typing import Any

import jax

from attention_jax.analysis.ledger import operation_count
from attention_jax.core.errors import one_line
from attention_jax.runs.checkpoints import named_leaves
from attention_jax.runs.progress import say
from attention_jax.training.prepare import Prepared
from attention_jax.training.saved import of_one_seed
from attention_jax.training.step import drawn_shapes, num_tokens

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


def introduce(run: Prepared) -> float | None:
    """Prints a table of the model, the run and the devices; nothing is compiled.

    Returns:
        steps per second of one seed if the devices computed at their peak; None if not known.
    """
    task, train, mesh = run.task, run.task.train, run.mesh
    kind, one_seed = jax.devices()[0].device_kind, of_one_seed(run.shapes.params)
    sizes: collections.Counter[str] = collections.Counter()
    for name, leaf in named_leaves(one_seed).items():
        module, *inner = name.split(".")
        sizes["scores" if "params_of_score" in inner else module or "all"] += leaf.size
    by_module = ", ".join(f"{module} {size:,}" for module, size in sizes.items())
    dtypes = [" and ".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(one_seed)}))]
    if hasattr(task.model, "dtype"):
        dtypes.append(f"computed in {task.model.dtype}")
    batch, tokens = _typical_batch(run)
    step = [f"{train.batch_size} examples"] if train.batch_size else []
    step += [] if tokens is None else [f"{tokens:,.0f} tokens, padding included"]
    flops = None
    try:
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        flops = operation_count(gradient, one_seed, batch, jax.random.key(0)).flops
        step.append(f"{flops / 1e9:,.3g} GFLOP")
    except Exception as error:  # a mistake of the task is raised again by the first step
        step.append(f"FLOPs not counted ({one_line(error)})")
    table = {
        "parameters": f"{sizes.total():,}: {by_module}",
        "a step": f"of one seed: {', '.join(step)}",
        "steps": f"{run.step:,} of {train.steps:,} done",
        "seeds": f"{train.seeds}, from {train.first_seed} on",
        "dtype": ", ".join(dtypes),
        "devices": f"{mesh.devices} of {jax.device_count()}: {kind}, seed={mesh.seed}"
        f" data={mesh.data}",
    }
    lines = [f"{run.workdir}: {task.label}", *(f"  {key:11} {text}" for key, text in table.items())]
    say("\n".join(lines))
    peak = PEAKS.get(kind)
    return peak * mesh.devices / flops if flops and peak else None


def _typical_batch(run: Prepared) -> tuple[Any, float | None]:
    """Returns a batch of about the mean size (or its shapes), and the mean number of tokens."""
    first = run.task.train.first_seed
    if run.feed is None:  # all have one shape
        batches = [drawn_shapes(run.task)]
    else:
        batches = [run.feed.batch(first, step) for step in range(run.step, run.step + _SAMPLE)]
    tokens = [num_tokens(batch) for batch in batches]
    if None in tokens:
        return batches[0], None
    known = [*map(int, tokens)]  # type: ignore[arg-type]
    mean = sum(known) / len(known)
    return min(zip(batches, known, strict=True), key=lambda pair: abs(pair[1] - mean))[0], mean
