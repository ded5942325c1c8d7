"""Runs checks of one file by name, on the eight CPU devices that `conftest.py` asks for."""


class results_of:  # noqa: N801  a mapping
    """{name: None}; a check runs, and may fail, when its result is read."""

    def __init__(self, checks, request):
        self.checks = {**checks.CHECKS, **checks.SLOW}

    def __getitem__(self, name):
        return self.checks[name]()
