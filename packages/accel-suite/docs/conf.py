# ruff: noqa: INP001 - a script of Sphinx
"""How Sphinx builds the site; `uv run python tools/build_docs.py` runs it."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.config import Config

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

project = "accel"
author = "The accel authors"
project_copyright = "The accel authors, Apache-2.0"
version = release = version_of("accel-suite")

extensions = [
    "api_pages",
    "link_names",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # notebooks carry what their cells show; a test runs them and compares
exclude_patterns = ["_static", "src"]
nitpicky = True
smartquotes = False  # two hyphens begin an option
default_role = "code"  # as in the docstrings, where single backticks are code

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

INVENTORIES = {
    "numpy": ("https://numpy.org/doc/stable/", None),
    "python": ("https://docs.python.org/3/", None),
    "torch": ("https://docs.pytorch.org/docs/stable/", None),
}


def setup(app: Sphinx) -> None:
    """Declare `-D online=1`, which links to the documentation of other libraries."""
    app.add_config_value("online", default=False, rebuild="env", types=(bool, str))
    app.connect("config-inited", _connect)


def _connect(app: Sphinx, config: Config) -> None:
    if config.online:
        config.intersphinx_mapping = INVENTORIES
        app.setup_extension("sphinx.ext.intersphinx")


pygments_dark_style = "a11y-high-contrast-dark"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"accel {release}"
html_show_sphinx = False
