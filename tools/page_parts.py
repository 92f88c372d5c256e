"""Parts of a documentation page that a program makes, each between `<!-- KIND: NAME -->` and `<!-- KIND: end -->`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Callable, Mapping

ROOT = Path(__file__).resolve().parent.parent


def filled(text: str, page: Path, kind: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """`text`, the content of `page`, with every part made anew. Exits where a part is missing or there twice."""
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- {kind}: {name} -->\n).*?(<!-- {kind}: end -->)", re.S)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"{page.name} must have one part '{kind}: {name}'")
        text = pattern.sub(lambda found: f"{found[1]}\n{make()}\n\n{found[2]}", text)
    return text


def main(doc: str, made: Callable[[], Mapping[Path, str]]) -> int:
    """Compare files with what `made` returns for them, or with --write, write them. The exit status: 1 where they differ."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write what differs")
    write = parser.parse_args().write
    wrong = []
    for file, text in made().items():
        if file.exists() and file.read_text() == text:
            continue
        wrong.append(str(file.relative_to(ROOT)))
        if write:
            file.write_text(text)
    if wrong:
        print(("written: " if write else "not up to date: ") + ", ".join(wrong))
    return 1 if wrong and not write else 0
