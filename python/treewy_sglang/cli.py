"""The `treewy` command. Each subcommand registers itself; none imports torch, SGLang or CUDA until it runs."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Optional, Sequence

# Modules with `register(subparsers)`, which adds a parser whose default `run` takes the parsed options and returns
# the exit code.
COMMANDS = ("treewy_sglang.patching.command", "treewy_sglang.planner.command")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treewy", description="TreeWY for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        import_module(module).register(commands)
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = build_parser().parse_args(arguments)
    return options.run(options)
