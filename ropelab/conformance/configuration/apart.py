"""Hold a target to configurations in a new process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ropelab.conformance.configuration.verify_config import ConfigReport
from ropelab.conformance.process import START, Limits, run


def hold_config_apart(
    configs: list[str],
    against: str,
    layer_type: str | None,
    limits: Limits,
    tell: Callable[[str], object] = lambda begun: None,
) -> dict[str, dict[str, Any]]:
    """Return for each configuration ``report`` (`ConfigReport.as_dict`), the report in ``words``, and in a ``line``.

    The output of the target goes to stderr.

    Args:
        configs, layer_type: as for `verify_config`.
        against: ``"package.module:name"`` or a file.
        limits: the limits of import and comparisons together.
        tell: called about every half second with the step that has begun.

    Raises:
        OSError: the process could not be started.
    """
    request = {"configs": configs, "against": against, "layer_type": layer_type}
    done = run("verify-config", request, limits, lambda notes: tell(dict(notes).get("begun", START)))
    found = {value["config"]: value for kind, value in done.notes if kind == "config"}
    failed = ConfigReport(against, message=dict(done.notes).get("refused", done.ended))
    for config in configs:
        line = f"{config}: {failed.verdict}: {failed.message}"
        found.setdefault(config, {"report": failed.as_dict(), "words": str(failed), "line": line})
    return {config: found[config] for config in configs}
