"""Show an element in a notebook: as a widget in JupyterLab, and as HTML in the report."""

from IPython.display import display

from ropelab.bench import records
from ropelab.study.knobs import modules, page
from ropelab.study.knobs.data import DATA


def show(element: str, where: records.Where = records.MEASUREMENTS, **state: object) -> object:
    """Show an element whose knobs stand at ``state`` at first.

    The output has two forms. JupyterLab takes the widget if anywidget is installed; the report takes the HTML.

    Args:
        element: a name of `ropelab.study.knobs.data.DATA`.
        where: the records that have the element's measured points.

    Returns:
        The widget, or None without anywidget. Its ``state`` has the knobs that were turned: read it, or assign to it.

    Raises:
        ValueError: no element has this name.
        Unusable: a record is missing or cannot be believed.
    """
    if element not in DATA:
        raise ValueError(f"element: expected one of {tuple(DATA)}, got {element!r}")
    data = DATA[element](where)
    without = "This element needs JavaScript. The notebook's text and its findings stand without it."
    output = {"text/html": page.html(element, data, state, without), "text/plain": f"the element {element}"}
    widget = _widget(element, data, state)
    if widget is not None:
        output = {**widget._repr_mimebundle_()[0], **output}
    display(output, raw=True)
    return widget


def _widget(element: str, data: dict[str, object], state: dict[str, object]) -> object:
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class Element(anywidget.AnyWidget):
        _esm = modules.module(element)
        _css = modules.style()
        data = traitlets.Dict().tag(sync=True)
        state = traitlets.Dict().tag(sync=True)

    return Element(data=data, state=state)
