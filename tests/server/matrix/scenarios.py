"""Which servers are started, what each is asked, and what must come out."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping

from server_harness import COMPLAINTS, ROOT
from treewy_sglang.demo.checkpoint import trained_checkpoint
from treewy_sglang.demo.command import NEAR_TIE
from treewy_sglang.demo.server import CHAIN3, NGRAM16, PLAIN, TREE16, TREE64, Mode

from matrix import qwen35, refusals, verdicts
from matrix.loads import REGEX, Size
from matrix.verdicts import need

MODES = {"chain3": CHAIN3, "tree16": TREE16, "tree64": TREE64, "ngram16": NGRAM16}
ADAPTIVE = Mode("NEXTN, adaptive step counts", 8, (
    "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "7", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "8", "--speculative-adaptive",
))  # fmt: skip
STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy")
# Two float32 servers that batch differently round differently, by about 1e-5.
FLOAT32_TIE = 1e-4

# On CUDA only: what every start there gets. Prompts are not what is tested, and capturing graphs, theirs and of many batch
# sizes, takes long. The pools have sizes of their own, so the fraction only has to leave room: a server that starts while
# others take memory holds what is left then against the part of what was free before that the fraction leaves alone.
ON_CUDA = (
    "--attention-backend", "triton", "--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", "1", "2", "4", "8", "16",
    "--mem-fraction-static", "0.9", "--grammar-backend", "none",
)  # fmt: skip
# Small checkpoints: of those that need another than the demo's, what differs in config.json.
MODELS: dict[str, Mapping[str, Any]] = {
    "small": {},
    "positions": {"max_position_embeddings": 16384},
    "tiny": {
        "vocab_size": 8, "hidden_size": 64, "intermediate_size": 128, "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    },  # fmt: skip
}
# Dimensions of Qwen3.5-35B-A3B, served as Qwen3-Next with dummy weights.
DIMENSIONS_35B = {
    "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """One server."""

    name: str
    mode: Mode = PLAIN
    loads: tuple[str, ...] = ("greedy",)
    dtype: str = "bfloat16"
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    model: str = "small"
    treewy: bool | None = None  # None: where there are drafts
    patched: bool = True
    gpus: int = 1
    alone: bool = False  # it wants the memory for itself
    devices: tuple[str, ...] = ("cpu", "cuda")
    running: int | None = None  # None: as many as are asked at a time
    until: str = ""  # words in the log after which it is stopped, unasked
    tokens: int | None = None  # of the KV cache; None: plenty; 0: what memory allows

    @property
    def has_treewy(self) -> bool:
        return self.mode.speculative if self.treewy is None else self.treewy


@dataclass(frozen=True)
class Check:
    """A row of the table: `judge(data of the starts by name, size)` returns what was found, or raises Missed. The last start is
    the one that it is about: its name chooses the row, and the row comes from where it ran."""

    name: str
    starts: tuple[str, ...]
    judge: Callable[[Mapping[str, Any], Size], str]


def strategy(name: str) -> tuple[str, ...]:
    """SGLang asserts that no_buffer comes without the overlap scheduler, and turns it off by itself on a CPU alone."""
    return ("--mamba-radix-cache-strategy", name, *(("--disable-overlap-schedule",) if name == "no_buffer" else ()))


def retracting(interval: int) -> tuple[tuple[str, str], ...]:
    return (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", str(interval)))


FLOAT32 = (("TREEWY_FLOAT32", "1"),)
GPU = ("cuda",)


def starts() -> dict[str, Start]:
    found: list[Start] = []
    add = found.append

    # float32, token for token. Strategies and forced retractions in every mode.
    add(Start("f32-plain", dtype="float32", arguments=strategy("no_buffer"), environment=FLOAT32))
    for mode, drafts in MODES.items():
        for name in STRATEGIES:
            add(Start(f"f32-{mode}-{name}", drafts, dtype="float32", arguments=strategy(name), environment=FLOAT32))
        add(Start(f"f32-{mode}-retract", drafts, dtype="float32", arguments=strategy("extra_buffer"), environment=FLOAT32 + retracting(20)))  # fmt: skip

    # bfloat16: near ties, and snapshots beside them. The trained checkpoint, because how close its decisions are is a model's.
    trained = dict(model="trained")
    add(Start("bf16-plain", loads=("sequence", "greedy"), **trained))
    add(Start("bf16-unpatched", loads=("sequence",), patched=False, devices=GPU, **trained))
    for mode in ("chain3", "tree16"):
        add(Start(f"bf16-{mode}-snapshots", MODES[mode], treewy=False, devices=GPU, **trained))
    for mode, drafts in MODES.items():
        add(Start(f"bf16-{mode}", drafts, **trained))
    features: dict[str, tuple[str, ...]] = {
        "no-cuda-graph": ("--disable-cuda-graph",),
        "no-overlap": ("--disable-overlap-schedule",),
        "no-radix": ("--disable-radix-cache",),
        "no_buffer": strategy("no_buffer"),
        "extra_buffer_lazy": strategy("extra_buffer_lazy"),
        "chunked": ("--chunked-prefill-size", "64"),
        "state-bfloat16": ("--mamba-ssm-dtype", "bfloat16"),
        "state-float16": ("--mamba-ssm-dtype", "float16"),
        "flashinfer": ("--attention-backend", "flashinfer"),
    }
    for feature, arguments in features.items():
        only = GPU if feature in ("no-cuda-graph", "flashinfer") else ("cpu", "cuda")
        for mode in ("chain3", "tree16"):
            add(Start(f"bf16-{mode}-{feature}", MODES[mode], arguments=arguments, devices=only, **trained))
    add(Start("bf16-adaptive", ADAPTIVE, devices=GPU, **trained))
    for mode in ("plain", "chain3", "tree16"):
        add(Start(f"f32-{mode}-tp2", MODES.get(mode, PLAIN), dtype="float32", arguments=("--tp-size", "2"), environment=FLOAT32, gpus=2, devices=GPU))  # fmt: skip

    # Grammars: xgrammar needs a GPU.
    for mode, drafts in {"plain": PLAIN, **MODES}.items():
        add(Start(f"grammar-{mode}", drafts, loads=("grammar",), arguments=("--grammar-backend", "xgrammar"), devices=GPU))

    # Temperature 1.
    for mode in ("plain", "chain3", "tree16", "ngram16"):
        drafts = MODES.get(mode, PLAIN)
        add(Start(f"sampled-{mode}", drafts, loads=("sampled",), model="tiny", arguments=("--skip-tokenizer-init",), running=50, tokens=50 * 900))  # fmt: skip

    # One long answer. Acceptance by server; the states by drift.py.
    for mode in ("plain", "chain3", "tree16"):
        if mode != "plain":
            add(Start(f"long-{mode}", MODES[mode], loads=("long",), model="positions", running=2, tokens=24000))
        add(Start(f"long-f32-{mode}", MODES.get(mode, PLAIN), loads=("long",), dtype="float32", model="positions", environment=FLOAT32, running=2, tokens=24000))  # fmt: skip
    # The same with its inputs and final states written down, so without CUDA graphs.
    for mode in ("plain", "chain3", "tree16"):
        add(Start(f"drift-{mode}", MODES.get(mode, PLAIN), loads=("drift",), model="positions", running=1, tokens=24000, arguments=("--disable-cuda-graph", "--disable-radix-cache", "--disable-overlap-schedule")))  # fmt: skip

    # Thousands of short requests, with retractions forced and with a KV cache that is too small.
    for mode in ("chain3", "tree16", "ngram16"):
        for name in ("no_buffer", "extra_buffer"):
            add(Start(f"mixed-{mode}-{name}", MODES[mode], loads=("mixed_load",), arguments=strategy(name), environment=retracting(20), running=16))  # fmt: skip
        add(Start(f"mixed-{mode}-small-cache", MODES[mode], loads=("mixed_load",), running=16, tokens=1600))

    # Memory-tight: what a 35B model's budget gives.
    size = dict(
        loads=(), model="35b", alone=True, devices=GPU, running=512, tokens=0, until="max_total_num_tokens=",
        arguments=("--load-format", "dummy", "--skip-tokenizer-init", "--mem-fraction-static", "0.66", "--disable-cuda-graph"),
    )  # fmt: skip
    wide = {4: CHAIN3, 16: TREE16, 64: TREE64}
    for nodes, drafts in wide.items():
        for kind in ("treewy", "snapshots"):
            add(Start(f"memory-{nodes}-{kind}", drafts, treewy=kind == "treewy", **size))
    replayssm = (*size.pop("arguments"), "--enable-linear-replayssm-spec")
    add(Start("memory-4-replayssm", CHAIN3, treewy=False, arguments=replayssm, **size))

    # Command lines that are refused; no server comes of it.
    add(Start("refusals", loads=("refusals",)))

    # Qwen3.5, dense and with experts.
    for kind in ("dense", "moe"):
        for mode in ("plain", "chain3", "tree16"):
            add(Start(f"qwen35-{kind}-{mode}", MODES.get(mode, PLAIN), model=f"qwen35-{kind}"))
    return {s.name: s for s in found}


def for_device(all_starts: Mapping[str, Start], device: str) -> dict[str, Start]:
    """The starts that make sense on a device. SGLang's CPU path is compared in float32 whatever the dtype of the GPU run."""
    out = {}
    for name, start in all_starts.items():
        if device not in start.devices:
            continue
        if device == "cpu" and start.dtype == "bfloat16" and ({"sampled", "mixed_load", "drift"} & set(start.loads) or start.model.startswith("qwen35")):
            start = replace(start, dtype="float32")
        out[name] = start
    return out


