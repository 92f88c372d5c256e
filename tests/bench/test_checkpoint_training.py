"""bench/checkpoint: the mathematics of the training model, its files, its figures, its runs. All on CPU, at the tiny preset."""

import hashlib
import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.checkpoint import data, evaluate, train  # noqa: E402
from bench.checkpoint.model import (  # noqa: E402
    Hybrid,
    config_of,
    delta_chunked,
    delta_sequential,
    exported,
    load,
    read_safetensors,
    save,
)
from treewy_sglang.demo import checkpoint as demo_checkpoint  # noqa: E402
from treewy_sglang.demo import command  # noqa: E402

LIMIT = 12_000_000  # bytes of the weights in the repository


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    model = Hybrid(config_of("tiny")).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and gates away from their start, drafts that are sometimes right
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.std().nan_to_num(0).clamp(min=0.3))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A few modules of the standard library, chosen so that both splits get some."""
    source = Path(sysconfig.get_path("stdlib"))
    root = tmp_path_factory.mktemp("library")
    names = sorted(p.relative_to(source).as_posix() for p in [*source.glob("*.py"), *source.glob("json/*.py"), *source.glob("email/*.py")])
    kept = [n for n in names if data.held_out(n)][:4] + [n for n in names if not data.held_out(n)][:12]
    for name in kept:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, root / name)
    return root


@pytest.fixture(scope="module")
def corpus_file(library, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.gz"
    data.write(path, library)
    return path


# --- mathematics


@pytest.mark.parametrize("T, chunk", [(1, 64), (7, 64), (64, 64), (65, 64), (150, 64), (50, 16)])
@pytest.mark.parametrize("decay", [0.01, 3.0, 100.0])
def test_chunked_is_the_recurrence(T, chunk, decay):
    gen = torch.Generator().manual_seed(T)
    draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    B, HV, K, V = 2, 3, 16, 24
    q, k = (torch.nn.functional.normalize(draw(B, T, HV, K), dim=-1) for _ in range(2))
    g, beta = -decay * torch.rand(B, T, HV, generator=gen, dtype=torch.float64), draw(B, T, HV).sigmoid()
    inputs = [x.requires_grad_() for x in (q, k, draw(B, T, HV, V), g, beta, draw(B, HV, V, K))]
    weight_o, weight_s = draw(B, T, HV, V), draw(B, HV, V, K)
    results = []
    for function in (delta_sequential, lambda *a: delta_chunked(*a, chunk=chunk)):
        o, state = function(*inputs)
        gradients = torch.autograd.grad((o * weight_o).sum() + (state * weight_s).sum(), inputs)
        results.append((o, state, *gradients))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_decoding_with_caches_is_the_whole_forward(model):
    prompts = torch.randint(0, 256, (2, 70), generator=torch.Generator().manual_seed(2))
    tokens, hidden = model.generate(prompts, 12)
    torch.testing.assert_close(hidden, model(tokens[:, :-1]), rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens[:, 70:], model.lm_head(hidden[:, 69:]).argmax(-1))


@pytest.mark.parametrize("top", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_gives_the_same_logits(model, tmp_path, top, dtype):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    ours = Hybrid({**model.config, "num_experts_per_tok": top})
    ours.load_state_dict(model.state_dict())
    save(ours, tmp_path, dtype)
    ours = load(tmp_path)  # weights as the file rounds them
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 259, (2, 130))
    with torch.no_grad():
        torch.testing.assert_close(ours.lm_head(ours(tokens)), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_file_is_safetensors(model, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = save(model, tmp_path)
    theirs, ours, wanted = safetensors.load_file(path), read_safetensors(path), exported(model)
    assert theirs.keys() == ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(theirs[name], tensor.to(torch.bfloat16)) and torch.equal(ours[name], theirs[name])
    # The names of the seeded checkpoint, which the tests of the server load, fit this model too.
    seeded = demo_checkpoint.make_weights({**model.config, "num_hidden_layers": 4})
    assert {n: t.shape for n, t in seeded.items()} == {n: t.shape for n, t in wanted.items()}


def test_wrong_checkpoint_is_refused(model, tmp_path):
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    with pytest.raises(ValueError, match="missing or unknown"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 32}))
    with pytest.raises(ValueError, match="wanted"):
        load(tmp_path)


# --- drafts


def draft_by_hand(model, tokens, hidden, drafts):
    """Hidden state after a chain: the draft layer run over everything before it and the chain, as one causal sequence.

    tokens [t + 1] up to the newest, hidden [t, D] of all before it, drafts: token ids after the newest."""
    mtp, h = model.mtp, hidden
    embedding = model.embed_tokens(torch.tensor([*tokens[1:].tolist(), *drafts]))
    for n in range(len(tokens) - 1, len(embedding) + 1):
        x, (q, k, v, gate) = mtp.enter(embedding[:n], h[:n], torch.arange(n))
        o = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        last = mtp.leave(x, o, gate)[-1:]
        h = torch.cat((h, last))
    return last[0]


def test_training_unrolls_chains_as_they_are_drafted(model):
    tokens = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(4))
    hidden = model(tokens)
    out = model.draft_hidden(tokens, hidden, 4)
    assert [h.shape[1] for h in out] == [18, 17, 16, 15]
    for k, h in enumerate(out, 1):
        for i in (0, 5, h.shape[1] - 1):
            wanted = draft_by_hand(model, tokens[0, : i + 2], hidden[0, : i + 1], tokens[0, i + 2 : i + 1 + k].tolist())
            torch.testing.assert_close(h[0, i], wanted, rtol=1e-4, atol=1e-4)


def accepted_by_hand(model, tokens, hidden, t, shape):
    """One verification: grow the tree with a dictionary of paths, keep the likeliest, follow the continuation."""
    steps, topk, nodes = shape

    def following(path):
        p = model.lm_head(draft_by_hand(model, tokens[: t + 1], hidden[:t], path)).softmax(-1)
        return [(token, p[token].item()) for token in p.topk(topk).indices.tolist()]

    scores = {(token,): p for token, p in following(())}
    level = dict(scores)
    for _ in range(steps - 1):
        grown = {(*path, token): score * p for path, score in level.items() for token, p in following(path)}
        scores |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:topk])
    kept = {path for path, _ in sorted(scores.items(), key=lambda item: -item[1])[: nodes - 1]}
    accepted = 0
    while accepted < steps and tuple(tokens[t + 1 : t + 2 + accepted].tolist()) in kept:
        accepted += 1
    return accepted


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 4, 16), (3, 2, 6)])
def test_accepted_drafts_are_those_of_one_tree_at_a_time(finished, corpus_file, shape):
    model = load(finished[0] / "checkpoint").requires_grad_(False)  # its drafts are often right
    tokens, _ = model.generate(evaluate.text_prompts(data.read(corpus_file), 3, 16), 16)
    # Some of the continuation replaced, so that drafts are right at some places and wrong at others.
    gen = torch.Generator().manual_seed(6)
    noise = torch.randint(33, 127, tokens.shape, generator=gen)
    tokens = torch.where(torch.rand(tokens.shape, generator=gen) < 0.25, noise, tokens)
    hidden = model(tokens[:, :-1])
    got = evaluate.accepted_drafts(model, tokens, hidden, 16, 26, shape)
    wanted = [[accepted_by_hand(model, tokens[b], hidden[b], t, shape) for t in range(16, 26)] for b in range(3)]
    assert got.tolist() == wanted
    assert 0 < sum(map(sum, wanted)) < got.numel() * shape[0]


def test_verifications_are_counted_as_the_server_counts(model, monkeypatch):
    """Tokens of a continuation = 1 (from the prompt) + what the verifications gain, but for what the last one overshoots."""
    prompts = torch.randint(32, 127, (4, 8), generator=torch.Generator().manual_seed(7))
    total = evaluate.Count()
    evaluate.count(model, prompts, 30, total)
    assert total.prompts == 4 and total.tokens <= 120
    for name, (steps, _, _) in evaluate.SHAPES.items():
        gained = sum(gain * n for gain, n in total.rounds[name].items())
        assert 0 <= gained - (total.tokens - 4) <= 4 * steps
        assert total.accepted_length(name) == gained / total.rounds[name].total()
    # A model that drafts what it says itself gains steps + 1 tokens at every verification.
    monkeypatch.setattr(evaluate, "accepted_drafts", lambda m, t, h, first, end, s: torch.full((len(t), end - first), s[0]))
    perfect = evaluate.Count()
    evaluate.count(model, prompts, 30, perfect)
    assert perfect.accepted_length("chain of 3") == 4.0 and perfect.accepted_length("tree of 16") == 5.0


def test_repetition():
    assert evaluate.repeated([1, 2, 3] * 20) > 0.9
    assert evaluate.repeated(list(range(60))) == 0.0


# --- text


def test_corpus_is_the_same_every_time_and_its_splits_share_no_file(library, corpus_file, tmp_path):
    again = data.write(tmp_path / "again.gz", library)
    assert (tmp_path / "again.gz").read_bytes() == corpus_file.read_bytes()
    corpus = data.read(corpus_file)
    assert corpus.manifest["sha256"] == again["sha256"] and corpus.manifest["licence"] == "PSF-2.0"
    for path in data.sources(library):
        text, name = path.read_bytes(), path.relative_to(library).as_posix()
        if text.strip():
            assert (text in corpus.held_out) == data.held_out(name) and (text in corpus.train) != data.held_out(name)
    assert corpus.held_out and len(corpus.train) > len(corpus.held_out) / 4


def test_questions_are_what_the_chat_template_writes(corpus_file):
    transformers = pytest.importorskip("transformers")
    corpus = data.read(corpus_file)
    questions = data.held_out_questions(corpus)
    sample = evaluate.held_out_samples(corpus)["prompts"]
    assert len(sample) >= 4 and [q.startswith("Continue:") for q in sample] == [False, True] * (len(sample) // 2)
    template = transformers.utils.chat_template_utils.render_jinja_template(
        [[{"role": "user", "content": sample[0]}]], chat_template=demo_checkpoint.CHAT_TEMPLATE, add_generation_prompt=True
    )[0][0]
    written = {q.replace(data.START, b"<|im_start|>").replace(data.END, b"<|im_end|>").decode() for q in questions}
    assert template in written
    tokens = evaluate.tokens_of(questions[0])
    assert tokens[0] == demo_checkpoint.SPECIAL["<|im_start|>"] and (tokens == demo_checkpoint.SPECIAL["<|im_end|>"]).sum() == 1


def test_damaged_corpus_is_refused(corpus_file, tmp_path):
    content = bytearray(data.gzip.decompress(corpus_file.read_bytes()))
    content[-5] ^= 1
    (tmp_path / "bad.gz").write_bytes(data.gzip.compress(bytes(content)))
    with pytest.raises(ValueError, match="held_out"):
        data.read(tmp_path / "bad.gz")
    (tmp_path / "other.gz").write_bytes(data.gzip.compress(b"something else"))
    with pytest.raises(ValueError, match="not a corpus"):
        data.read(tmp_path / "other.gz")


# --- runs


def arguments(corpus, output, *more):
    return train.arguments([str(corpus), str(output), "--device", "cpu", "--preset", "tiny", "--batch", "4", "--length", "48", "--steps", "40",
                            "--drafts", "3", "--pool", "8", "--pool-steps", "5", "--prompts", "4", "--prompt-length", "32", "--new", "16",
                            "--tell", "0", "--rate", "5e-3", *more])  # fmt: skip


@pytest.fixture(scope="module")
def finished(corpus_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    return out, train.Trainer(arguments(corpus_file, out)).run()


def test_run_learns_and_exports(finished, corpus_file):
    out, card = finished
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    learned = [row for row in rows if row["phase"] == train.LEARN]
    assert [row["step"] for row in learned] == list(range(1, 29)) and len(rows) == 40
    for name in ("text", "draft_1", "draft_2", "draft_3"):
        first, last = learned[0][name], sum(row[name] for row in learned[-4:]) / 4
        assert last < first - 1.0, (name, first, last)
    weights = out / "checkpoint" / "model.safetensors"
    assert card["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert weights.stat().st_size < LIMIT
    written = json.loads((out / "checkpoint" / "card.json").read_text())
    assert written == json.loads(json.dumps(card))
    for kind in evaluate.KINDS:
        for name, (steps, _, _) in evaluate.SHAPES.items():
            assert 1 <= card["accepted_length"][kind][name]["accepted_length"] <= steps + 1
    assert 1 < card["accepted_length"]["bits_per_byte"] < 8
    # The command line judges the same file the same way.
    again = out / "again.json"
    evaluate.main([str(out / "checkpoint"), str(corpus_file), "--prompts", "4", "--length", "32", "--new", "16", "--device", "cpu",
                   "--json", str(again)])  # fmt: skip
    assert json.loads(again.read_text())["text"] == written["accepted_length"]["text"]


def test_second_phase_moves_the_draft_layer_alone(corpus_file, tmp_path):
    trainer = train.Trainer(arguments(corpus_file, tmp_path))
    trainer.phase = train.DISTIL
    trainer.new_optimizer()
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    for trainer.step in range(3):
        trainer.train_step()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.startswith("mtp.")}


def test_interrupted_run_ends_with_the_same_weights(finished, corpus_file, tmp_path):
    for step in (9, 5):  # once in each phase
        with pytest.raises(SystemExit, match=f"stopped at step {step}"):
            train.Trainer(arguments(corpus_file, tmp_path, "--stop-at", str(step))).run()
    card = train.Trainer(arguments(corpus_file, tmp_path)).run()
    assert card["weights_sha256"] == finished[1]["weights_sha256"]
    with pytest.raises(SystemExit, match="other arguments"):
        train.Trainer(arguments(corpus_file, tmp_path, "--seed", "1"))


def test_another_seed_gives_other_weights(finished, corpus_file, tmp_path):
    trainer = train.Trainer(arguments(corpus_file, tmp_path, "--seed", "1"))
    first = train.Trainer(arguments(corpus_file, tmp_path / "same"))
    assert not torch.equal(trainer.batch(), first.batch())
    assert not torch.equal(trainer.model.lm_head.weight, first.model.lm_head.weight)


# --- what the repository and the demo do with it


def test_demo_preset_fits_the_repository(tmp_path):
    assert save(Hybrid(config_of("demo")), tmp_path).stat().st_size <= LIMIT


def test_demo_takes_the_trained_checkpoint_where_there_is_one(finished, tmp_path, monkeypatch, capsys):
    out, card = finished
    monkeypatch.setattr(demo_checkpoint, "__file__", str(tmp_path / "checkpoint.py"))
    assert demo_checkpoint.trained_checkpoint() is None
    shutil.copytree(out / "checkpoint", tmp_path / "trained")
    assert demo_checkpoint.trained_checkpoint() == tmp_path / "trained"
    asked = {}

    def stop(args, model, device, mode):
        asked.update(model=model, prompts=args.prompts, ends=args.ends)
        raise command.ServerFailed("no server here")

    monkeypatch.setattr(command, "start", stop)
    assert command.main(["run", "--device", "cpu"]) == 1
    held_out = json.loads((tmp_path / "trained" / "held_out.json").read_text())["prompts"]
    assert asked == {"model": tmp_path / "trained", "prompts": held_out, "ends": True}
    printed = capsys.readouterr().out
    for kind in ("text", "questions"):
        for name in evaluate.SHAPES:
            assert f"{name} {card['accepted_length'][kind][name]['accepted_length']:.2f}" in printed
    monkeypatch.setattr(demo_checkpoint, "make_checkpoint", lambda path, seed: path)
    assert command.main(["run", "--device", "cpu", "--checkpoint", "seeded", "--work", str(tmp_path)]) == 1
    assert asked["model"] == tmp_path / "checkpoint" and not asked["ends"]


def test_what_follows_the_end_of_an_answer_is_not_shown(capsys):
    """It is still part of the answer that is compared with other runs."""
    from types import SimpleNamespace as Event

    pieces = ["An ans", "wer.<|im_", "end|>\n<|im_start|>user", "\nMore"]  # the end token of one chunk or of two
    for cut in (pieces, ["An answer.", "<|im_end|>", "\nMore"]):
        sent = {}

        def create(cut=cut, sent=sent, **request):
            sent.update(request)
            return [Event(usage=None, choices=[Event(delta=Event(content=piece), logprobs=None)]) for piece in cut]

        client = Event(chat=Event(completions=Event(create=create)))
        answer = command.chat(client, "A question", 8, live=True, ends=True)
        assert answer.text == "".join(cut) and sent["extra_body"] == {"ignore_eos": True, "skip_special_tokens": False}
        assert "More" not in capsys.readouterr().out
        command.chat(client, "A question", 8, live=True)
        assert "More" in capsys.readouterr().out and sent["extra_body"] == {"ignore_eos": True}


def test_trained_checkpoint_of_the_repository_is_what_its_card_says():
    """The directory is there whole or not at all; its figures are those the demo promises."""
    directory = ROOT / "python" / "treewy_sglang" / "demo" / "trained"
    files = {p.name for p in directory.iterdir()} if directory.exists() else set()
    whole = {"card.json", "config.json", "generation_config.json", "held_out.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files in (set(), whole)
    if files:
        weights = (directory / "model.safetensors").read_bytes()
        card = json.loads((directory / "card.json").read_text())
        assert len(weights) <= LIMIT and hashlib.sha256(weights).hexdigest() == card["weights_sha256"]
        load(directory)
        for kind in evaluate.KINDS:
            chain, tree = (card["accepted_length"][kind][name]["accepted_length"] for name in ("chain of 3", "tree of 16"))
            assert 2.0 <= chain < tree
        # A model that knows nothing repeats itself, and is drafted without a fault.
        assert card["accepted_length"]["bits_per_byte"] < 2.0
