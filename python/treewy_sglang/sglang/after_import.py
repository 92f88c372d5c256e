"""Change a module right after it has run, before anyone imports from it. Standard library only."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Callable, Mapping

Changes = Mapping[str, Callable[[ModuleType], None]]


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, change: Callable[[ModuleType], None]):
        self.inner, self.change = inner, change

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        self.change(module)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes):
        self.changes = changes

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self.changes[fullname])
        return spec


def install(changes: Changes) -> None:
    """From now on, each of the named modules is passed to its function once it has run; one that was imported earlier is
    passed at once. Idempotent for one and the same mapping."""
    if any(isinstance(finder, Finder) and finder.changes is changes for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder(changes))
    for fullname, change in changes.items():
        if fullname in sys.modules:
            change(sys.modules[fullname])