# Judges.


def _answers(data: Mapping[str, Any], name: str, load: str = "greedy") -> list[dict]:
    return data[name][load]["answers"]


def _tie(dtype: str) -> float:
    return FLOAT32_TIE if dtype == "float32" else NEAR_TIE[dtype]


def equal(reference: str, name: str, load: str = "greedy") -> Check:
    """Token for token, where the reference holds no near tie; also from the prefix cache."""

    def judge(data: Mapping[str, Any], size: Size) -> str:
        expected = _answers(data, reference, load)
        chosen = range(len(expected)) if load != "greedy" else verdicts.without_near_ties(expected, FLOAT32_TIE, size.prompts)
        got = _answers(data, name, load)
        found = verdicts.splits([expected[i] for i in chosen], [got[i] for i in chosen], FLOAT32_TIE)
        need(found["split"] == 0, f"{found['split']} of {found['answers']} answers differ: {found['wide'] or found}")
        detail = f"{found['answers']} answers, {found['compared']} tokens equal"
        if load == "greedy":
            again = data[name][load]["again"]
            tail = range(len(got) - len(again), len(got))
            wrong = [i for i, tokens in zip(tail, again) if i in set(chosen) and tokens != expected[i]["tokens"]]
            need(not wrong, f"asked again, answers {wrong} differ")
            detail += f"; accepted {data[name][load]['accepted'] or 1:.2f}, retractions {data[name][load]['retracted']}"
        return detail

    return Check(f"{name} = {reference}", (reference, name), judge)


