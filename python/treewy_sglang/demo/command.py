"""`treewy demo` and `treewy serve`; `make demo` and `make serve` in a checkout."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from treewy_sglang.cli import split_arguments
from treewy_sglang.demo.prompts import SHOWN
from treewy_sglang.demo.server import CHAIN3, NGRAM16, PLAIN, TREE16, Mode, Server, ServerFailed

END_OF_ANSWER = "<|im_end|>"
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


# How much likelier than the second the chosen token may be where two runs in this dtype still differ by rounding alone: one
# step of each of the two logits, which are below 32 in magnitude here. In float32 nothing is excused.
NEAR_TIE = {"float32": 0.0, "float16": 2 * 32 * 2**-11, "bfloat16": 2 * 32 * 2**-8}


@dataclass
class Answer:
    """text: what came; pieces: its tokens; margins: log(p of the token / p of the next best) of each, if asked for."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    tokens: int = 0

    def margin_where_it_leaves(self, other: "Answer") -> float | None:
        """This answer's margin at the first token that is not `other`'s; None where they are equal."""
        if self.text == other.text:
            return None
        for i, (a, b) in enumerate(zip(self.pieces, other.pieces)):
            if a != b:
                return self.margins[i]
        return float("inf")  # no margins were asked for, or one is a prefix of the other: no tie explains that


@dataclass
class Result:
    mode: Mode
    answers: list[Answer] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    accepted: float | None = None
    snapshot_bytes: int | None = None
    stash_bytes: int | None = None
    errors: dict = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [a.text for a in self.answers]

    def compare(self, plain: "Result", dtype: str) -> tuple[int, int, int]:
        """How many answers are the reference's; leave it at a near tie of the dtype; are wrong."""
        margins = [p.margin_where_it_leaves(a) for a, p in zip(self.answers, plain.answers, strict=True)]
        same = margins.count(None)
        near = sum(m is not None and m <= NEAR_TIE[dtype] for m in margins)
        return same, near, len(margins) - same - near


def chat(client, prompt: str, new_tokens: int, live: bool = False, margins: bool = False, ends: bool = False) -> Answer:
    """One streamed answer through the OpenAI-compatible API, always `new_tokens` long so that runs can be compared. `ends`: the
    model ends its answers by itself; what it writes after that is not shown."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        temperature=0.0,
        max_tokens=new_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, **({"skip_special_tokens": False} if ends else {})},
        **(dict(logprobs=True, top_logprobs=2) if margins else {}),
    )
    answer = Answer()
    for event in stream:
        if event.usage is not None:
            answer.tokens = event.usage.completion_tokens
        if not event.choices:
            continue
        choice = event.choices[0]
        if piece := choice.delta.content:
            shown = ends and END_OF_ANSWER in answer.text
            answer.text += piece
            if live and not shown:
                print((piece.partition(END_OF_ANSWER)[0] if ends else piece).replace("\n", "\n    "), end="", flush=True)
        if margins and choice.logprobs is not None:
            for token in choice.logprobs.content or []:
                first, second = sorted((top.logprob for top in token.top_logprobs), reverse=True)
                answer.pieces.append(token.token)
                answer.margins.append(first - second)
    return answer


def ask(server: Server, prompts: list[str], new_tokens: int, ends: bool = False) -> Result:
    import functools

    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)
    result = Result(server.mode)
    say(f"  asking {prompts[0]!r}; the answer as it comes:")
    print("    ", end="")
    margins = server.dtype != "float32"
    one = functools.partial(chat, client, new_tokens=new_tokens, margins=margins, ends=ends)
    first = one(prompts[0], live=True)
    print()
    say(f"  asking {len(prompts)} prompts at once, {new_tokens} tokens each ...")
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(one, prompts))
    result.seconds = time.monotonic() - started
    result.answers = [*answers, first]
    result.tokens = sum(a.tokens for a in answers)
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


def verdict(same: int, near: int, wrong: int) -> str:
    count = f"({same}/{same + near + wrong})"
    if wrong:
        return f"NO {count}"
    return f"near ties {count}" if near else f"yes {count}"


def table(results: list[Result], dtype: str) -> str:
    plain = results[0]
    rows = [("drafts", "same text", "accepted length", "snapshots/request", "TreeWY/request", "tokens/s")]
    for r in results:
        rows.append((
            r.mode.name,
            "(reference)" if r is plain else verdict(*r.compare(plain, dtype)),
            "-" if r.accepted is None else f"{r.accepted:.2f}",
            size(r.snapshot_bytes),
            size(r.stash_bytes),
            f"{r.tokens / r.seconds:.1f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def describe(model: Path) -> None:
    """What the trained checkpoint's own card says."""
    card = json.loads((model / "card.json").read_text())
    say(f"checkpoint: a trained Qwen3-Next of {card['parameters'] / 1e6:.1f} million parameters, byte level ({model})")
    say(f"  trained on: {card['text']['source']}; asked: held-out questions about it")
    measured = card["accepted_length"]
    for kind, words in (("text", "continuations of held-out files"), ("questions", "answers to held-out questions")):
        lengths = ", ".join(f"{name} {value['accepted_length']:.2f}" for name, value in measured[kind].items() if isinstance(value, dict))
        say(f"  accepted length without a server, {words}: {lengths} ({measured['device']})")


