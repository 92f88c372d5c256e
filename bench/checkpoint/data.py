"""Collect the training text from the standard library of the Python that runs this; write it as one compressed file.

    python -m bench.checkpoint.data corpus.gz

Documents of three kinds, all taken from the installed sources:

- files as they are (Python, and the language reference that `help()` prints);
- questions about a function or class with its docstring as the answer, in the chat template of the checkpoint;
- "Continue:" and a passage as the question, what follows it as the answer, in the same template.

A file belongs to one of the splits by the hash of its path, with everything made from it, so held-out text was never seen.
The same Python gives the same bytes. Special tokens are stored as the bytes 0xFD to 0xFF, which no UTF-8 text contains.
Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import inspect
import json
import platform
import random
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Byte in the file -> token id of the checkpoint's tokenizer.
END_OF_TEXT, START, END = b"\xfd", b"\xfe", b"\xff"
SPECIAL_BYTES = {0xFD: 256, 0xFE: 257, 0xFF: 258}

# Not text to learn from: tests (and not installed everywhere), mapping tables, other people's bundles.
LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "_bundled", "ensurepip")
HELD_OUT_ONE_IN = 16
MAGIC = b"treewy corpus 1\n"


@dataclass
class Document:
    """data: bytes with the special bytes in it; chat: whether it is a question and its answer."""

    data: bytes
    chat: bool


def sources(root: Path) -> list[Path]:
    """Files of the standard library that are read, in a fixed order."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if any(part in LEFT_OUT for part in parts) or parts[0].startswith(("config-", "__phello__")):
            continue
        if parts[0] == "encodings" and not re.match(r"(__init__|aliases|idna|punycode|utf_|uu_|zlib_|base64_|hex_)", parts[-1]):
            continue  # generated tables
        if parts[-1].startswith("_sysconfigdata"):
            continue  # paths and compiler flags of one machine
        found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def chat(question: str, answer: str) -> bytes:
    """One exchange as the checkpoint's chat template writes it."""
    return (START + b"user\n" + question.encode() + END + b"\n" + START + b"assistant\n" + answer.encode() + END + b"\n")  # fmt: skip


def questions(module: str, text: str) -> list[tuple[str, str]]:
    """(question, answer) of every function and class with a docstring."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    out = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            name = f"{prefix}.{child.name}"
            doc = ast.get_docstring(child, clean=False)
            if doc and 20 <= len(doc) <= 1500:
                if isinstance(child, ast.ClassDef):
                    question = f"What is {name}?"
                else:
                    question = f"What does {name}({', '.join(a.arg for a in child.args.args if a.arg != 'self')}) do?"
                out.append((question, inspect.cleandoc(doc)))
            visit(child, name)

    visit(tree, module)
    return out


def passages(name: str, text: str) -> list[tuple[str, str]]:
    """(question, answer) pairs cut at line ends: about one every 5,000 characters."""
    draw = random.Random(name)  # a string seeds it the same way on every version
    lines = text.splitlines(keepends=True)
    starts, at = [], 0
    for line in lines:
        starts.append(at)
        at += len(line)
    out = []
    for _ in range(len(text) // 5000):
        first = draw.randrange(len(lines))
        wanted, more = draw.randint(120, 360), draw.randint(300, 700)
        middle = next((i for i in range(first, len(lines)) if starts[i] - starts[first] >= wanted), None)
        if middle is None or starts[middle] - starts[first] > 600:
            continue
        answer = text[starts[middle] : starts[middle] + more]
        answer = answer[: answer.rfind("\n") + 1].rstrip()
        question = text[starts[first] : starts[middle]].strip("\n")
        if len(answer) >= 100 and question.strip():
            out.append((f"Continue:\n{question}", answer))
    return out


def collect(root: Path) -> dict[str, list[Document]]:
    """Documents of both splits, "train" and "held_out", in a fixed order that mixes the kinds."""
    splits: dict[str, list[Document]] = {"train": [], "held_out": []}
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue
        split = splits["held_out" if held_out(name) else "train"]
        split.append(Document(text.encode() + END_OF_TEXT, chat=False))
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for question, answer in questions(module, text) + passages(name, text):
            split.append(Document(chat(question, answer), chat=True))
    for name, documents in splits.items():
        random.Random(name).shuffle(documents)
    return splits


def write(path: Path, root: Path | None = None) -> dict:
    """Write the corpus and return its manifest (also the first line of the file's content)."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    splits = collect(root)
    data = {name: b"".join(d.data for d in documents) for name, documents in splits.items()}
    chats = {}
    for name, documents in splits.items():
        at, starts = 0, []
        for document in documents:
            if document.chat:
                starts.append(at)
            at += len(document.data)
        chats[name] = starts
    manifest = {
        "source": f"standard library of {platform.python_implementation()} {platform.python_version()}",
        "licence": "PSF-2.0",
        "files": len(sources(root)),
        "bytes": {name: len(value) for name, value in data.items()},
        "sha256": {name: hashlib.sha256(value).hexdigest() for name, value in data.items()},
    }
    head = json.dumps({**manifest, "chats": chats}, sort_keys=True).encode() + b"\n"
    content = MAGIC + head + data["train"] + data["held_out"]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0))
    return {**manifest, "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


@dataclass
class Corpus:
    """What :func:`write` wrote. train, held_out: bytes; chats: offsets of the question-and-answer documents in each."""

    manifest: dict
    train: bytes
    held_out: bytes
    chats: dict[str, list[int]]


def read(path: Path) -> Corpus:
    """Read a corpus and check it against its hashes. Raises ValueError if it is not one, or damaged."""
    content = gzip.decompress(Path(path).read_bytes())
    if not content.startswith(MAGIC):
        raise ValueError(f"{path} is not a corpus written by bench.checkpoint.data")
    end = content.index(b"\n", len(MAGIC)) + 1
    manifest = json.loads(content[len(MAGIC) : end])
    chats = manifest.pop("chats")
    middle = end + manifest["bytes"]["train"]
    parts = {"train": content[end:middle], "held_out": content[middle:]}
    for name, part in parts.items():
        if hashlib.sha256(part).hexdigest() != manifest["sha256"][name]:
            raise ValueError(f"{path}: the {name} text does not have the hash that the file names")
    return Corpus(manifest, parts["train"], parts["held_out"], chats)


def held_out_questions(corpus: Corpus) -> list[bytes]:
    """The questions of the held-out split up to where the answer begins, special bytes included."""
    data, out = corpus.held_out, []
    mark = START + b"assistant\n"
    for start in corpus.chats["held_out"]:
        out.append(data[start : data.index(mark, start) + len(mark)])
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Collect the training text of the demo checkpoint.")
    parser.add_argument("output", help="file to write, for example corpus.gz")
    parser.add_argument("--stdlib", help="another directory than this Python's standard library")
    args = parser.parse_args(argv)
    print(json.dumps(write(Path(args.output), args.stdlib), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
