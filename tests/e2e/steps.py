"""What the Python end-to-end scripts share: where to ask, and how a step is told."""

import os
import sys
import traceback

URL = os.environ["GOODPUT_URL"].rstrip("/")
KEY = os.environ.get("GOODPUT_KEY", "none")
MODEL = os.environ.get("GOODPUT_MODEL", "sim")
# The prompt: long enough to be no single token, short enough for the smallest model.
SAY = "the gateway streams tokens"

# What the engine behind the service cannot do: steps that need it are left out.
WITHOUT = set(os.environ.get("GOODPUT_WITHOUT", "").split(",")) - {""}

_steps = []


def step(function):
    """Marks a function as one step of the script; its docstring says what must hold."""
    _steps.append(function)
    return function


def step_with(need):
    """The same, for a step that needs something which not every engine has."""
    return lambda function: function if need in WITHOUT else step(function)


def run_all():
    """Runs every step, says how each went, and ends the process accordingly."""
    failed = 0
    for function in _steps:
        try:
            function()
            print(f"ok   {function.__name__}", flush=True)
        except Exception:  # a step may fail in any way; all of them are reported
            failed += 1
            print(f"FAIL {function.__name__}: {function.__doc__}", flush=True)
            traceback.print_exc()
    print(f"{len(_steps) - failed} of {len(_steps)} steps held", flush=True)
    sys.exit(1 if failed or not _steps else 0)


def raises(kind, act):
    """The exception of this kind that `act` raises."""
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")
