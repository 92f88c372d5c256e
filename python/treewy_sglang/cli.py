"""The `treewy` command. Each subcommand registers itself; none imports torch, SGLang or CUDA until it runs."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Optional, Sequence

# Modules with `register(subparsers)`, which adds a parser whose default `run` takes the parsed options and returns
# the exit code.
COMMANDS = (
    "treewy_sglang.patching.command",
    "treewy_sglang.doctor",
    "treewy_sglang.planner.command",
    "treewy_sglang.demo.command",
)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the server's after --."""
    split = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:split]), list(argv[split + 1 :])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treewy", description="TreeWY for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        import_module(module).register(commands)
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    arguments, rest = split_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    options = parser.parse_args(arguments)
    if rest and not hasattr(options, "server_arguments"):
        parser.error(f"treewy {options.command} hands nothing on to a server: {' '.join(rest)}")
    options.server_arguments = rest
    return options.run(options)