def prepare(args: argparse.Namespace) -> tuple[Path, str]:
    from treewy_sglang.demo.checkpoint import make_checkpoint, trained_checkpoint

    started = time.monotonic()
    work = Path(args.work)
    trained = trained_checkpoint()
    if args.checkpoint == "trained" and trained is None:
        raise SystemExit("this copy of the package holds no trained checkpoint; bench/checkpoint/README.md says how it is made")
    args.prompts, args.ends = list(SHOWN), False
    if args.model:
        model = Path(args.model)
        say(f"checkpoint: {model}")
    elif trained is not None and args.checkpoint != "seeded":
        model = trained
        describe(model)
        args.prompts, args.ends = json.loads((model / "held_out.json").read_text())["prompts"], True
    else:
        say("checkpoint: a small seeded Qwen3-Next (random layers, fitted head) ...")
        model = make_checkpoint(work / "checkpoint", seed=args.seed)
        say(f"  {model}, ready after {time.monotonic() - started:.0f} s")
    device, reason = best_device()
    if args.device != "auto":
        device, reason = args.device, "asked for"
    # SGLang's CUDA kernels for hybrids take no float32 activations.
    args.dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    say(f"device: {device} ({reason}), {args.dtype}")
    return model, device


def start(args: argparse.Namespace, model: Path, device: str, mode: Mode, **more) -> Server:
    work = Path(args.work)
    log = work / "logs" / f"{mode.name.replace(',', '').replace(' ', '-')}.log"
    return Server(
        model, mode, log, device=device, dtype=args.dtype, quick_start=not args.model,
        on_wait=lambda text: say(f"  starting, {text}"), arguments=args.server_arguments, **more,
    )  # fmt: skip


def stop_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server, a session of its own, is stopped too


