"""`make demo` and `make serve`."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from treewy_sglang.demo.prompts import SHOWN
from treewy_sglang.demo.server import CHAIN3, NGRAM16, PLAIN, TREE16, Mode, Server, ServerFailed

MODES = {"plain": PLAIN, "chain": CHAIN3, "tree": TREE16, "ngram": NGRAM16}


def say(text: str) -> None:
    print(f"[treewy] {text}", flush=True)


def best_device() -> tuple[str, str]:
    """cuda or cpu, and why."""
    import torch

    import treewy_sglang

    if not torch.cuda.is_available():
        return "cpu", "no GPU is visible to torch"
    if not treewy_sglang.build_info().get("cuda"):
        return "cpu", "the operators were built without CUDA (no nvcc was found)"
    return "cuda", torch.cuda.get_device_name()


@dataclass
class Result:
    mode: Mode
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    accepted: float | None = None
    snapshot_bytes: int | None = None
    stash_bytes: int | None = None
    errors: dict = field(default_factory=dict)


def chat(client, prompt: str, new_tokens: int, live: bool = False) -> tuple[str, int]:
    """One streamed answer through the OpenAI-compatible API: its text, its number of tokens."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        temperature=0.0,
        max_tokens=new_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, tokens = "", 0
    for event in stream:
        if event.usage is not None:
            tokens = event.usage.completion_tokens
        if event.choices and (piece := event.choices[0].delta.content):
            text += piece
            if live:
                print(piece.replace("\n", "\n    "), end="", flush=True)
    return text, tokens


def ask(server: Server, prompts: list[str], new_tokens: int) -> Result:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)
    result = Result(server.mode)
    say(f"  asking {prompts[0]!r}; the answer as it comes:")
    print("    ", end="")
    first, _ = chat(client, prompts[0], new_tokens, live=True)
    print()
    say(f"  asking {len(prompts)} prompts at once, {new_tokens} tokens each ...")
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: chat(client, prompt, new_tokens), prompts))
    result.seconds = time.monotonic() - started
    result.texts = [text for text, _ in answers] + [first]
    result.tokens = sum(tokens for _, tokens in answers)
    say(f"  {result.tokens} tokens in {result.seconds:.1f} s")
    state = server.state()
    result.accepted = state.get("avg_spec_accept_length")
    if server.mode.speculative:
        facts = state.get("treewy")
        if not facts:
            raise ServerFailed("the server does not report that TreeWY runs; /server_info has no entry 'treewy'")
        result.snapshot_bytes = facts["snapshot_bytes_per_request"]
        result.stash_bytes = facts["stash_bytes_per_request"]
        result.errors = facts["errors"]
    return result


