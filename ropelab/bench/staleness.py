"""Say what has changed since a record was measured: a kernel that it launched, a peer that it timed, or its protocol.

A record knows the code that its numbers depend on. All other code may change, and the record stays what it is. A table
that is no times has no protocol: a test on a GPU wrote it, and it is as old as its run.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ropelab.bench import fetch_peers, protocols, reached

_KERNELS = "kernels."


def stale(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """What has changed: functions of kernels by name, then peers, then the timer and the study.

    A peer has changed where ``data/peers.toml`` lists its package and no longer this version. Packages that the list
    does not have come from the environment, and are not compared.
    """
    if not provenance["protocol"]:
        return ()
    kernels = reached.changed(provenance["kernels"], protocols.same_code())
    listed = {name: {f"{name} {version}" for version in versions} for name, versions in fetch_peers.engines().items()}
    for entry in fetch_peers.read_list():
        listed.setdefault(entry.name, set()).add(str(entry))
    gone = [name for name in provenance["peers"] if name not in listed.get(name.partition(" ")[0], {name})]
    changed = protocols.changed(provenance["study"], provenance["protocol"])
    return (*(f"{_KERNELS}{name}" for name in kernels), *gone, *changed)


def of_kernels(changed: Iterable[str]) -> list[str]:
    """The names of `stale` that are functions of kernels."""
    return [name for name in changed if name.startswith(_KERNELS)]
