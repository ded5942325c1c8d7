"""Programs that a user wrote: batch, loss and optimiser of a task, and `--optimizer`.

A digest knows a program exactly, and holds for one version of JAX. Numbers of it on fixed keys are
kept beside the digest: where a task was written anew, or JAX is another, they decide.
"""

import dataclasses
import functools
import typing
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.core.errors import one_line, users_line
from attention_jax.core.names import is_of_this_package
from attention_jax.parts.descriptions import check_same
from attention_jax.parts.digests import program_digest
from attention_jax.parts.samples import Numbers, numbers_in, program_and_results, same_numbers
from attention_jax.parts.user_code import UserCode
from attention_jax.runs.checkpoints import named_leaves
from attention_jax.runs.run_folder import JSON
from attention_jax.training.settings import task_part
from attention_jax.training.task import Feed, Params, Task, check_metrics

_NUMBERS = "program_numbers"  # beside "program" and "jax" in config.json


class Program(NamedTuple):
    """A program that a user may have written: of a task, or of the optimiser that `train` names.

    Attributes:
        entry: of config.json, which holds what is known of it; "" for config.json itself.
        part: the words for errors about it.
        trace: gives {"program": digest, "jax": version}, or {} if no user wrote it; ValueError, in
            one line, if it fails, breaks its contract, or computes something else in each trace.
        sample: gives numbers of it, in which a program that is written anew agrees.
    """

    entry: str
    part: UserCode
    trace: Callable[[], JSON] = dict
    sample: Callable[[], Numbers] = list

    def within(self, content: JSON) -> JSON:
        """What the content of a config.json holds of it."""
        held = content.get(self.entry, {}) if self.entry else content
        return {name: held[name] for name in ("program", "jax", _NUMBERS) if name in held}

    def entries(self, held: JSON) -> JSON:
        """The entries of config.json that hold it."""
        return {self.entry: held} if self.entry and held else held

    def check(self, stored: JSON, config: JSON | None = None) -> JSON:
        """Raises ValueError if it has changed since a config.json was written; returns it as it is.

        Another program that gives the same numbers counts as the same, with a warning. Earlier
        versions of this library stored no numbers: there another program is refused, or a warning
        if it may be because of the version of JAX.

        Args:
            stored: the content of config.json.
            config: that of now; None to trace the program.
        """
        then, now = self.within(stored), self.trace() if config is None else self.within(config)
        if then.get("program") != now.get("program"):
            text = (
                f"{self.part.name} was program {str(then.get('program'))[:12]} when this run was"
                f" trained, and is {str(now.get('program'))[:12]} now"
            )
            jax_then = str(then.get("jax")) if then.get("jax") != now.get("jax") else ""
            check_same(text, then.get(_NUMBERS), self.sample, jax_then, _same_numbers)
        return now

    def kept(self, stored: JSON, config: JSON) -> JSON:
        """The entries of config.json from now on, of a program that `check` has passed.

        A program without numbers is only replaced where it is the same: with another version of JAX
        nobody knows, and the digest of the run stays.

        Args:
            stored: the content of config.json; {} for a new run.
            config: that of now.
        """
        then, now = self.within(stored), self.within(config)
        if not now:
            return {}
        if then.get(_NUMBERS) or then.get("program", now["program"]) == now["program"]:
            then = {**now, _NUMBERS: then.get(_NUMBERS) or self.sample()}
        return self.entries(then)


def programs_of(task: Task, feed_of: Callable[[], Feed | None]) -> tuple[Program, Program]:
    """The program of a task, and that of the optimiser that its `train` names; traced when asked.

    Scores and normalisers that a user wrote are not part of them: config.json describes each one,
    and a rewritten one may give the same numbers.

    Args:
        task: the task.
        feed_of: returns its feed, or None; not called for a task of this library.
    """
    of_task = Program("", task_part(task))
    if not is_of_this_package(type(task)):
        once = functools.cache(feed_of)
        of_task = of_task._replace(
            trace=lambda: _traced_task(task, once), sample=lambda: _numbers_of_task(task, once())
        )
    part = UserCode("optimizer", task.train.optimizer, "make it an argument of the function")
    of_optimizer = Program("optimizer_program", part)
    if task.train.optimizer != "adam":
        of_optimizer = of_optimizer._replace(
            trace=lambda: _traced_optimizer(task, part), sample=lambda: _numbers_of_optimizer(task)
        )
    return of_task, of_optimizer


