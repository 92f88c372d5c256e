"""Which SGLang is meant: an installed package or a git checkout; found without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from .errors import BadTarget

_VERSION = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?["']([^"']+)["']""", re.M)


@dataclass(frozen=True)
class Target:
    root: Path  # the directory sglang/, with its __init__.py
    checkout: Optional[Path]  # top of the source tree, if it is one (root = checkout/python/sglang)

    @property
    def layout(self) -> str:
        return "package" if self.checkout is None else "checkout"


def installed_root() -> Path:
    """The sglang that `import sglang` of this Python would load."""
    spec = importlib.util.find_spec("sglang")
    # A bare directory named sglang is a namespace package: it has no origin.
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        raise BadTarget(
            f"SGLang is not installed for {sys.executable}: install it, or name a checkout or a package directory."
        )
    return Path(spec.origin).parent


def find_target(path: Union[str, Path, None] = None) -> Target:
    if path is None:
        return _target(installed_root())
    path = Path(path)
    if not path.is_dir():
        raise BadTarget(f"TARGET {path} is not a directory.")
    for candidate in (path / "python" / "sglang", path / "sglang", path):
        if candidate.name == "sglang" and (candidate / "__init__.py").is_file():
            return _target(candidate)
    if path.resolve() != path.absolute() and path.resolve().name == "sglang":
        return find_target(path.resolve())
    raise BadTarget(
        f"TARGET {path} is not SGLang: expected a checkout (holds python/sglang/__init__.py), "
        "a site-packages directory (holds sglang/__init__.py) or the sglang directory itself."
    )


def _target(root: Path) -> Target:
    root = root.resolve()
    top = root.parents[1] if root.parent.name == "python" else None
    if top and ((top / ".git").exists() or (top / "python" / "pyproject.toml").is_file()):
        return Target(root, top)
    return Target(root, None)


def find_version(target: Target) -> Optional[str]:
    """The SGLang version in the target, or None where nothing tells (a source archive)."""
    if target.checkout is not None:
        return _git_version(target.checkout) or _file_version(target.root)
    found = {
        d.version
        for d in importlib.metadata.distributions(path=[str(target.root.parent)])
        if (d.metadata["Name"] or "").lower() == "sglang"
    }
    if len(found) > 1:
        return " and ".join(sorted(found)) + " (several dist-info directories)"
    return found.pop() if found else _file_version(target.root)


def _git_version(checkout: Path) -> Optional[str]:
    """The nearest release tag, without its v: own commits on top of the tag do not matter."""
    if not (checkout / ".git").exists():
        return None
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()[1:] or None if done.returncode == 0 else None


def _file_version(root: Path) -> Optional[str]:
    for name in ("_version.py", "version.py"):
        try:
            match = _VERSION.search((root / name).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        # 0.0.0.dev0 is what SGLang's version.py falls back to when it knows nothing.
        if match and not match[1].startswith("0.0.0"):
            return match[1]
    return None


def same_version(found: str, wanted: str) -> bool:
    """Equal but for a local label (0.5.17+cu130): the files decide, and they are hashed."""
    return found.partition("+")[0] == wanted
