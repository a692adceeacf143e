import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from shardwise.version import __version__

project = "Shardwise"
author = "The Shardwise authors"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "command_line", "docstrings"]
exclude_patterns = ["_build"]
nitpicky = False  # annotations name types of torch and of inner modules, which have no pages here

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_preserve_defaults = False  # sources of decorated functions have other parameters

smartquotes = False  # `--cluster` is typed with two dashes
html_theme = "furo"
html_title = "Shardwise"
html_static_path = ["_static"]
html_css_files = ["shardwise.css"]
html_copy_source = False
pygments_dark_style = "github-dark"
