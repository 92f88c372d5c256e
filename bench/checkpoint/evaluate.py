"""Accepted length of a checkpoint's drafts on held-out text, counted as SGLang counts it, without a server.

    python -m bench.checkpoint.evaluate CHECKPOINT CORPUS [--json FILE]

The model continues prompts from the held-out split greedily. At every token of that continuation its MTP layer drafts: a
chain of 3, and a tree grown as SGLang grows it (topk 4, 4 levels, the 15 likeliest of 52 candidates and the root: 16 nodes).
A verification accepts the drafts on the path that the continuation takes, and adds one token of its own. The accepted
length is tokens per verification, drafts and that one, over the verifications that such a server would make.

Small models fall into circles when they decode greedily, and a circle is easy to draft. So two figures stand beside that
one: the share of the continuation that is repetition, and the accepted length of the first verification alone, right after
text that a person wrote, over four times as many prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.checkpoint import data
from bench.checkpoint.model import Hybrid, draft_attention, load

SHAPES = {"chain of 3": (3, 1, 4), "tree of 16": (4, 4, 16)}  # steps, topk, nodes with the root
END_TOKENS = (256, 258)


def tokens_of(text: bytes) -> np.ndarray:
    """Token ids of text with special bytes, int64."""
    table = np.arange(256, dtype=np.int64)
    for byte, token in data.SPECIAL_BYTES.items():
        table[byte] = token
    return table[np.frombuffer(text, dtype=np.uint8)]


@torch.no_grad()
def accepted_drafts(model: Hybrid, tokens: Tensor, hidden: Tensor, first: int, end: int, shape: tuple[int, int, int]) -> Tensor:
    """How many drafts a verification would accept whose newest token is t, for every t in [first, end).

    tokens [B, >= end + steps]: a greedy continuation; hidden [B, >= end, D] of the tokens; shape: (steps, topk, nodes).
    Returns int64 [B, end - first], values 0..steps.
    """
    steps, topk, nodes = shape
    mtp, device = model.mtp, tokens.device
    B, R = tokens.shape[0], end - first
    rows = torch.arange(first - 1, end - 1, device=device)  # a draft starts at the token before the newest
    positions = torch.arange(end - 1, device=device)
    x, (q, base_k, base_v, gate) = mtp.enter(model.embed_tokens(tokens[:, 1:end]), hidden[:, : end - 1], positions)
    h = mtp.leave(x, torch.nn.functional.scaled_dot_product_attention(q, base_k, base_v, is_causal=True), gate)[:, rows]

    score, token = model.lm_head(h).float().softmax(-1).topk(topk, dim=-1)  # [B, R, topk]
    candidates, scores = [token], [score]
    parents = [torch.full_like(token, -1)]
    beam = torch.arange(topk, device=device).expand(B, R, topk)  # candidate index of each node that is expanded
    h = h[:, None].expand(B, topk, R, h.shape[-1])
    token, score = token.movedim(2, 1), score.movedim(2, 1)  # [B, topk, R] from here on: nodes before starts
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    for step in range(1, steps):
        x, (q, k, v, gate) = mtp.enter(model.embed_tokens(token), h, rows + step)
        own_k, own_v = [*own_k, k], [*own_v, v]
        h = mtp.leave(x, draft_attention(q, base_k, base_v, own_k, own_v, rows), gate)
        p, following = model.lm_head(h).float().softmax(-1).topk(topk, dim=-1)  # [B, topk, R, topk]
        both = (score[..., None] * p).movedim(1, 2).reshape(B, R, topk * topk)
        following = following.movedim(1, 2).reshape(B, R, topk * topk)
        offset = sum(c.shape[-1] for c in candidates)
        candidates.append(following)
        scores.append(both)
        parents.append(beam.repeat_interleave(topk, dim=-1))
        best, at = both.topk(topk, dim=-1)  # [B, R, topk]
        beam = at + offset
        token, score = following.gather(-1, at).movedim(2, 1), best.movedim(2, 1)
        origin = (at // topk).movedim(2, 1)  # [B, topk, R]: which node each new one grew from
        h = h.gather(1, origin[..., None].expand(-1, -1, -1, h.shape[-1]))
        index = origin[:, :, None, :, None].expand(-1, -1, k.shape[2], -1, k.shape[-1])
        own_k, own_v = ([y.gather(1, index) for y in ys] for ys in (own_k, own_v))

    token, score, parent = (torch.cat(part, dim=-1) for part in (candidates, scores, parents))
    kept = torch.zeros_like(token, dtype=torch.bool).scatter_(-1, score.topk(nodes - 1, dim=-1).indices, True)
    accepted = torch.zeros(B, R, dtype=torch.int64, device=device)
    node = torch.full((B, R, 1), -1, device=device)
    for depth in range(1, steps + 1):
        truth = tokens[:, rows + 1 + depth][..., None]
        match = kept & (parent == node) & (token == truth)
        found = match.any(-1, keepdim=True)
        accepted += found[..., 0]
        node = torch.where(found, match.int().argmax(-1, keepdim=True), -2)
    return accepted


def held_out_samples(corpus: data.Corpus, number: int = 3) -> dict:
    """What the demo asks: held-out questions without their template, `number` of each kind, and where they are from."""
    questions = []
    for text in data.held_out_questions(corpus):
        question = text[len(data.START + b"user\n") : text.index(data.END)].decode()
        if len(question) <= 300:
            questions.append(question)
    kinds = [q for q in questions if not q.startswith("Continue:")][:number], [q for q in questions if q.startswith("Continue:")][:number]
    mixed = [question for pair in zip(*kinds) for question in pair]
    return {"source": corpus.manifest["source"], "licence": corpus.manifest["licence"], "prompts": mixed}


@dataclass
class Count:
    """Verifications by tokens gained, per draft shape, and what the continuations were like."""

    prompts: int = 0
    tokens: int = 0
    repeated: float = 0.0
    rounds: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))

    def accepted_length(self, name: str) -> float:
        rounds = self.rounds[name]
        return sum(gain * n for gain, n in rounds.items()) / max(1, rounds.total())

    def row(self) -> dict:
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "repeated_12_grams": round(self.repeated / max(1, self.prompts), 3),
            **{
                name: {
                    "accepted_length": round(self.accepted_length(name), 3),
                    "verifications": rounds.total(),
                    "tokens_gained": {str(k): rounds[k] for k in sorted(rounds)},
                }
                for name, rounds in self.rounds.items()
            },
        }


def repeated(tokens: list[int], n: int = 12) -> float:
    """Share of n-grams that occurred before: near 1 where a text runs in a circle."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def count(model: Hybrid, prompts: Tensor, new: int, into: Count) -> None:
    """Continue prompts [B, P] by up to `new` tokens (to an end token) and add the verifications that takes to `into`."""
    longest = max(steps for steps, _, _ in SHAPES.values())
    P = prompts.shape[1]
    tokens, hidden = model.generate(prompts, new + longest)
    ends = []
    for line in tokens[:, P : P + new].tolist():
        stop = next((i + 1 for i, token in enumerate(line) if token in END_TOKENS), new)
        ends.append(P + stop - 1)  # no verification starts at the last token
        into.tokens += stop
        into.repeated += repeated(line[:stop])
    into.prompts += len(ends)
    for name, shape in SHAPES.items():
        accepted = accepted_drafts(model, tokens, hidden, P, P + new, shape).tolist()
        for line, end in zip(accepted, ends):
            t = P
            while t < end:
                gain = line[t - P] + 1
                into.rounds[name][gain] += 1
                t += gain


