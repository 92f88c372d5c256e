"""What can go wrong, one class per exit code of `treewy patch`."""

from __future__ import annotations


class PatchError(Exception):
    """Base: the message is a whole sentence meant for the user."""

    exit_code = 1


class Refused(PatchError):
    """The target is not in a state that allows the operation; nothing was written."""

    exit_code = 1


class NotPatched(Refused):
    """verify_installed(): this SGLang is not the one that the package's series makes."""


class BadTarget(PatchError):
    """TARGET is not an SGLang checkout or package directory."""

    exit_code = 2


class CannotWrite(PatchError):
    """The operating system refused (permission, read-only, disk full); nothing was changed."""

    exit_code = 3


class BadSeries(PatchError):
    """The package's own patches are damaged or do not fit together."""

    exit_code = 4


class Interrupted(PatchError):
    """An operation failed half-way and could not be undone at once; `revert` finishes the job."""

    exit_code = 5
