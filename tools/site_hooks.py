"""Hooks of mkdocs: pages from files outside docs/, and links that hold both on the site and in the tree.

A link of any page may lead to a file of the repository, written relative to the page's own file. If that file is a page
or a picture, the link goes there on the site; any other file is shown by its path, since the site does not carry it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Page of the site: file of the repository.
OUTSIDE = {
    "docker.md": "docker/README.md",
    "patches.md": "patches/README.md",
    "bench.md": "bench/README.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def source_of(page: str) -> str:
    """The repository's file behind a page or picture of the site."""
    return OUTSIDE.get(page, f"docs/{page}")


def target(source: str, link: str) -> str:
    """A relative link in `source`, as a path in the repository."""
    return os.path.normpath(PurePosixPath(source).parent / link)


def pages() -> dict[str, str]:
    """{file of the repository: place on the site} of all pages and of what they show from outside docs/."""
    found = {f"docs/{p.relative_to(ROOT / 'docs')}": str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*") if p.is_file()}
    found |= {file: page for page, file in OUTSIDE.items() if (ROOT / file).is_file()}
    for source in [s for s in found if s.endswith(".md")]:
        for picture, _, link, _ in LINK.findall((ROOT / source).read_text()):
            if picture and ":" not in link and target(source, link) not in found:
                found[target(source, link)] = f"pictures/{PurePosixPath(link).name}"
    return found


def on_files(files, config):
    for source, place in pages().items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    source, places = source_of(page.file.src_uri), pages()
    here = PurePosixPath(page.file.src_uri).parent

    def rewrite(found):
        picture, text, link, anchor = found.groups()
        if ":" in link:
            return found[0]
        file = target(source, link)
        if file in places:
            return f"{picture}[{text}]({os.path.relpath(places[file], here)}{anchor or ''})"
        if not (ROOT / file).exists():
            return found[0]  # mkdocs --strict complains
        return f"`{file}`" if text.strip("`/") in (file, PurePosixPath(file).name, link) else f"{text} (`{file}`)"

    # Fenced blocks are left alone.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in parts)