def retracted(name: str) -> Check:
    def judge(data: Mapping[str, Any], size: Size) -> str:
        count = data[name]["greedy"]["retracted"]
        need(count > 0, "no request was retracted")
        return f"{count} retractions of compared requests"

    return Check(f"{name}: requests were retracted", (name,), judge)


def near(reference: str, name: str, dtype: str, snapshots: str | None = None) -> Check:
    """Splits at near ties only. `snapshots`: a start with these in place of TreeWY; the splits between it and the reference are
    as good a reason as a near tie, where ours are neither more frequent nor wider."""

    def judge(data: Mapping[str, Any], size: Size) -> str:
        found = verdicts.splits(_answers(data, reference), _answers(data, name), _tie(dtype))
        detail = f"{found['split']} of {found['answers']} split in {found['compared']} tokens, widest gap {found['gap']:.3g}; accepted {data[name]['greedy']['accepted'] or 1:.2f}"
        if snapshots is not None:
            theirs = verdicts.splits(_answers(data, reference), _answers(data, snapshots), _tie(dtype))
            rate, width = verdicts.no_more_frequent(found, theirs), verdicts.no_wider(found, theirs)
            return f"{detail}; snapshots {theirs['split']} in {theirs['compared']}, widest {theirs['gap']:.3g} (p = {rate:.2g}, {width:.2g})"
        need(not found["wide"], f"splits wider than {_tie(dtype):.3g} (answer, token, gap): {found['wide'][:5]}")
        return detail

    starts = (reference, name) if snapshots is None else (reference, snapshots, name)
    return Check(f"{name} ~ {reference}", starts, judge)


