"""The picture of the README: the top of the page, in light and in dark, as Chromium draws it.

    python bench/page_pictures.py docs/plots

Needs what the page's browser tests need: playwright, and a chromium on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SIZE = {"width": 1280, "height": 800}  # the whole scene
STATE = "/hook?answers=hook:divided"  # the first chapter, answered
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    folder = Path(sys.argv[1])
    command = [sys.executable, "-m", "levelhead", "page", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
                    page.goto(f"{address}#{STATE}")
                    page.wait_for_load_state("networkidle")
                    page.wait_for_timeout(1000)  # the bubble has come to rest
                    page.screenshot(path=folder / f"page-{scheme}.png")
                browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