def _traced_task(task: Task, feed_of: Callable[[], Feed | None]) -> JSON:
    task, part = _with_parts(task), task_part(task)
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
            shape, dtype = jnp.shape(value), jnp.result_type(value)
            is_scalar = shape == () and jnp.issubdtype(dtype, jnp.floating)
            part.require(is_scalar, f"{contract}: {name}", value)
        if type(task).optimizer is Task.optimizer:
            return batch, result
        optimizer = part.call("optimizer()", task.optimizer)
        return batch, result, *_first_update(part, optimizer, params)

    rng = jax.eval_shape(lambda: jax.random.key(0))
    return _program(part, "draw with rng and jax.random", first_loss, rng, batch)


def _traced_optimizer(task: Task, part: UserCode) -> JSON:
    update = functools.partial(_first_update, part, task.train.transformation())
    params = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    return _program(part, "compute the same in each trace", update, params)


def _program(part: UserCode, contract: str, function: Callable[..., Any], *arguments: Any) -> JSON:
    """{"program": digest, "jax": version}; ValueError if two traces of the function differ."""
    digests = {program_digest(part, function, *arguments) for _ in range(2)}
    part.require(len(digests) == 1, f"must {contract}; two traces of it differ")
    return {"program": digests.pop(), "jax": jax.__version__}


def _first_update(
    part: UserCode, optimizer: optax.GradientTransformation, params: Params
) -> tuple[Any, Any]:
    """Returns the initial state and the first update; ValueError if a loop cannot use them."""

    def call(method: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, JSON]:
        """The result, and the dtype and shape of each leaf by its name in a checkpoint."""
        try:
            with jax.numpy_dtype_promotion("standard"):
                result = function(*arguments)
            kinds = {
                name: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
                for name, leaf in named_leaves(result).items()
            }
            return result, kinds
        except Exception as error:  # of the user's code, or of a package
            place = f" ({line})" if (line := users_line(error)) else ""
            text = f"{method} raised {type(error).__name__}: {one_line(error)}{place}"
            raise ValueError(f"{part.name}: {text}") from error

    init = "the optimizer's init(params)"
    update = "the optimizer's update(gradients, state, params)"
    (_, state), before = call(init, lambda: (params, optimizer.init(params)))
    # Gradients are like parameters.
    result, after = call(update, optimizer.update, params, state, params)
    for name in before | after:
        part.require(
            before.get(name) == after.get(name),
            f"{update} must return (updates, state) with the shapes and dtypes of the parameters"
            f" and of the state before; leaf {name} was {before.get(name)}, and is"
            f" {after.get(name)}",
        )
    return state, result


def _with_parts(task: Task, **changes: Any) -> Task:
    """The task with a score and a normaliser of this library, and with changes of its model."""
    if hasattr(task.model, "defaults_of_users_parts"):
        changes |= task.model.defaults_of_users_parts()
        model = dataclasses.replace(task.model, **changes)
        task = dataclasses.replace(task, model=model)  # type: ignore[type-var]
    return task


# --- numbers of a program ---


