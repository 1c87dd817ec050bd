"""Sphinx: the pages of docs/, the reference from docstrings, and the notebooks, as they are in the repository.

The source is the whole repository, so that links between its files hold without translation. `build.py` runs it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml

import levelhead
from levelhead import documentation

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ["README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG"]
_FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.M)
_sentences: dict[str, list[str]] = {}  # about properties; napoleon takes what precedes a colon for a type
_LINK = re.compile(r"\[([^]]+)]\(([\w./-]+)\)")

project = "levelhead"
copyright = "the levelhead authors; Apache-2.0"
release = levelhead.__version__
root_doc = "docs/index"
include_patterns = [
    *(f"{name}.md" for name in PROJECT),
    "docs/*.md",
    "docs/api/*.md",
    "examples/notebooks/*.ipynb",
    "bench/results/README.md",
]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "site",
    "core",
    "src",
    "tests",
    "**.ipynb_checkpoints",
]  # not even looked into
highlight_language = "none"  # of blocks that name none
suppress_warnings = ["misc.highlighting_failure"]  # … stands for what is left out

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # outputs are those that are committed
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # would be loaded from the network
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

add_module_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what an argument may be
autodoc_docstring_signature = False
smartquotes = False  # docstrings quote code
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 90

html_theme = "furo"
html_title = "levelhead"
html_baseurl = f"{base}/" if (base := documentation.site()) and base.startswith("http") else ""
html_favicon = "icon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "story.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # would fetch pages, which a browser refuses from a disk
html_domain_indices = False
html_math_renderer = "mathml"


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("source-read", _complete)
    app.connect("doctree-read", _name_headings, priority=100)  # before tables of contents are made of them
    app.connect("autodoc-process-docstring", _complete_docstring, priority=100)  # before napoleon reads it
    app.connect("autodoc-process-docstring", _as_rst, priority=900)
    app.connect("autodoc-process-signature", _readable)


def _complete(app: Any, name: str, source: list[str]) -> None:
    """What the site needs and a reader of the repository does not: navigation, and the story. Folders have no page."""
    here = (ROOT / name).parent
    source[0] = _LINK.sub(lambda found: f"`{found[1]}`" if (here / found[2]).is_dir() else found[0], source[0])
    if name == "docs/index":
        notebooks = sorted(path.stem for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"))
        source[0] = source[0].replace("[story](page.md)", '<a href="../index.html">story</a>')
        source[0] += "".join(
            _toctree(caption, pages)
            for caption, pages in {
                "Learn": ["lab", "page"],
                "Notebooks": [f"../examples/notebooks/{name}" for name in notebooks],
                "See your model": ["watch", "gpu", "health", "preflight", "remedies"],
                "Compute": ["from-pytorch", "from-jax", "from-flash-attention", "statistics", "scaling", "kernel"],
                "Reference": [f"api/{name}" for name in ("index", "attention", "models", "torch", "jax", "lab")],
                "Project": [*(f"../{name}" for name in PROJECT), "../bench/results/README"],
            }.items()
            if pages
        )


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["\n```{toctree}", ":hidden:", ":titlesonly:", f":caption: {caption}", *pages, "```\n"])


def _name_headings(app: Any, doctree: nodes.document) -> None:
    """Headings have the names that GitHub gives them, so that a link holds in the repository and here."""
    for section in doctree.findall(nodes.section):
        title = section.next_node(nodes.title)
        name = documentation.anchor(title.astext()) if title is not None else ""
        if name and name not in section["ids"] and name not in doctree.ids:
            section["ids"].insert(0, name)


def _complete_docstring(app: Any, what: str, name: str, about: Any, options: Any, lines: list[str]) -> None:
    """Fields of a dataclass are explained by their comments."""
    if what in ("attribute", "property"):
        _sentences[name] = list(lines)
    if what == "class" and is_dataclass(about):
        if lines and lines[0].startswith(f"{about.__name__}("):  # Python's own, in place of a docstring
            lines.clear()
        comments = dict(_FIELD.findall(inspect.getsource(about)))
        fields_ = [field.name for field in fields(about) if not field.name.startswith("_") and field.name in comments]
        lines += ["", *(f"* **{field}**: {comments[field]}" for field in fields_), ""]


def _readable(app: Any, what: str, name: str, about: Any, options: Any, given: str | None, back: str | None) -> Any:
    """Signatures without private fields, and without defaults that only Python can read."""
    if given is None:
        return None
    return re.sub(r"=<(?:[^<>]|<[^<>]*>)*>", "=…", re.sub(r", _\w+=<\w+>", "", given)), back


def _as_rst(app: Any, what: str, name: str, about: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text, in which |x| is a size; examples stay as they are."""
    lines[:] = _sentences.pop(name, lines)
    example = False
    for number, line in enumerate(lines):
        example = line.strip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            lines[number] = line.replace("|", r"\|")


def _inline_math(writer: Any, node: nodes.math) -> None:
    writer.body.append(_mathml(node, block=False))
    raise nodes.SkipNode


def _block_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, *, block: bool) -> str:
    """By the browser itself, without a script."""
    try:
        return str(tex2mathml(node.astext(), as_block=block))
    except MathError as error:
        raise ValueError(f"{node.astext()!r} is beyond docutils' MathML: {error}") from error