def size(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 2**20:.2f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"


def table(results: list[Result]) -> str:
    plain = results[0]
    rows = [("drafts", "same text", "accepted length", "snapshots/request", "TreeWY/request", "tokens/s")]
    for r in results:
        same = sum(a == b for a, b in zip(r.texts, plain.texts, strict=True))
        rows.append((
            r.mode.name,
            "(reference)" if r is plain else f"{'yes' if same == len(r.texts) else 'NO'} ({same}/{len(r.texts)})",
            "-" if r.accepted is None else f"{r.accepted:.2f}",
            size(r.snapshot_bytes),
            size(r.stash_bytes),
            f"{r.tokens / r.seconds:.1f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def prepare(args: argparse.Namespace) -> tuple[Path, str]:
    from treewy_sglang.demo.checkpoint import make_checkpoint

    started = time.monotonic()
    work = Path(args.work)
    if args.model:
        model = Path(args.model)
        say(f"checkpoint: {model}")
    else:
        say("checkpoint: a small seeded Qwen3-Next (random layers, fitted head) ...")
        model = make_checkpoint(work / "checkpoint", seed=args.seed)
        say(f"  {model}, ready after {time.monotonic() - started:.0f} s")
    device, reason = best_device()
    if args.device != "auto":
        device, reason = args.device, "asked for"
    say(f"device: {device} ({reason})")
    return model, device


def start(args: argparse.Namespace, model: Path, device: str, mode: Mode, **more) -> Server:
    work = Path(args.work)
    log = work / "logs" / f"{mode.name.replace(',', '').replace(' ', '-')}.log"
    return Server(
        model, mode, log, device=device, dtype=args.dtype, quick_start=not args.model,
        on_wait=lambda text: say(f"  starting, {text}"), arguments=args.server_arguments, **more,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    model, device = prepare(args)
    results = []
    for number, name in enumerate(args.modes, 1):
        mode = MODES[name]
        say(f"server {number}/{len(args.modes)}: {mode.name}")
        started = time.monotonic()
        try:
            with start(args, model, device, mode) as server:
                say(f"  answers after {time.monotonic() - started:.0f} s (log: {server.log})")
                results.append(ask(server, list(SHOWN), args.tokens))
        except ServerFailed as failure:
            say(f"FAILED: {mode.name}: {failure}")
            return 1
    print(f"\n{table(results)}\n")
    print("same text: greedy answers compared byte for byte with those without drafts. State bytes: what the drafts of one\n"
          "running request take, with one state copy per node (snapshots) and as this server allocated it (TreeWY).")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps([{**vars(r), "mode": r.mode.name} for r in results], indent=1))
    wrong = [r.mode.name for r in results if r.texts != results[0].texts]
    wrong += [f"{r.mode.name}: operator errors {r.errors}" for r in results if any(r.errors.values())]
    wrong += [f"{r.mode.name}: no draft was ever accepted" for r in results if r.mode.speculative and not (r.accepted or 0) > 1]
    if wrong:
        say("FAILED: " + "; ".join(wrong))
        return 1
    say("every answer is the same with and without drafts.")
    return 0


def serve(args: argparse.Namespace) -> int:
    model, device = prepare(args)
    mode = MODES[args.mode]
    say(f"server: {mode.name}, port {args.port}")
    server = start(args, model, device, mode, host=args.host, port=args.port)
    try:
        server.start()
    except ServerFailed as failure:
        say(f"FAILED: {failure}")
        return 1
    print(f"""
The server answers at {server.url} (log: {server.log}). Try, in another terminal:

  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "default", "stream": true, "max_tokens": 128, "temperature": 0,
    "messages": [{{"role": "user", "content": "What is a draft?"}}]}}'

Ctrl-C stops it.""", flush=True)  # fmt: skip
    try:
        code = server.process.wait()
        say(f"the server ended with exit code {code}; {server.log_end()}")
        return 1
    except KeyboardInterrupt:
        say("stopping ...")
        return 0
    finally:
        server.stop()


def main(argv: list[str] | None = None) -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--work", default=".demo", help="directory of checkpoint and logs (default: .demo)")
    common.add_argument("--model", help="another Qwen3-Next checkpoint than the small seeded one")
    common.add_argument("--seed", type=int, default=0, help="of the small checkpoint")
    common.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    common.add_argument("--dtype", default="float32", help="float32 (default) makes greedy answers comparable byte for byte")
    parser = argparse.ArgumentParser(prog="python -m treewy_sglang.demo", description="TreeWY on a small model.",
                                     epilog="what follows -- goes to the server as it is")  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("run", parents=[common], help="answer prompts with and without drafts, and compare")
    demo.add_argument("--tokens", type=int, default=128, help="new tokens per answer")
    demo.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="the first one is the reference")
    demo.add_argument("--json", help="also write the results there")
    demo.set_defaults(function=run)
    server = commands.add_parser("serve", parents=[common], help="leave a server running")
    server.add_argument("--mode", choices=list(MODES), default="tree")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=30000)
    server.set_defaults(function=serve)
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.server_arguments = argv[split + 1 :]
    return args.function(args)
