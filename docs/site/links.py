"""Finds links of a built site that lead nowhere: files, and names within files. The web is not followed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The names that an HTML file defines, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []  # what a browser requests by itself
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given and "canonical" not in given.get("rel", ""):
            self.loads.append(given["href"])
        elif tag in ("img", "script", "source", "iframe", "video", "audio", "embed"):
            self.loads += [given["src"]] if "src" in given else []
            self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]


def broken(folder: Path) -> list[str]:
    """A line for every link that leads nowhere, and for everything that is loaded from outside."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(folder.resolve())
        outside = [link for link in page.loads if urlsplit(link).scheme not in ("", "data") or link.startswith("//")]
        found += [f"{here}: loads {link} from outside" for link in outside]
        found += [f"{here}: {link}" for link in (*page.links, *page.loads) if not _leads(link, path, pages, folder)]
    return found


def _leads(link: str, path: Path, pages: dict[Path, Page], folder: Path) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if folder.resolve() not in target.parents or not target.is_file():
        return False
    name = unquote(parts.fragment)
    # The story keeps its state behind the #, which is no name within the page.
    return not name or target not in pages or "=" in name or name.startswith("/") or name in pages[target].names
