"""Patches over a pinned SGLang release: apply, check, revert, and the check at server start.

Standard library only; imports neither torch nor SGLang nor anything else of the package.
"""

from .engine import apply, check, revert, verify_installed
from .errors import BadSeries, BadTarget, CannotWrite, Interrupted, NotPatched, PatchError, Refused
from .series import Series, locate
from .state import Status, inspect
from .target import Target, find_target, installed_root

__all__ = [
    "BadSeries",
    "BadTarget",
    "CannotWrite",
    "Interrupted",
    "NotPatched",
    "PatchError",
    "Refused",
    "Series",
    "Status",
    "Target",
    "apply",
    "check",
    "find_target",
    "inspect",
    "installed_root",
    "locate",
    "revert",
    "verify_installed",
]
