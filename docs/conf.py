"""Sphinx builds the pages of the repository into build/site; see `make docs`.

The source is the root of the repository, so that a page's links lead to the same place
here and where the repository is browsed. Files that are no pages are downloads.
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "persia_torchrec"
author = "the persia_torchrec authors"
copyright = "the persia_torchrec authors, Apache License 2.0"
smartquotes = False  # -- of an option is no dash
release = re.findall(r'"([0-9.]+)"', (ROOT / "persia_torchrec/version.py").read_text())[
    0
]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
# Result files, READMEs of tests and pages of contributors: links lead there.
suppress_warnings = ["toc.not_included"]
include_patterns = [
    "docs/**",
    "components/README.md",
    "examples/*/*.md",
    "tests/*/*.md",
    "tests/benchmarks/results/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "build", "runs", "*.egg-info", "docs/README.md"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "groupwise"
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"persia_torchrec {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["calculator.js"]
html_show_sourcelink = False


def _adapt(app: Any, name: str, source: list[str]) -> None:
    """Have links to folders lead to their page, and a picture be one for all themes."""
    text = source[0]
    here = (ROOT / name).parent
    for target in set(re.findall(r"\]\(([^)#:\s]+?)/?\)", text)):
        if (here / target).is_dir():
            text = re.sub(
                rf"\]\({re.escape(target)}/?\)", f"]({target}/README.md)", text
            )
    picture = r'<picture>.*?alt="(.*?)".*?src="(.*?)".*?</picture>'
    source[0] = re.sub(picture, r"![\1](\2)", text, flags=re.DOTALL)


def _lead_to_the_start(app: Any, error: Exception | None) -> None:
    """Write the page at the top of the site."""
    if error is None and app.builder.name == "html":
        page = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", _adapt)
    app.connect("build-finished", _lead_to_the_start)
