"""The list of tasks, and the task of a run folder."""

import pytest

from attention_jax.tasks import TASKS, task_of


def test_every_task_is_listed_under_its_name():
    assert list(TASKS) == ["reversal", "translation"]
    assert all(task.name == name for name, task in TASKS.items())


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ('{"task": "translation"}', "translation"),
        ('{"task": "reversal"}', "reversal"),
        ('{"dim": 8}', "reversal"),  # the first version of config.json
    ],
)
def test_the_task_of_a_folder(tmp_path, content, name):
    (tmp_path / "config.json").write_text(content)
    assert task_of(tmp_path) is TASKS[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"task": "chess"}', r"must hold a run of reversal or translation; got task 'chess'"),
        ('{"task"', r"config.json cannot be read"),
        (None, r"has no config.json"),
    ],
)
def test_a_folder_without_a_known_task(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path)
