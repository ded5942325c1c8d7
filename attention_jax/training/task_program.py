"""Digests of programs that a user wrote: batch, loss and optimiser of a task, and `--optimizer`."""

from __future__ import annotations

import dataclasses
import functools
import typing
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attention_jax.core.programs import Part, is_of_this_package, one_line, users_line
from attention_jax.runs.checkpoints import named_leaves
from attention_jax.runs.run_folder import JSON
from attention_jax.training.task import Feed, Params, Task, check_metrics
from attention_jax.training.task_class import task_part


def program_of(task: Task, feed_of: Callable[[], Feed | None]) -> JSON:
    """{"program": digest, "jax": version} of a user's task; {} for a task of this library.

    Scores and normalisers that a user wrote are not part of it: config.json describes each of them,
    and a rewritten one may give the same numbers.

    Args:
        task: the task.
        feed_of: returns its feed, or None; not called for a task of this library.

    Raises:
        ValueError: in one line: a method fails, breaks its contract, or computes something else
            in each trace.
    """
    if is_of_this_package(type(task)):
        return {}
    if hasattr(task.model, "defaults_of_users_parts"):
        model = dataclasses.replace(task.model, **task.model.defaults_of_users_parts())
        task = dataclasses.replace(task, model=model)  # type: ignore[type-var]
    part = task_part(task)
    part.check_signatures(task)
    feed = feed_of()
    batch = None
    if feed is not None:
        draw_fed = functools.partial(part.call, "feed(folder).batch(seed, step)", feed.batch)
        batch = jax.eval_shape(lambda: draw_fed(task.train.first_seed, 0))

    def first_loss(rng: Any, fed: Any) -> Any:
        params, batch = part.call("init(rng)", task.init, rng), fed
        named_leaves(params)  # checkpoints need their names
        if feed is None:
            size = typing.cast(int, task.train.batch_size)
            draw = functools.partial(task.batch, size=size)
            batch = part.call(f"batch(rng, size={size})", draw, rng)
        result = part.call("loss(params, batch, rng)", task.loss, params, batch, rng)
        contract = "loss(params, batch, rng) must return (float [], {name: float []})"
        is_pair = isinstance(result, tuple) and [*map(type, result[1:])] == [dict]
        part.require(is_pair, contract)
        check_metrics(part.name, "loss(params, batch, rng)", result[1], "loss", "gradient_norm")
        for name, value in {"loss": result[0], **result[1]}.items():
            is_scalar = not jnp.shape(value) and jnp.issubdtype(
                jnp.result_type(value), jnp.floating
            )
            part.require(is_scalar, f"{contract}: {name}", value)
        if type(task).optimizer is Task.optimizer:
            return batch, result
        optimizer = part.call("optimizer()", task.optimizer)
        return batch, result, *_first_update(part, optimizer, params)

    rng = jax.eval_shape(lambda: jax.random.key(0))
    digests = {part.trace(first_loss, rng, batch) for _ in range(2)}
    part.require(len(digests) == 1, "must draw with rng and jax.random; two traces of it differ")
    return {"program": digests.pop(), "jax": jax.__version__}


def program_of_optimizer(task: Task) -> JSON:
    """{"program": digest, "jax": version} of the optimiser that `train` names; {} for Adam.

    Raises:
        ValueError: in one line: it fails, or breaks the contract of an optimiser.
    """
    if task.train.optimizer == "adam":
        return {}
    part, optimizer = optimizer_part(task), task.train.transformation()
    params = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    update = functools.partial(_first_update, part, optimizer)
    digests = {part.trace(update, params) for _ in range(2)}
    part.require(len(digests) == 1, "must compute the same in each trace; two traces differ")
    return {"program": digests.pop(), "jax": jax.__version__}


def _first_update(
    part: Part, optimizer: optax.GradientTransformation, params: Params
) -> tuple[Any, Any]:
    """Returns the initial state and the first update; ValueError if a loop cannot use them."""

    def call(method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with jax.numpy_dtype_promotion("standard"):
                return function(*arguments)
        except Exception as error:  # of the user's code, or of a package
            place = f" ({line})" if (line := users_line(error)) else ""
            text = f"{method} raised {type(error).__name__}: {one_line(error)}{place}"
            raise ValueError(f"{part.name}: {text}") from error

    def kinds(tree: Any) -> dict[str, str]:
        leaves = named_leaves(tree).items()  # checkpoints need their names
        return {name: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for name, leaf in leaves}

    init = "the optimizer's init(params)"
    update = "the optimizer's update(gradients, state, params)"
    state = call(init, optimizer.init, params)
    before = call(init, kinds, (params, state))
    result = call(update, optimizer.update, params, state, params)  # gradients are like parameters
    after = call(update, kinds, result)
    for name in before | after:
        part.require(
            before.get(name) == after.get(name),
            f"{update} must return (updates, state) with the shapes and dtypes of the parameters"
            f" and of the state before; leaf {name} was {before.get(name)}, and is"
            f" {after.get(name)}",
        )
    return state, result


def optimizer_part(task: Task) -> Part:
    """The optimiser that `train` names, with the words for errors about it."""
    return Part("optimizer", task.train.optimizer, "make it an argument of the function")


def check_program(part: Part, stored: JSON, now: JSON) -> None:
    """Raises ValueError if the program of a user's task or optimiser has changed.

    Args:
        part: the task or the optimiser.
        stored: what config.json holds of it.
        now: from `program_of` or `program_of_optimizer`.
    """
    then = stored.get("program")
    if then == now.get("program"):
        return
    text = (
        f"{part.name} was program {str(then)[:12]} when this run was trained, and is"
        f" {str(now.get('program'))[:12]} now"
    )
    if stored.get("jax") != now.get("jax"):
        versions = f"jax was {stored.get('jax')} then, and is {now.get('jax')} now"
        warnings.warn(f"{text}; this may be because {versions}", stacklevel=2)
        return
    raise ValueError(f"{text}; restore it, or train a new run in another folder")
