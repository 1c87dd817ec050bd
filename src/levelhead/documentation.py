"""Where to read: on the site, if one is set, else in the copy of the pages that is installed with the package.

A link is written as in the repository, "docs/health.md#wrong-scale". `where` turns it into what a reader can open: an
address below `LEVELHEAD_SITE`, or the command that prints the section.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from levelhead.errors import LevelheadValueError, bad_value

VARIABLE = "LEVELHEAD_SITE"
ADDRESS = ""  # of a public site, for everybody; the environment goes before it
START = "index"

_HEADING = re.compile(r"(#{1,6}) +(.+?) *#*$")
_FENCE = re.compile(r" {0,3}(```|~~~)")


class Section(NamedTuple):
    """A heading of a page, and its text down to the next heading of the same rank."""

    page: str
    title: str
    text: str

    @property
    def anchor(self) -> str:
        return anchor(self.title)


# ---- addresses --------------------------------------------------------------


def site() -> str | None:
    """The address of the folder that `make site` built, without a slash at its end; None where no site is set."""
    given = os.environ.get(VARIABLE, ADDRESS).strip()
    if not given:
        return None
    parts = urlsplit(given)
    if parts.scheme in ("https", "http") and parts.netloc and re.fullmatch(r"[!#-;=?-~]+", given):
        if parts.query or parts.fragment:
            raise _bad_site(given, "Leave out what follows the ? or #")
        return given.rstrip("/")
    folder = Path(given).expanduser()
    if (folder / "docs" / f"{START}.html").is_file():
        return folder.resolve().as_uri()
    raise _bad_site(given, "make site builds such a folder")


def _bad_site(given: str, advice: str) -> LevelheadValueError:
    return bad_value(VARIABLE, "a web address, or a folder with docs/index.html in it", repr(given), advice)


def link(page: str, title: str) -> str:
    """The link to a heading, as files of the repository have it."""
    return f"docs/{page}.md#{anchor(title)}"


def address(link: str) -> str | None:
    """The link on the site; None where no site is set."""
    base = site()
    path, mark, heading = link.partition("#")
    return None if base is None else f"{base}/{path.removesuffix('.md')}.html{mark}{heading}"


def where(link: str) -> str:
    """What a reader opens or types. A wrong `LEVELHEAD_SITE` is named beside the command: no report fails for it."""
    if not link.startswith("docs/"):
        return link
    page, _, heading = link.removeprefix("docs/").partition("#")
    command = f"levelhead docs {heading or page.removesuffix('.md')}"
    try:
        return address(link) or command
    except LevelheadValueError as error:
        return f"{command} ({error})"


def anchor(title: str) -> str:
    """The name of a heading in an address, by GitHub's rule; the site has the same names."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


# ---- the installed copy -----------------------------------------------------


def folder() -> Path:
    """The pages: package data of a wheel, docs/ in a source tree."""
    installed = Path(__file__).with_name("docs")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "docs"


def pages() -> dict[str, str]:
    """The text of every page, by name; the page to start from comes first."""
    files = sorted(folder().glob("*.md"), key=lambda file: (file.stem != START, file.stem))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def sections(page: str, text: str) -> Iterator[Section]:
    """Every heading of a page. Headings without text between them share the text that follows the last one."""
    lines, heads, fenced = text.splitlines(), [], False
    for number, line in enumerate(lines):
        fenced ^= bool(_FENCE.match(line))
        if not fenced and (found := _HEADING.match(line)):
            heads.append((number, len(found[1]), found[2]))
    for index, (start, rank, title) in enumerate(heads):
        later = [(line, other) for line, other, _ in heads[index + 1 :] if other <= rank]
        ends = [
            line for line, _ in later if any(text.strip() and not _HEADING.match(text) for text in lines[start:line])
        ]
        yield Section(page, title, "\n".join(lines[start : ends[0] if ends else None]).strip())


def section(words: Sequence[str]) -> str:
    """The text of a page, of a heading ("wrong-scale", "wrong scale"), or of a page's heading ("health the-gauge")."""
    texts = pages()
    if len(words) == 1 and words[0] in texts:
        return texts[words[0]].rstrip("\n")
    named, wanted = (words[:1], words[1:]) if words[0] in texts and len(words) > 1 else (list(texts), words)
    every = [found for page in named for found in sections(page, texts[page])]
    name = anchor(" ".join(wanted))
    found = [one for one in every if one.anchor == name]
    if len({one.page for one in found}) == 1:
        return found[0].text
    if found:
        choices = ", ".join(f"levelhead docs {one.page} {name}" for one in found)
        raise bad_value("NAME", "a heading of one page", f"{name!r}, which several have", f"Say which: {choices}")
    near = get_close_matches(name, [*texts, *(one.anchor for one in every)], n=3)
    advice = f"Is it {' or '.join(near)}" if near else "levelhead docs lists all pages"
    raise bad_value("NAME", "a page or a heading", repr(" ".join(words)), advice)
