"""Train the demo checkpoint and export it.

    python -m bench.checkpoint.train CORPUS OUTPUT --seconds 420        # on a GPU
    python -m bench.checkpoint.train CORPUS OUTPUT --steps 200 --preset tiny --batch 4 --length 128

Two phases. First the whole model learns the text: the layers to predict the next byte, the MTP layer to predict the bytes
after it along chains of drafts, each node reading the hidden state of the one before as it does in the server. Then the
layers are frozen and the MTP layer alone learns from the model's own greedy continuations what the model says next (the
divergence from its distribution), because that is what its drafts are compared with.

With --steps a run is a function of its arguments, on the same machine with the same torch; after an interruption it goes on
where OUTPUT/state.pt stands. With --seconds the schedule follows the clock.
OUTPUT gets state.pt, log.jsonl and checkpoint/, the directory that SGLang loads.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkpoint import data
from bench.checkpoint.evaluate import evaluate, held_out_samples, summary, tokens_of
from bench.checkpoint.model import PRESETS, Hybrid, config_of, load, save

LEARN, DISTIL = "learn", "distil"
# How much each further draft of a chain counts: it only matters where those before it were accepted.
STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.5)
MTP_WEIGHT = 0.3


class Batches:
    """Seeded windows of the training text: which ones is a function of (seed, phase, step) alone."""

    def __init__(self, corpus: data.Corpus, device: torch.device, seed: int):
        self.tokens = torch.from_numpy(tokens_of(corpus.train)).to(torch.int16).to(device)
        self.chats = np.asarray(corpus.chats["train"])
        self.device, self.seed = device, seed

    def draw(self, phase: int, step: int, batch: int, length: int, chats: float) -> Tensor:
        """[batch, length]; a share `chats` of the windows begins where a question begins, the rest anywhere."""
        rng = np.random.default_rng([self.seed, phase, step])
        last = len(self.tokens) - length
        starts = rng.integers(last, size=batch)
        if len(self.chats):
            some = rng.random(batch) < chats
            starts = np.where(some, np.minimum(self.chats[rng.integers(len(self.chats), size=batch)], last - 1), starts)
        index = torch.from_numpy(starts).to(self.device)[:, None] + torch.arange(length, device=self.device)
        return self.tokens[index].long()


def learning_loss(model: Hybrid, tokens: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Next-byte loss, and MTP_WEIGHT times that of chains of `steps` drafts."""
    hidden = model(tokens)

    def entropy(h, wanted):
        return F.cross_entropy(model.lm_head(h).flatten(0, 1).float(), wanted.flatten())

    text = entropy(hidden[:, :-1], tokens[:, 1:])
    drafts = model.draft_hidden(tokens, hidden, steps)
    losses = [entropy(h, tokens[:, k + 1 :]) for k, h in enumerate(drafts, 1)]
    weights = STEP_WEIGHTS[:steps]
    draft = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
    return text + MTP_WEIGHT * draft, {"text": text, **{f"draft_{k}": loss for k, loss in enumerate(losses, 1)}}


def distilling_loss(model: Hybrid, tokens: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence of each draft's distribution from the model's own at that place; `agree_k`: how often the likeliest are the same."""
    with torch.no_grad():
        hidden = model(tokens)
        own = model.lm_head(hidden).float().log_softmax(-1)
    losses, agree = [], []
    for k, h in enumerate(model.draft_hidden(tokens, hidden, steps), 1):
        logits = model.lm_head(h).float()
        wanted = own[:, k : k + logits.shape[1]]
        best = wanted.argmax(-1)
        soft = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1).mean()
        # Greedy decoding asks for the likeliest token alone, so that one is asked for too.
        losses.append(soft + F.cross_entropy(logits.flatten(0, 1), best.flatten()))
        agree.append((logits.argmax(-1) == best).float().mean())
    weights = STEP_WEIGHTS[:steps]
    total = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
    return total, {f"agree_{k}": a for k, a in enumerate(agree, 1)}


def commit_of(given: str) -> str:
    """Commit of this checkout; `given` where there is none."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    except OSError:
        return given or "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else given or "unknown"


def optimizer_of(parameters: list[tuple[str, torch.nn.Parameter]], rate: float) -> torch.optim.AdamW:
    decayed = [p for n, p in parameters if p.ndim == 2 and not n.startswith("embed")]
    plain = [p for n, p in parameters if not (p.ndim == 2 and not n.startswith("embed"))]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=torch.cuda.is_available() or None)


