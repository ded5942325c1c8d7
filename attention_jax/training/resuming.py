"""Which settings a run may be resumed with: its own, and more steps where its schedule allows."""

from __future__ import annotations

import json

from attention_jax.runs.run_folder import JSON, RunFolder
from attention_jax.training.task_definition import Config, TaskDefinition


def resumable_settings(
    definition: TaskDefinition[Config], settings: JSON, stored: JSON, folder: RunFolder
) -> JSON:
    """The settings with which the run in a folder may be resumed, as near to `settings` as may be.

    These are the stored settings, with the defaults of settings that are newer than the run. Their
    `loop.steps` is that of `settings` if the training does not depend on it.

    Args:
        definition: the task.
        settings: those of now, as config.json will hold them.
        stored: the content of config.json.
        folder: the run folder.

    Raises:
        ValueError: the stored settings are not those of this task, a score or normaliser has
            changed, or the number of steps is all that differs and cannot be changed.
    """
    earlier = definition.config_class.from_json(stored)
    complete = {**stored, **earlier.to_json()}
    for kind in ("scores", "normalizers"):
        # `from_json` has compared the stored parts with those that their names have now. Other
        # names are other settings, which need no second message.
        if kind in settings:
            complete[kind] = settings[kind]
    old, new = (each.get("loop", {}).get("steps") for each in (complete, settings))
    if old == new:
        return complete
    with_new_steps = {**complete, "loop": {**complete["loop"], "steps": new}}
    reason, reached = definition.why_steps_are_fixed(earlier), folder.newest_step
    if not reason and new >= reached:
        return with_new_steps
    if json.dumps(with_new_steps, sort_keys=True) == json.dumps(settings, sort_keys=True):
        if not reason:
            raise ValueError(
                f"steps must be at least {reached}, which the run has reached; got {new}"
            )
        raise ValueError(
            f"these settings are another configuration: loop.steps was {old}, now {new}. Resume"
            f" with the same steps, since {reason}; for {new} steps, train anew in another folder"
        )
    return complete
