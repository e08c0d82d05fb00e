"""Say whether the solver of the proofs is installed."""

from importlib.util import find_spec

from IPython.display import Markdown, display


def has_solver(about: str) -> bool:
    """Whether Z3 is installed; if not, a note in the notebook says what this run does not prove."""
    found = find_spec("z3") is not None
    if not found:
        display(Markdown(f"*z3-solver is not installed here, so this run proves nothing about {about}.*"))
    return found
