"""Every study: of the benchmarks, of precision, and of the documents."""

from ropelab.bench import studies
from ropelab.bench.study import Study
from ropelab.study.engine.claims import documents
from ropelab.study.topics.precision import gpu as precision_gpu


def all_studies() -> dict[str, Study]:
    """Name -> study: the benchmarks, the study of precision, and the ``STUDIES`` of each document's package.

    Raises:
        ValueError: two studies have one name.
    """
    found = studies.STUDIES | precision_gpu.STUDIES
    for document in documents():
        module = document.module("studies")
        if taken := found.keys() & module.STUDIES.keys():
            raise ValueError(f"{module.__name__}: expected names of studies of its own, got {sorted(taken)}")
        found |= module.STUDIES
    return found
