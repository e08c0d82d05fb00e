"""Turn an element into HTML that a page of the report, or any other page, can hold."""

import json
import re
from collections.abc import Mapping

from markupsafe import Markup

from ropelab.study.knobs.modules import module, style

_COMMENT = re.compile(r"^ *(?://.*\n|/\*\*.*\*/\n)?", re.MULTILINE)
"""The beginning of a line, and a line of comment."""
_HTML = Markup("""\
<div class="knob" data-knob="{name}"><p>{without}</p></div>
<style>
{style}</style>
<script type="module">
{module}
for (const el of document.querySelectorAll('[data-knob="{name}"]:not([data-ready])')) {{
  el.dataset.ready = "";
  render({{ model: pageModel("{name}", {data}, {state}), el }});
}}
</script>
""")


def html(
    element: str, data: Mapping[str, object], state: Mapping[str, object] | None = None, without: str = ""
) -> Markup:
    """The element as HTML that needs no network and no other file; the page's URL keeps the values of the knobs.

    Args:
        element: the name of a file in ``js``, such as ``"turn"``.
        data: the data that `ropelab.study.knobs.data` computes for the element.
        state: name of a knob -> its first value, unless the URL has another value.
        without: the text for a reader without JavaScript.
    """
    return _HTML.format(
        name=element,
        without=without,
        style=Markup(style()),
        module=Markup(_in_script(_COMMENT.sub("", module(element)))),
        data=Markup(_in_script(json.dumps(data, separators=(",", ":"), allow_nan=False))),
        state=Markup(_in_script(json.dumps(state or {}))),
    )


def _in_script(text: str) -> str:
    """The text, changed so that it cannot end a script element."""
    return text.replace("</", "<\\/").replace("<!--", "<\\!--")
