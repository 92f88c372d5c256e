"""The `treewy patch` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

from . import engine, exporting
from .errors import PatchError
from .series import Series, Upstream, locate
from .state import Status, inspect
from .target import find_target

_EPILOG = """\
TARGET is a git checkout of the pinned tag, a site-packages directory, or the sglang directory itself;
without it, the SGLang that this Python would import (it is not imported).

exit codes:
  0  done, or nothing to do (check: applied and intact, or apply would succeed; status: always, if it could look)
  1  refused: wrong version, changed file, half patched, ...; nothing was written
  2  wrong usage, or TARGET is not SGLang
  3  the system refused to write (permission, read-only, disk full); nothing was changed
  4  the package's own patches are damaged
  5  stopped half-way and could not put the files back: run `treewy patch revert`
"""


def treewy_version() -> str:
    package = sys.modules.get(__name__.partition(".")[0])
    version = getattr(package, "__version__", None)
    if version:
        return str(version)
    try:
        return importlib.metadata.version("treewy-sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "patch",
        help="apply, check or revert the patches that SGLang needs",
        description="Patch a pinned SGLang release for TreeWY: all files or none, and back to the last byte.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, help: str, argument: str = "target", required: bool = False) -> argparse.ArgumentParser:
        description = help[0].upper() + help[1:] + "."
        sub = actions.add_parser(name, help=help, description=description, epilog=_EPILOG, formatter_class=raw)
        sub.add_argument(argument, metavar=argument.upper(), type=Path, nargs=None if required else "?")
        sub.add_argument("--patches", type=Path, metavar="DIR", help="another series than the package's own")
        sub.set_defaults(run=run)
        return sub

    add("apply", "patch TARGET; harmless if it is patched already")
    add("check", "say whether TARGET is patched and intact, or would be patched cleanly")
    add("status", "say in which state TARGET is, file by file").add_argument(
        "--json", action="store_true", help="for programs"
    )
    add("revert", "restore every byte of TARGET as it was before").add_argument(
        "--force", action="store_true", help="also discard changes made by hand after patching"
    )
    add("export", "for developers: write patches/ from the commits over the tag", "checkout", True).add_argument(
        "--output", type=Path, metavar="DIR", help="where to (default: the source tree's patches/)"
    )
    add("import", "for developers: the series as commits on the tag (git am)", "checkout", True)


def run(options: argparse.Namespace) -> int:
    try:
        return _run(options)
    except PatchError as error:
        print(f"treewy patch {options.action}: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    if options.action == "export":
        output = options.output or options.patches or locate()
        header = next(d for d in (output, options.patches, None) if d is None or (d / "UPSTREAM").is_file()) or locate()
        upstream = Upstream.parse((header / "UPSTREAM").read_text(encoding="utf-8"), str(header / "UPSTREAM"))
        print(exporting.export(options.checkout, output, upstream))
        return 0
    directory = options.patches or locate()
    series = Series.load(directory)
    if options.action == "import":
        print(exporting.import_series(options.checkout, series, directory))
        return 0
    target = find_target(options.target)
    if options.action == "apply":
        print(engine.apply(target, series, treewy_version()))
    elif options.action == "revert":
        print(engine.revert(target, series, options.force))
    elif options.action == "check":
        status = engine.check(target, series)
        print(status.detail)
    else:
        status = inspect(target, series)
        print(json.dumps(status.to_json(), indent=1) if options.json else _text(status))
    return 0


def _text(status: Status) -> str:
    rows = [
        ("state", status.state),
        ("sglang", f"{status.root} ({status.layout}, version {status.version or 'unknown'})"),
        ("pin", f"{status.pin_tag} (version {status.pin_version})"),
        ("series", status.series[:16]),
    ]
    if status.stamp:
        rows.append(("stamp", f"{str(status.stamp.get('series'))[:16]} by treewy {status.stamp.get('treewy')}"))
    lines = [f"{name + ':':<9}{value}" for name, value in rows]
    lines += [f"  {f.state:<9}{f.path}" for f in status.files]
    return "\n".join([*lines, status.detail, *status.notes])