def near_ties(mode: str) -> Check:
    """The strict form: wherever TreeWY and snapshots part, the two tokens are a rounding step of the logits apart."""
    names = (f"bf16-{mode}-snapshots", f"bf16-{mode}")

    def judge(data: Mapping[str, Any], size: Size) -> str:
        found = verdicts.splits(*(_answers(data, name) for name in names), _tie("bfloat16"))
        detail = f"{found['split']} splits in {found['compared']} tokens, widest gap {found['gap']:.3g}, limit {_tie('bfloat16'):.3g}"
        need(not found["wide"], f"{detail}: {len(found['wide'])} are wider")
        return detail

    return Check(f"bf16-{mode}: parts from snapshots at near ties only", names, judge)


def _same_bits(data: Mapping[str, Any], size: Size) -> str:
    a, b = _answers(data, "bf16-plain", "sequence"), _answers(data, "bf16-unpatched", "sequence")
    need(a == b, f"answers {[i for i, (x, y) in enumerate(zip(a, b)) if x != y]} differ")
    return f"{len(a)} answers, tokens and logarithmic probabilities equal to the bit"


def _grammar(mode: str) -> Check:
    names = ("grammar-plain", f"grammar-{mode}")

    def judge(data: Mapping[str, Any], size: Size) -> str:
        plain, ours = (_answers(data, name, "grammar") for name in names)
        counts = {"regex": 0, "schema": 0, "free": 0}
        for a in (*plain, *ours):
            if a["form"] == "regex":
                need(re.fullmatch(REGEX, a["text"]) is not None, f"{a['text']!r} does not match {REGEX}")
            elif a["form"] == "schema" and a["finish"] == "stop":  # cut off at the limit it need not be whole
                value = json.loads(a["text"])
                need(isinstance(value["name"], str) and isinstance(value["nodes"], int) and set(value) == {"name", "nodes"}, a["text"])
            counts[a["form"]] += a["finish"] == "stop" or a["form"] == "free"
        need(counts["regex"] and counts["schema"], f"no constrained answer came to its end: {counts}")
        found = verdicts.splits(plain, ours, _tie("bfloat16"))
        need(not found["wide"], f"splits at more than a near tie: {found['wide']}")
        return f"{len(ours)} answers valid, {found['split']} leave those without drafts, at near ties; ended {counts}"

    return Check(f"grammar-{mode}", names, judge)


def _sampled(mode: str) -> Check:
    names = ("sampled-plain", f"sampled-{mode}")

    def judge(data: Mapping[str, Any], size: Size) -> str:
        found = verdicts.same_distribution(*(data[n]["sampled"]["samples"] for n in names))
        accepted = data[names[1]]["sampled"]["accepted"]
        need(accepted > 1.02, f"accepted length {accepted}: drafts were not sampled from")
        return (
            f"{found['tokens'][1]} tokens of {found['vocabulary']}, {found['tests']} tests, smallest p {found['p']:.3g} "
            f"({found['worst']}), corrected {found['corrected']:.3g}; accepted {accepted:.2f}"
        )

    return Check(f"sampled-{mode}: chi-square against plain sampling", names, judge)


