"""The documentation builds into a site without a warning, and the site needs nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def navigation() -> list[str]:
    return re.findall(r"^ +- (?:[^:\n]+: )?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)


def test_every_page_is_in_the_navigation():
    assert len(navigation()) == len(set(navigation()))
    missing = {p.name for p in (ROOT / "docs").glob("*.md")} - set(navigation())
    assert not missing, f"mkdocs.yml: nav lacks {missing}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        # tools/environment.py installs both, so `make test` has them.
        assert Path(sys.prefix) != ROOT / ".venv", "the environment of `make test` has mkdocs-material"
        pytest.skip("mkdocs-material is not installed in this Python")
    where = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(where)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return where


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.links, self.loads, self.ids, self.text = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given["href"])

    def handle_data(self, data):
        self.text.append(data)


def test_pages_are_built_and_linked(site):
    """Every link between pages leads to a page, and every anchor to a place on it."""
    pages = {p: Page(p.read_text()) for p in site.rglob("*.html")}
    names = {p.name for p in pages}
    assert {n.replace(".md", ".html") for n in navigation()} <= names
    for path, page in pages.items():
        if path.name == "404.html":  # its links start at the root of a server
            continue
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file and file != "." else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if anchor and target.suffix == ".html":
                assert anchor in pages[target].ids, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        for source in Page(path.read_text()).loads:
            assert not re.match(r"(?:[a-z]+:)?//", source), f"{path.name} loads {source}"
            if path.name != "404.html":
                assert (path.parent / source.partition("?")[0]).exists(), f"{path.name}: {source}"


def test_files_of_other_directories_are_pages(site):
    for page, source in (("patches.html", "patches/README.md"), ("changelog.html", "CHANGELOG.md"), ("bench.html", "bench/README.md")):
        title = (ROOT / source).read_text().splitlines()[0].removeprefix("# ")
        assert title in "".join(Page((site / page).read_text()).text)
    assert (site / "example-tree.svg").exists()
    assert list((site / "pictures").glob("kernels-*.png"))


def test_no_markdown_is_left_over(site):
    """A table or a link that the converter did not take would be seen as text."""
    for path in site.glob("*.html"):
        text = path.read_text()
        article = text[text.index("<article") : text.index("</article>")]
        shown = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.S)
        shown = "".join(Page(shown).text)
        left = re.search(r"\]\(|^\| |```|<!--|\*\*", shown, re.M)
        assert not left, f"{path.name}: {shown[left.start() - 40 : left.end() + 40]!r}"