def default_modes() -> list[str]:
    """All, but for the NGRAM corpus where there is nothing to compile it with: SGLang compiles it at start."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]):
        return list(MODES)
    say(f"no C++ compiler ({compiler}) was found: NGRAM drafts, which SGLang compiles a part of at start, are left out")
    return [name for name in MODES if name != "ngram"]


def run(args: argparse.Namespace) -> int:
    stop_on_sigterm()
    args.modes = args.modes or default_modes()
    model, device = prepare(args)
    results = []
    for number, name in enumerate(args.modes, 1):
        mode = MODES[name]
        say(f"server {number}/{len(args.modes)}: {mode.name}")
        started = time.monotonic()
        try:
            with start(args, model, device, mode) as server:
                say(f"  answers after {time.monotonic() - started:.0f} s (log: {server.log})")
                results.append(ask(server, args.prompts, args.tokens, args.ends))
        except ServerFailed as failure:
            say(f"FAILED: {mode.name}: {failure}")
            return 1
    print(f"\n{table(results, args.dtype)}\n")
    print("same text: greedy answers compared byte for byte with those without drafts. State bytes: what the drafts of one\n"
          "running request take, with one state copy per node (snapshots) and as this server allocated it (TreeWY).")  # fmt: skip
    if args.dtype != "float32":
        print(f"near ties: the reference chose the first token that differs by a margin of at most {NEAR_TIE[args.dtype]:.3g},\n"
              f"which rounding to {args.dtype} can turn around.")  # fmt: skip
    if args.json:
        rows = [{**vars(r), "answers": len(r.answers), "texts": r.texts, "mode": r.mode.name} for r in results]
        Path(args.json).write_text(json.dumps(rows, indent=1))
    outcomes = [r.compare(results[0], args.dtype) for r in results]
    wrong = [r.mode.name for r, (_, _, wrong) in zip(results, outcomes) if wrong]
    wrong += [f"{r.mode.name}: operator errors {r.errors}" for r in results if any(r.errors.values())]
    wrong += [f"{r.mode.name}: no draft was ever accepted" for r in results if r.mode.speculative and not (r.accepted or 0) > 1]
    if wrong:
        say("FAILED: " + "; ".join(wrong))
        return 1
    near = sum(near for _, near, _ in outcomes)
    say("every answer is the same with and without drafts" + (f", but for {near} near ties." if near else "."))
    return 0


def serve(args: argparse.Namespace) -> int:
    stop_on_sigterm()
    model, device = prepare(args)
    mode = MODES[args.mode]
    say(f"server: {mode.name}, port {args.port}")
    server = start(args, model, device, mode, host=args.host, port=args.port)
    try:
        server.start()
    except ServerFailed as failure:
        say(f"FAILED: {failure}")
        return 1
    question = json.dumps(args.prompts[0]).replace("'", "\\u0027")  # it stands between single quotes
    print(f"""
The server answers at {server.url} (log: {server.log}). Try, in another terminal:

  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "default", "stream": true, "max_tokens": 128, "temperature": 0,
    "messages": [{{"role": "user", "content": {question}}}]}}'

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


def options_of_run(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per answer")
    parser.add_argument("--modes", nargs="+", choices=list(MODES),
                        help="the first one is the reference; default: all that this machine can run")
    parser.add_argument("--json", help="also write the results there")
    parser.set_defaults(run=run)


def options_of_serve(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument("--mode", choices=list(MODES), default="tree")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.set_defaults(run=serve)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "what follows -- goes to the server as it is"
    parser.add_argument("--work", default=".demo", help="directory of checkpoint and logs (default: .demo)")
    parser.add_argument("--model", help="another Qwen3-Next checkpoint than the small ones")
    parser.add_argument("--checkpoint", choices=["auto", "trained", "seeded"], default="auto",
                        help="which small one: the trained one where this copy holds it, else one made from a seed")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the seeded checkpoint")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=list(NEAR_TIE),
                        help="default: float32 on cpu, where greedy answers are then compared byte for byte; bfloat16 on cuda")  # fmt: skip
    parser.set_defaults(server_arguments=[])


COMMANDS = {
    "run": (options_of_run, "answer prompts with and without drafts, and compare"),
    "serve": (options_of_serve, "leave a server running on the small model"),
}


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`treewy demo` and `treewy serve`."""
    for name, (options, help) in COMMANDS.items():
        options(commands.add_parser("demo" if name == "run" else name, help=help, description=help[0].upper() + help[1:] + "."))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m treewy_sglang.demo", description="TreeWY on a small model.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (options, help) in COMMANDS.items():
        options(commands.add_parser(name, help=help))
    argv, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    args.server_arguments = rest
    return args.run(args)
