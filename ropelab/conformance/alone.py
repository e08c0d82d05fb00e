"""Make a call as the first call of a new process, where no earlier call of the function can have left anything."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields

from ropelab.conformance.shrink import Call
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.watched import watch

SECONDS = 60.0
"""The time after which the process is given up."""
RIGHT, WRONG = 80, 81
"""The exit codes of the process."""
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ropelab.conformance import alone; alone.answer()"
)


def wrong_alone(subject: Subject, call: Call) -> bool | None:
    """Return whether a call is wrong as the first one of a new process; None where no such process has an answer.

    Args:
        subject: the function, which a new process can import by its name.
        call: the call.
    """
    known = {field.name: getattr(subject, field.name) for field in fields(subject) if field.name != "surroundings"}
    try:
        asked = pickle.dumps((call, pickle.dumps(known)))
        command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path)]
        nowhere = subprocess.DEVNULL
        done = subprocess.run(command, input=asked, stdout=nowhere, stderr=nowhere, timeout=SECONDS, check=False)
    except Exception:  # a function without a name in its module, or a machine without room for the process
        return None
    return {RIGHT: False, WRONG: True}.get(done.returncode)


def answer() -> None:
    """Make the call that stands on stdin, and end the process with the answer."""
    call, known = pickle.load(sys.stdin.buffer)
    surroundings = Surroundings()
    with surroundings.importing():
        subject = Subject(**pickle.loads(known), surroundings=surroundings)
    with surroundings.ours():
        seen = [one for one in watch(call.law(), subject, call.sizes) if one.gradient == call.gradient]
        os._exit((WRONG if any(one.wrong.any() for one in seen) else RIGHT) if seen else 0)
