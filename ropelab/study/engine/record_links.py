"""Link from a figure in a notebook to the records that the figure draws."""

import os
from collections.abc import Sequence
from pathlib import Path

from ropelab.bench import records

RECORDS = "ropelab/records"


def show_records(studies: Sequence[str], where: records.Where) -> None:
    """Show a link to the table of each record, as seen from the running notebook; nothing for a missing record.

    The names of the studies are in the output's metadata, from which the report links to its own list of records.
    """
    from IPython.display import display

    paths = {study: path for study in studies if (path := table(study, where))}
    if paths:
        links = ", ".join(f"[{study}]({Path(os.path.relpath(path)).as_posix()})" for study, path in paths.items())
        data = {"text/markdown": f"Records: {links}", "text/plain": f"Records: {', '.join(paths)}"}
        display(data, raw=True, metadata={RECORDS: list(paths)})


def table(study: str, where: records.Where) -> Path | None:
    """The file with the table of a record, or None where there is no record that can be believed."""
    try:
        record = records.load(study, where)
    except records.Unusable:
        return None
    return records.files(study, records.selection(where).directory, record.provenance["gpu"]["name"])[0]
