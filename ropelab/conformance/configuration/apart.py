"""Hold a target to a configuration in a new process."""

from __future__ import annotations

import json
from collections.abc import Callable

from ropelab.conformance.configuration.verify_config import ConfigReport
from ropelab.conformance.process import START, Limits, run


def hold_config_apart(
    config: str,
    against: str,
    layer_type: str | None,
    limits: Limits,
    tell: Callable[[str], object] = lambda begun: None,
) -> tuple[str, str, str]:
    """Return the verdict, the report in words, and the report as JSON; the output of the target goes to stderr.

    Args:
        config, layer_type: as for `verify_config`.
        against: ``"package.module:name"`` or a file.
        limits: the limits of import and comparison together.
        tell: called about every half second with the step that has begun.

    Raises:
        OSError: the process could not be started.
    """
    request = {"config": config, "against": against, "layer_type": layer_type}
    done = run("verify-config", request, limits, lambda notes: tell(dict(notes).get("begun", START)))
    said = dict(done.notes)
    if "config" in said:
        report = said["config"]["report"]
        return report["verdict"], said["config"]["words"], json.dumps(report, indent=1)
    failed = ConfigReport(against, message=said.get("refused", done.ended))
    return failed.verdict, str(failed), failed.to_json()
