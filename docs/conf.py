"""Sphinx's settings for the pages that `ropelab.study.site.report` prepares. Nothing here loads from a network."""

from importlib.util import find_spec

from sphinx.application import Sphinx

project = "ropelab"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "ropelab.study.site.mathml"]

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_disable_syntax = ["html_block", "html_inline"]  # a quotation brings no markup into a page
myst_heading_anchors = 4
nb_execution_mode = "off"  # papermill has run the notebooks
nb_render_markdown_format = "myst"
nb_merge_streams = True
nb_code_prompt_hide = "hide the code"
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
nb_ipywidgets_js = {}

autodoc_member_order = "bysource"
autodoc_mock_imports = [name for name in ("torchtitan", "transformers", "diffusers") if not find_spec(name)]
default_role = "py:obj"
maximum_signature_line_length = 88
napoleon_custom_sections = [("Attributes", "params_style"), ("Columns", "params_style")]
python_use_unqualified_type_names = True

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "ropelab"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["study.css"]
html_js_files = ["ledger.js"]
html_copy_source = False
html_domain_indices = False  # the sidebar lists the modules
toc_object_entries_show_parents = "hide"
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Claims and records are things that pages link to by name, and that a search finds."""
    app.add_object_type("claim", "claim")
    app.add_object_type("record", "record")
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _one_thing, priority=400)
    app.connect("autodoc-skip-member", lambda *of: "Alias for field number" in str(of[3].__doc__) or None)


def _signature(app: Sphinx, what: str, name: str, thing: object, options: object, given: str, returned: str) -> tuple:
    """A default that a dataclass makes is no Python, which Sphinx would need; what a protocol takes says nothing."""
    if what == "class" and given == "(*args, **kwargs)":
        return "", returned
    return given and given.replace("<factory>", "..."), returned


def _one_thing(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Napoleon, which comes next, takes words before a colon for a type, if they stand in the first line."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\ ")  # no space
