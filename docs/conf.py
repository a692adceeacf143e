import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import shardwise

project = "Shardwise"
author = "The Shardwise authors"
copyright = author
release = version = shardwise.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Shardwise"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
