"""The `treewy plan` command."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from .capacity import ALGORITHMS, DEVICES, KV_DTYPES, MAX_NODES, STRATEGIES, Draft, Server, plan
from .errors import PlanError
from .models import BUILT_IN, BYTES, STATE_DTYPES, load, size

_EPILOG = f"""\
models: {", ".join(f"{name} ({size(name)})" for name in BUILT_IN)};
any case, or the path of a config.json or of the directory that holds it.

A draft of N nodes is the root (the newest token) and N - 1 drafts: --nodes 4 is a chain of 3 drafts. Without --topk
drafts are chains. Nothing but the standard library is needed, except for --png.

exit codes: 0 planned (also when nothing fits: the plan says so), 2 an argument or a config that cannot be planned
"""


def numbers(text: str) -> list[int]:
    """2,2,2 or [2,2,2]."""
    if not re.fullmatch(r"\[?\s*\d+(\s*[, x]\s*\d+)*\s*\]?", text):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: the branches of every level, as 2,2,2")
    return [int(n) for n in re.findall(r"\d+", text)]


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="what a draft costs in memory, and how many requests fit",
        description="Bytes per request and running requests with snapshots, with ReplaySSM and with TreeWY.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    d = Server()
    parser.add_argument(
        "--model", required=True, metavar="NAME|PATH", help="a built-in model, a config.json or its directory"
    )

    draft = parser.add_argument_group("draft", "one of --nodes, --tree, --steps")
    draft.add_argument(
        "--nodes", type=int, metavar="N", help=f"nodes with the root, 1 to {MAX_NODES} (--speculative-num-draft-tokens)"
    )
    draft.add_argument(
        "--tree", type=numbers, metavar="B,B,..", help="branches of every level below the root: 2,2,2 is 14 drafts"
    )
    draft.add_argument("--steps", type=int, metavar="N", help="--speculative-num-steps")
    draft.add_argument("--topk", type=int, metavar="N", help="--speculative-eagle-topk (default: 1, a chain)")
    draft.add_argument(
        "--algorithm", default=d.algorithm, metavar="A", help=f"{' or '.join(ALGORITHMS)} (default: {d.algorithm})"
    )

    memory = parser.add_argument_group("memory of one GPU")
    memory.add_argument(
        "--gpu-memory",
        type=float,
        default=d.gpu_memory,
        metavar="GIB",
        help="free before weights are loaded; SGLang logs it as avail mem (default: %(default)s)",
    )
    memory.add_argument(
        "--mem-fraction",
        "--mem-fraction-static",
        dest="mem_fraction",
        type=float,
        default=d.mem_fraction,
        metavar="F",
        help="share for weights, states and KV cache (default: %(default)s)",
    )
    memory.add_argument(
        "--tp", type=int, metavar="N", help="tensor parallelism (default: the fewest GPUs that hold the weights)"
    )
    memory.add_argument(
        "--weights-dtype",
        default=d.weights_dtype,
        metavar="D",
        help=f"auto or one of {', '.join(BYTES)} (default: as the model)",
    )
    memory.add_argument(
        "--weights-gib", type=float, metavar="GIB", help="weights on each GPU, as measured, instead of the estimate"
    )

    types = parser.add_argument_group("dtypes")
    types.add_argument(
        "--dtype", default=d.dtype, metavar="D", help=f"of activations: auto (the model's), {', '.join(STATE_DTYPES)}"
    )
    types.add_argument(
        "--state-dtype",
        "--mamba-ssm-dtype",
        dest="state_dtype",
        default=d.state_dtype,
        metavar="D",
        help="of recurrent states: auto (the model's, else float32), or as for --dtype",
    )
    types.add_argument(
        "--kv-dtype",
        "--kv-cache-dtype",
        dest="kv_dtype",
        default=d.kv_dtype,
        metavar="D",
        help=f"one of {', '.join(KV_DTYPES)}",
    )

    load_ = parser.add_argument_group("load")
    load_.add_argument(
        "--context-length",
        type=int,
        default=d.context_length,
        metavar="N",
        help="tokens that a request holds, and what the server is started with (default: %(default)s)",
    )
    load_.add_argument(
        "--requests",
        "--max-running-requests",
        dest="requests",
        type=int,
        default=d.requests,
        metavar="N",
        help="running requests wanted (default: %(default)s, as SGLang's with drafts)",
    )

    pools = parser.add_argument_group("SGLang's pools")
    pools.add_argument(
        "--mamba-radix-cache-strategy",
        dest="strategy",
        default=d.strategy,
        metavar="S",
        help=f"one of {', '.join(STRATEGIES)} (default: {d.strategy})",
    )
    pools.add_argument(
        "--mamba-full-memory-ratio",
        type=float,
        default=d.mamba_full_memory_ratio,
        metavar="R",
        help="states to KV cache; with TreeWY, another than the default fixes the split (default: %(default)s)",
    )
    pools.add_argument("--max-mamba-cache-size", type=int, metavar="N", help="state slots, instead of that ratio")
    pools.add_argument("--disable-radix-cache", action="store_true", help="as SGLang's")
    pools.add_argument("--disable-overlap-schedule", action="store_true", help="as SGLang's")
    pools.add_argument("--device", default=d.device, metavar="D", help=f"{' or '.join(DEVICES)} (default: {d.device})")

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="for programs: bytes, not rounded")
    output.add_argument(
        "--png", type=Path, metavar="FILE", help="a picture over all draft sizes as well (needs matplotlib)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from . import report

    try:
        p = plan(
            load(options.model),
            Draft.make(nodes=options.nodes, tree=options.tree, steps=options.steps, topk=options.topk),
            Server(**{field: getattr(options, field) for field in Server.__dataclass_fields__}),
        )
        if options.png is not None:
            report.picture(p, options.png)
    except PlanError as error:
        print(f"treewy plan: {error}", file=sys.stderr)
        return 2
    d = report.as_dict(p)
    print(json.dumps(d, indent=1) if options.json else report.table(d))
    return 0