def _numbers_of_task(task: Task, feed: Feed | None) -> Numbers:
    """Numbers of a user's task: initial parameters, two batches, their losses and gradients.

    A task that is written in another way has the same up to rounding, with every version of JAX.
    The losses are those of parameters that are all other than 0, in float32. An optimiser of the
    task's own adds numbers of its updates. No number is kept if one step of one seed does not fit
    into the memory of a device.
    """
    task = _with_parts(task, dtype="float32")
    fed = None if feed is None else feed.batch(task.train.first_seed, 0)

    def measured(rng: Any, fed: Any) -> Any:
        params = task.init(rng)
        others = jax.tree.map(lambda leaf: leaf + _pattern(leaf, 2.3, 0.1), params)

        def one(rng: Any) -> Any:
            rngs, batch = jax.random.split(rng), fed
            if feed is None:
                batch = task.batch(rngs[0], size=typing.cast(int, task.train.batch_size))
            gradient = jax.value_and_grad(task.loss, has_aux=True)
            (loss, _), dparams = gradient(others, batch, rngs[1])
            return loss, _norm_and_sums(batch), _norm_and_sums(dparams)

        own = type(task).optimizer is not Task.optimizer
        updates = [_updates(task.optimizer(), params)] if own else []
        return _norm_and_sums(params), jax.lax.map(one, jax.random.split(rng)), *updates

    results = _measured(measured, jax.random.key(0), fed)
    # Tasks that check their own examples say it of these.
    if results and feed is None and type(task).check_numbers is Task.check_numbers:
        of_batches = jax.tree.leaves(results[2][1])
        if all(np.array_equal(leaf[0], leaf[1], equal_nan=True) for leaf in of_batches):
            warnings.warn(
                f"{task_part(task).name}: batch(rng, size={task.train.batch_size}) gives the same"
                " batch with two keys, so that each step learns from it",
                stacklevel=2,
            )
    return numbers_in(results)


def _numbers_of_optimizer(task: Task) -> Numbers:
    """Numbers of the optimiser that `train` names: eight updates of the parameters of a task."""
    train = dataclasses.replace(task.train, steps=task.train.updates, accumulate=1)
    optimizer = train.transformation()
    return numbers_in(_measured(lambda rng: _updates(optimizer, task.init(rng)), jax.random.key(0)))


def _updates(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Sums over eight updates that begin after 0, 100 and 10,000 updates."""

    def from_count(count: Any) -> Any:
        def counted(leaf: Any) -> Any:
            is_count = jnp.issubdtype(jnp.result_type(leaf), jnp.integer) and not jnp.ndim(leaf)
            return jnp.asarray(count, jnp.result_type(leaf)) if is_count else leaf

        def update(carry: Any, step: Any) -> Any:
            params, state = carry
            like = functools.partial(_pattern, frequency=0.7 + step, scale=1 / (1 + step))
            gradients = jax.tree.map(like, params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = (params, jax.tree.map(counted, optimizer.init(params)))
        (last, _), _ = jax.lax.scan(update, start, jnp.arange(8.0, dtype=jnp.float32))
        return _norm_and_sums(jax.tree.map(jnp.subtract, last, params))

    with jax.numpy_dtype_promotion("standard"):
        return jax.lax.map(from_count, jnp.array([0, 100, 10_000]))


def _pattern(leaf: Any, frequency: Any, scale: Any = 1.0) -> Any:
    """Numbers from -`scale` to `scale` in place of those of an array, none of which is near 0."""
    # XLA would compute the numbers of a large array while it compiles.
    places = jax.lax.optimization_barrier(jnp.arange(jnp.size(leaf), dtype=jnp.int32)) % 1009
    wave = jnp.cos(jnp.float32(frequency) * places.astype(jnp.float32))
    numbers = scale * jnp.copysign(0.1 + 0.9 * abs(wave), wave)
    return numbers.reshape(jnp.shape(leaf)).astype(jnp.result_type(leaf))


def _norm_and_sums(tree: Any) -> Any:
    """The logarithm of a pytree's norm, and weighted sums of its leaves relative to the norm."""
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
    ]
    floats = [leaf.astype(jnp.float32) for leaf in leaves]
    norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in floats))
    return jnp.log(norm), [jnp.sum(leaf * _pattern(leaf, 1.3)) / norm for leaf in floats]


def _measured(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's results in NumPy, after the epsilon of its 16-bit floats, 0 without any.

    () if the memory of a device is too small.
    """
    try:
        program, results = program_and_results(function, *arguments)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return ()
    text, dtypes = str(program), {":bf16[": jnp.bfloat16, ":f16[": jnp.float16}
    narrow = [float(jnp.finfo(dtype).eps) for name, dtype in dtypes.items() if name in text]
    return max(narrow, default=0.0), *results


def _same_numbers(stored: Numbers, now: Numbers) -> bool:
    """Whether numbers are equal up to rounding, in float32 or in the 16-bit floats among them."""
    epsilons = (numbers[0] or 0.0 for numbers in (stored, now) if numbers)
    return same_numbers(stored, now, max(1e-4, *(4 * epsilon for epsilon in epsilons)))