def text_prompts(corpus: data.Corpus, number: int, length: int, seed: int = 0) -> Tensor:
    """[number, length]: windows of the held-out files, evenly spread from a seeded offset."""
    tokens = tokens_of(corpus.held_out)
    starts = np.linspace(0, len(tokens) - length - 1, number, dtype=np.int64)
    starts = (starts + np.random.default_rng(seed).integers(len(tokens))) % (len(tokens) - length)
    return torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]))


def question_prompts(corpus: data.Corpus, number: int) -> list[Tensor]:
    """About `number` held-out questions, as batches of equal length: those of the commonest lengths."""
    groups: dict[int, list[np.ndarray]] = defaultdict(list)
    for question in data.held_out_questions(corpus):
        groups[len(question)].append(tokens_of(question))
    batches, have = [], 0
    for _, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        group = group[: number - have]
        if not group:
            break
        batches.append(torch.from_numpy(np.stack(group)))
        have += len(group)
    return batches


def bits_per_byte(model: Hybrid, tokens: Tensor) -> float:
    """Mean surprise of the model at text [B, T], given what stands before it in its row."""
    logits = model.lm_head(model(tokens)[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item() / math.log(2)


def evaluate(model: Hybrid, corpus: data.Corpus, prompts: int = 64, length: int = 256, new: int = 192, batch: int = 64) -> dict:
    """{"text": ..., "first": ..., "questions": ...}, each a Count.row: continuations of held-out files; their first
    verification alone; answers to held-out questions. "bits_per_byte": how well it knows the held-out text."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    precision = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
    out = {"device": torch.cuda.get_device_name() if cuda else "cpu", "arithmetic": "bfloat16" if cuda else "float32"}
    with torch.no_grad(), precision:
        for name, batches, tokens in (
            ("text", text_prompts(corpus, prompts, length).split(batch), new),
            ("first", text_prompts(corpus, 4 * prompts, length, seed=1).split(batch), 2),  # two tokens: one verification
            ("questions", question_prompts(corpus, prompts), new),
        ):
            total = Count()
            for group in batches:
                count(model, group.to(device), tokens, total)
            out[name] = total.row()
        groups = text_prompts(corpus, 4 * prompts, length, seed=1).split(batch)
        weighted = [bits_per_byte(model, group.to(device)) * len(group) for group in groups]
        out["bits_per_byte"] = round(sum(weighted) / (4 * prompts), 3)
    return out


KINDS = {"text": "text", "first": "text, first verification alone", "questions": "questions"}


def summary(result: dict) -> str:
    lines = [f"held-out text: {result['bits_per_byte']:.2f} bits per byte"]
    for name, words in KINDS.items():
        row = result[name]
        lengths = ", ".join(f"{shape} {row[shape]['accepted_length']:.2f}" for shape in SHAPES)
        lines.append(f"held-out {words}: accepted length {lengths} ({row['prompts']} prompts, {row['tokens']} tokens, "
                     f"{row['repeated_12_grams']:.0%} of 12-grams repeated)")  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Accepted length of drafts on held-out text.")
    parser.add_argument("checkpoint")
    parser.add_argument("corpus")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text prompt")
    parser.add_argument("--new", type=int, default=192, help="tokens of a continuation")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="also write the result there")
    args = parser.parse_args(argv)
    corpus = data.read(Path(args.corpus))
    model = load(Path(args.checkpoint), args.device)
    result = evaluate(model, corpus, args.prompts, args.length, args.new)
    result["checkpoint_sha256"] = hashlib.sha256((Path(args.checkpoint) / "model.safetensors").read_bytes()).hexdigest()
    result["held_out_sha256"] = corpus.manifest["sha256"]["held_out"]
    print(summary(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