def _long(name: str, reference: str | None) -> Check:
    names = (name,) if reference is None else (reference, name)

    def judge(data: Mapping[str, Any], size: Size) -> str:
        accepted = verdicts.acceptance(data[name]["long"]["events"])
        verdicts.flat(accepted)
        detail = "accepted per 1000 tokens " + " ".join(f"{x:.2f}" for x in accepted)
        if reference is not None:
            found = verdicts.splits(_answers(data, reference, "long"), _answers(data, name, "long"), FLOAT32_TIE)
            need(not found["wide"], f"leaves plain decoding: {found['wide']}")
            detail = f"equal to plain decoding for {found['compared']} tokens; " + detail
        return detail

    return Check(f"{name}: acceptance stays flat" + (", tokens equal" if reference else ""), names, judge)


def _drift(mode: str) -> Check:
    names = ("drift-plain", f"drift-{mode}")

    def judge(data: Mapping[str, Any], size: Size) -> str:
        plain, ours = (data[n]["drift"] for n in names)
        need(ours["tokens"] >= 0.99 * size.long and plain["tokens"] >= 0.99 * size.long, f"{ours['tokens']}, {plain['tokens']} tokens replayed")
        found = verdicts.drift(ours["errors"], plain["errors"])
        return f"{ours['tokens']} tokens; relative distance from a float64 replay: worst {found['worst']:.2g}, mean {found['mean']:.2g}; plain decoding {found['plain_worst']:.2g}, {found['plain_mean']:.2g}"  # fmt: skip

    return Check(f"drift-{mode}: states beside a float64 replay", names, judge)


def _mixed(name: str) -> Check:
    def judge(data: Mapping[str, Any], size: Size) -> str:
        found = data[name]["mixed_load"]
        need(found["retractions"] > 0, "nothing was retracted")
        need(found["running"] == found["waiting"] == found["used_after_flush"] == 0, f"not all is free: {found}")
        need(sum(found["counts"].values()) == size.mixed, f"{found['counts']} of {size.mixed}")
        aborted = sum(n for kind, n in found["counts"].items() if kind in ("abort: abort", "abort at once: abort", "hang up"))
        need(aborted > 0, f"nothing was aborted: {found['counts']}")
        return f"{size.mixed} requests in {found['seconds']:.0f} s, {aborted} aborted, {found['retractions']} retractions; all free"

    return Check(f"{name}: everything is free at the end", (name,), judge)


def _refusals(data: Mapping[str, Any], size: Size) -> str:
    found = data["refusals"]["refusals"]
    wrong = refusals.wrong(found["answers"], found["device"])
    need(not wrong, "; ".join(wrong))
    return f"{len(found['answers']) - 1} command lines refused, one served"


def _memory(nodes: int, share: float) -> Check:
    kinds = ("snapshots", *(("replayssm",) if nodes == 4 else ()), "treewy")
    names = tuple(f"memory-{nodes}-{kind}" for kind in kinds)

    def judge(data: Mapping[str, Any], size: Size) -> str:
        lines = data[names[-1]]["start"]["lines"]
        got = verdicts.share_of_bare_budget(lines, round(lines["slot_mib"] * 2**20))
        others = {n: data[n]["start"]["state_slots"] for n in names[:-1]}
        need(got >= share, f"{got:.3f} of the slots that the budget gives without drafts, at least {share} wanted; {lines}")
        return f"{lines['slots']} state slots, {got:.1%} of those without drafts; {others}"

    return Check(f"memory-{nodes}: state slots at least {share:.0%}", names, judge)


def _healthy(name: str, start: Start) -> Check:
    """What every server with the flag has to show, whatever it was asked."""

    def judge(data: Mapping[str, Any], size: Size) -> str:
        facts = data[name]["end"]
        need(not facts["complaints"], f"the log says {facts['complaints']}")
        if start.has_treewy:
            treewy = facts["treewy"]
            need(treewy["nodes_verified"] > 0, "nothing was verified")
            need(not any(treewy["errors"].values()), f"operator errors {treewy['errors']}")
            need(treewy["idle_checks"] > 0, "the leak check never ran")
            return f"{treewy['requests_verified']} drafts verified, {treewy['idle_checks']} leak checks, errors 0"
        return "no complaint in the log"

    return Check(f"{name}: healthy", (name,), judge)