def rate_at(progress: float, warm: float = 0.02, last: float = 0.02) -> float:
    """Factor of the learning rate: a rise, then half a cosine. progress is 0..1 of the phase."""
    if progress < warm:
        return (progress + 1e-3) / (warm + 1e-3)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm) / (1 - warm))))


class Trainer:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(args.seed)
        if self.cuda:
            torch.set_float32_matmul_precision("high")
        self.out = Path(args.output)
        self.out.mkdir(parents=True, exist_ok=True)
        self.corpus = data.read(Path(args.corpus))
        self.batches = Batches(self.corpus, self.device, args.seed)
        self.model = Hybrid(config_of(args.preset)).to(self.device)
        self.phase, self.step, self.spent = LEARN, 0, 0.0
        self.key = hashlib.sha256(json.dumps(
            [args.preset, args.seed, args.steps, args.batch, args.length, args.rate, args.distil_share, args.drafts,
             args.pool, self.corpus.manifest], sort_keys=True).encode()).hexdigest()  # fmt: skip
        self.new_optimizer()
        self.pool: Tensor | None = None
        self.pool_round = -1
        self.since = time.monotonic()
        self.resume()

    # --- state

    def new_optimizer(self) -> None:
        distil = self.phase == DISTIL
        # The embedding is shared with the layers: while they are frozen it is too.
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp.") or not distil)
        wanted = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = optimizer_of(wanted, self.args.rate)
        self.base_rate = self.args.rate * (0.5 if distil else 1.0)

    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.since

    def resume(self) -> None:
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["key"] != self.key:
            raise SystemExit(f"{path} is of a run with other arguments or another corpus; give another OUTPUT or remove it")
        self.phase, self.step, self.spent = state["phase"], state["step"], state["elapsed"]
        self.model.load_state_dict(state["model"])
        self.new_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        self.say(f"resumed in phase {self.phase} at step {self.step}, {self.spent:.0f} s done")

    def keep(self) -> None:
        state = {"key": self.key, "phase": self.phase, "step": self.step, "elapsed": self.elapsed(),
                 "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}  # fmt: skip
        temporary = self.out / "state.pt.new"
        torch.save(state, temporary)
        os.replace(temporary, self.out / "state.pt")

    def say(self, text: str) -> None:
        print(f"[train] {text}", flush=True)

    # --- schedule

    def share(self) -> float:
        return self.args.distil_share if self.phase == DISTIL else 1 - self.args.distil_share

    def progress(self) -> float:
        """0..1 of this phase."""
        if self.args.steps:
            return self.step / max(1, round(self.args.steps * self.share()))
        before = self.args.seconds * (1 - self.args.distil_share) if self.phase == DISTIL else 0.0
        return (self.elapsed() - before) / (self.args.seconds * self.share())

    # --- work

    def precision(self):
        return torch.autocast("cuda", torch.bfloat16) if self.cuda else contextlib.nullcontext()

    @torch.no_grad()
    def fill_pool(self, number: int) -> None:
        """Greedy continuations of training text: [pool, length]. Prompts of one round have one length, rounds differ."""
        args = self.args
        P = max(8, int(args.length * (0.25, 0.1, 0.5)[number % 3]))
        prompts = self.batches.draw(2, number, args.pool, P, chats=0.5)
        started = time.monotonic()
        with self.precision():
            self.pool = torch.cat([self.model.generate(part, args.length - P)[0] for part in prompts.split(1024)])
        self.pool_round = number
        self.say(f"{len(self.pool)} continuations of {P} to {args.length} tokens in {time.monotonic() - started:.1f} s")

    def batch(self) -> Tensor:
        args = self.args
        if self.phase == LEARN:
            return self.batches.draw(0, self.step, args.batch, args.length, chats=0.3)
        number = self.step // args.pool_steps
        if number != self.pool_round:
            self.fill_pool(number)
        index = np.random.default_rng([args.seed, 3, self.step]).integers(len(self.pool), size=args.batch)
        return self.pool[torch.from_numpy(index).to(self.device)]

    def train_step(self) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_rate * rate_at(self.progress())
        tokens = self.batch()
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision():
            loss, facts = (learning_loss if self.phase == LEARN else distilling_loss)(self.model, tokens, self.args.drafts)
        loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        return {"loss": loss, "norm": norm, **facts}

    def run_phase(self) -> None:
        args, log = self.args, (self.out / "log.jsonl").open("a")
        told = kept = time.monotonic()
        tokens = 0
        while self.progress() < 1.0:
            facts = self.train_step()
            self.step += 1
            tokens += args.batch * args.length
            now = time.monotonic()
            if now - told >= args.tell or self.step == 1:
                values = {name: round(value.item(), 4) for name, value in facts.items()}
                if not math.isfinite(values["loss"]):
                    raise SystemExit(f"loss is {values['loss']} at step {self.step} of phase {self.phase}")
                now = time.monotonic()
                row = {"phase": self.phase, "step": self.step, "seconds": round(self.elapsed(), 1),
                       "tokens_per_s": round(tokens / (now - told)), **values}  # fmt: skip
                log.write(json.dumps(row) + "\n")
                log.flush()
                self.say(f"{self.progress():4.0%} of {self.phase}: " + " ".join(f"{k} {v}" for k, v in row.items() if k != "phase"))
                told, tokens = now, 0
            if now - kept >= args.keep or self.step == args.stop_at:
                self.keep()
                kept = now
            if self.step == args.stop_at:
                raise SystemExit(f"stopped at step {self.step}, as asked")

    def run(self) -> dict:
        args = self.args
        parameters = sum(p.numel() for p in self.model.parameters())
        self.say(f"{args.preset}: {parameters:,} parameters on {self.device}; {self.corpus.manifest['source']}, "
                 f"{len(self.batches.tokens):,} bytes of text")  # fmt: skip
        if self.phase == LEARN:
            self.run_phase()
            self.save()  # so that something is there should the second phase not end
            self.phase, self.step = DISTIL, 0
            self.new_optimizer()
            self.keep()
        self.run_phase()
        self.keep()
        seconds = self.elapsed()
        path = self.save()
        # Judged as written, with weights rounded to bfloat16.
        result = evaluate(load(path.parent, str(self.device)), self.corpus, args.prompts, args.prompt_length, args.new)
        self.say("\n" + summary(result))
        card = {
            "parameters": parameters,
            "preset": args.preset,
            "seed": args.seed,
            "command": shlex.join(["python", "-m", "bench.checkpoint.train", *args.argv]),
            "commit": commit_of(args.commit),
            "training": {"seconds": round(seconds), "batch": args.batch, "length": args.length, "rate": args.rate,
                         "distil_steps": self.step, "torch": torch.__version__, "python": platform.python_version(),
                         "device": torch.cuda.get_device_name() if self.cuda else "cpu"},
            "text": self.corpus.manifest,
            "weights_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "accepted_length": result,
        }  # fmt: skip
        (path.parent / "card.json").write_text(json.dumps(card, indent=1) + "\n")
        (path.parent / "held_out.json").write_text(json.dumps(held_out_samples(self.corpus), indent=1) + "\n")
        self.say(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
        return card

    def save(self) -> Path:
        return save(self.model, self.out / "checkpoint", metadata={"text": self.corpus.manifest["source"], "licence": "PSF-2.0"})


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("corpus", help="what bench.checkpoint.data wrote")
    parser.add_argument("output", help="directory for state, log and checkpoint")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="train for this long, evaluation not counted in")
    length.add_argument("--steps", type=int, help="train for this many steps, both phases together")
    parser.add_argument("--preset", choices=list(PRESETS), default="demo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=768, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--drafts", type=int, default=4, choices=range(1, len(STEP_WEIGHTS) + 1), help="length of the chains that are trained")
    parser.add_argument("--distil-share", type=float, default=0.3, help="of the time or the steps")
    parser.add_argument("--pool", type=int, default=2048, help="own continuations in use at a time")
    parser.add_argument("--pool-steps", type=int, default=200, help="steps until they are made anew")
    parser.add_argument("--tell", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--keep", type=float, default=60.0, help="seconds between copies of the state")
    parser.add_argument("--stop-at", type=int, default=0, help="end at this step of a phase with the state kept, to go on later")
    parser.add_argument("--commit", default="", help="written to card.json where git cannot tell it")
    parser.add_argument("--prompts", type=int, default=64, help="of the evaluation at the end")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--new", type=int, default=192)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if not 0 < args.distil_share < 1:
        parser.error(f"--distil-share is {args.distil_share}; allowed: between 0 and 1")
    return args


def main(argv: list[str] | None = None) -> int:
    Trainer(arguments(argv)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