def checks(chosen: Mapping[str, Start]) -> list[Check]:
    """All rows that the given starts can fill."""
    rows: list[Check] = []

    def snapshots(mode: str) -> str | None:
        name = f"bf16-{'chain3' if mode == 'chain3' else 'tree16'}-snapshots"
        return name if name in chosen else None

    for mode in MODES:
        for name in (*STRATEGIES, "retract"):
            rows.append(equal("f32-plain", f"f32-{mode}-{name}"))
        rows.append(retracted(f"f32-{mode}-retract"))
        rows.append(near("bf16-plain", f"bf16-{mode}", "bfloat16", snapshots(mode)))
        rows.append(_grammar(mode))
    rows += [near_ties(mode) for mode in ("chain3", "tree16")]
    rows.append(Check("without the flag patched = unpatched", ("bf16-plain", "bf16-unpatched"), _same_bits))
    for name in chosen:
        if match := re.fullmatch(r"bf16-(chain3|tree16)-(.+)", name):
            feature = match[2]
            if feature == "snapshots":
                continue
            # A state that is rounded at every step drifts from one that is rounded once per draft: no near tie explains
            # that, and the operators' own tests hold both against float64.
            if not feature.startswith("state"):
                rows.append(near("bf16-plain", name, "bfloat16", snapshots(match[1])))
    for kind in ("dense", "moe"):
        for mode in ("chain3", "tree16"):
            name, plain = f"qwen35-{kind}-{mode}", f"qwen35-{kind}-plain"
            if name in chosen:
                rows.append(equal(plain, name) if chosen[name].dtype == "float32" else near(plain, name, "bfloat16"))
    if "qwen35-moe-plain" in chosen and chosen["qwen35-moe-plain"].dtype == "float32":
        rows.append(equal("f32-plain", "qwen35-moe-plain"))  # the same function in another layout
    rows.append(near("bf16-plain", "bf16-adaptive", "bfloat16", snapshots("chain3")))
    rows += [equal("f32-plain", f"f32-{mode}-tp2") for mode in ("plain", "chain3", "tree16")]
    rows += [_sampled(mode) for mode in ("chain3", "tree16", "ngram16")]
    for mode in ("chain3", "tree16"):
        rows.append(_long(f"long-{mode}", None))
        rows.append(_long(f"long-f32-{mode}", "long-f32-plain"))
        rows.append(_drift(mode))
    rows += [_mixed(name) for name in chosen if name.startswith("mixed-")]
    rows.append(Check("refusals: each with its sentence", ("refusals",), _refusals))
    rows += [_memory(4, 0.97), _memory(16, 0.90), _memory(64, 0.70)]
    rows = [r for r in rows if all(name in chosen for name in r.starts)]
    return rows + [_healthy(name, start) for name, start in chosen.items() if start.loads and start.loads != ("refusals",)]


# What SGLang's video loader says, at great length, on a machine without ffmpeg; the models of Qwen3.5 import it.
_NO_FFMPEG = re.compile(r"\[start of libtorchcodec loading traceback\].*?\[end of libtorchcodec loading traceback\]", re.S)


def complaints(text: str) -> list[str]:
    text = _NO_FFMPEG.sub("", text)
    return [c for c in COMPLAINTS if c in text]


def model_directory(name: str, work: Path) -> Path:
    """The checkpoint of a start, made where it is missing."""
    from treewy_sglang.demo.checkpoint import make_checkpoint, model_config

    if name == "trained":
        return trained_checkpoint()
    if name in MODELS:
        where = ROOT / ".demo" / "checkpoint" if name == "small" else work / f"checkpoint-{name}"
        return make_checkpoint(where, changes=MODELS[name])
    if name.startswith("qwen35"):
        return qwen35.write(work / name, name == "qwen35-moe", model_directory("small", work))
    where = work / f"config-{name}"
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps({**model_config(), **DIMENSIONS_35B}, indent=1))
    return where
