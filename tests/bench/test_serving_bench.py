"""bench/serving against a server and a client that only pretend: rows, resuming, failures, plots, and what it would run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.serving import modes, plots, presets, rows, server  # noqa: E402
from bench.serving import __main__ as bench  # noqa: E402

FAKE = Path(__file__).with_name("fake_server.py")
FIELDS = (
    "gpu commit model mode nodes mem_fraction memory concurrency accept_len output_tok_s ttft_p50_ms ttft_p99_ms tpot_p50_ms "
    "running_max retractions peak_gib error"
).split()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """run(*arguments) -> (exit code, rows); every Python that bench/serving starts is the pretended one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("TREEWY_COMMIT", "abc123")
    (tmp_path / "model").mkdir()

    def run(*arguments):
        code = bench.main([*run.fixed, *arguments])
        files = sorted((tmp_path / "out").glob("*.jsonl"))
        return code, (rows.read(files[0]) if files else [])

    run.fixed = ["--model", str(tmp_path / "model"), "--device", "cpu", "--out", str(tmp_path / "out"),
                 "--logs", str(tmp_path / "logs"), "--python", str(python)]  # fmt: skip
    run.seen = lambda name: (
        [json.loads(x) for x in (tmp_path / name).read_text().splitlines()] if (tmp_path / name).exists() else []
    )
    run.folder = tmp_path
    return run


TWO = ("--modes", "none", "treewy-tree16", "--memory", "tight=0.66", "--concurrency", "2", "4")


def test_rows_have_the_schema_and_the_figures(fake, capsys):
    code, found = fake("--modes", "none", "treewy-tree16", "--memory", "tight=0.66", "ample", "--concurrency", "2", "4",
                       "--accept", "published")  # fmt: skip
    assert code == 0 and len(found) == 2 * 2 * 2
    assert len(fake.seen("servers")) == 4 and len(fake.seen("clients")) == 8  # each server once
    for row in found:
        assert [name for name in row if name in FIELDS] == FIELDS  # all of them, in this order
        assert row["error"] is None and row["gpu"] == "cpu" and row["commit"] == "abc123" and row["model"] == "model"
        assert row["accept_len"] == 3.205 and row["output_tok_s"] == 100.0 * row["concurrency"]
        assert (row["ttft_p50_ms"], row["ttft_p99_ms"], row["tpot_p50_ms"]) == (10.0, 50.0, 5.555)
        assert (row["running_max"], row["retractions"]) == (7, 3)  # 5 and 2 new ones, and one retraction of 3
        assert row["max_running_requests"] == 20 and row["max_mamba_cache_size"] == 101
        assert 0 < row["peak_gib"] < 50
    assert {(r["mode"], r["nodes"]) for r in found} == {("none", 0), ("treewy-tree16", 16)}
    assert {(r["memory"], r["mem_fraction"]) for r in found} == {("tight", 0.66), ("ample", None)}
    name = next((fake.folder / "out").glob("*.jsonl")).name
    assert re.fullmatch(r"serving-\d{4}-\d\d-\d\d-cpu-abc123\.jsonl", name)
    assert "treewy-tree16" in capsys.readouterr().out


def test_what_is_started_and_sent(fake):
    fake("--modes", "treewy-tree16", "--memory", "tight=0.66", "--concurrency", "4", "--accept", "published",
         "--server-args", "--attention-backend triton", "--client-args", "--request-rate 9")  # fmt: skip
    (started,), (sent,) = fake.seen("servers"), fake.seen("clients")
    assert started["accept"] == "3.38"
    text = " ".join(started["arguments"])
    for words in ("--speculative-algorithm NEXTN", "--speculative-num-draft-tokens 16", "--speculative-num-steps 3",
                  "--speculative-eagle-topk 3", "--enable-treewy", "--mem-fraction-static 0.66", "--max-running-requests 4",
                  "--attention-backend triton"):  # fmt: skip
        assert words in text
    text = " ".join(sent)
    for words in ("--dataset-name random-ids", "--random-input-len 256", "--random-output-len 192", "--num-prompts 12",
                  "--max-concurrency 4", "--flush-cache", "--request-rate 9"):  # fmt: skip
        assert words in text


def test_the_first_run_of_every_server_is_warmed_with_all_it_holds(fake):
    fake("--modes", "none", "treewy-chain4", "--concurrency", "16", "32", "--warmup", "5")
    warmed = [int(sent[sent.index("--warmup-requests") + 1]) for sent in fake.seen("clients")]
    assert warmed == [16, 5, 16, 5]


def test_no_acceptance_is_simulated_unless_asked(fake, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "9")
    fake("--modes", "treewy-chain4", "--concurrency", "2")
    assert fake.seen("servers")[0]["accept"] is None


def test_a_run_that_was_cut_short_goes_on(fake):
    _, first = fake(*TWO)
    path = next((fake.folder / "out").glob("*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:40])  # in the middle of a row
    before = len(fake.seen("clients"))
    _, again = fake(*TWO)
    assert len(again) == 4 and len(fake.seen("clients")) == before + 2
    assert {rows.case_of(r) for r in again} == {rows.case_of(r) for r in first}
    servers = len(fake.seen("servers"))
    fake(*TWO)
    assert len(fake.seen("clients")) == before + 2 and len(fake.seen("servers")) == servers  # nothing left to do


def test_a_run_that_began_yesterday_goes_on_in_its_file(fake):
    (fake.folder / "out").mkdir()
    old = fake.folder / "out" / "serving-2020-01-01-cpu-abc123.jsonl"
    old.touch()
    fake("--modes", "none", "--concurrency", "2")
    assert len(rows.read(old)) == 1 and len(list((fake.folder / "out").glob("*.jsonl"))) == 1


def test_a_server_that_does_not_start_is_a_row_with_its_error(fake, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS_AT", "--enable-treewy")
    code, found = fake(*TWO)
    assert code == 0
    failed = [r for r in found if r["mode"] == "treewy-tree16"]
    assert len(failed) == 2 and len(found) == 4
    for row in failed:
        assert "Not enough GPU memory" in row["error"] and row["output_tok_s"] is None and row["nodes"] == 16
        assert [name for name in row if name in FIELDS] == FIELDS
    assert all(r["error"] is None for r in found if r["mode"] == "none")
    monkeypatch.delenv("FAKE_FAILS_AT")
    assert len(fake(*TWO)[1]) == 4  # not tried again
    _, found = fake(*TWO, "--retry-errors")
    assert len(found) == 6 and all(r["error"] is None for r in plots.latest(found)) and len(plots.latest(found)) == 4


def test_a_client_that_cannot_be_imported_is_a_row_with_its_error(fake, monkeypatch):
    monkeypatch.setattr(bench.client, "HOST", "import no_such_client")
    code, found = fake("--modes", "none", "--concurrency", "2")
    assert code == 0 and "no_such_client" in found[0]["error"]


def test_no_server_is_started_that_the_budget_cannot_serve(fake):
    code, found = fake("--modes", "none", "--concurrency", "2", "--budget", "100", "--least", "101")
    assert code == 0 and found == [] and fake.seen("servers") == []
    _, found = fake("--modes", "none", "--concurrency", "2", "--budget", "100", "--least", "50")
    assert len(found) == 1


def test_graphs_of_given_batch_sizes(tmp_path):
    def words(*arguments):
        made = server.make(modes.parse("none"), server.Setting("ample"), tmp_path, tmp_path / "log", requests=64,
                           arguments=arguments, device="cuda", dtype="bfloat16")  # fmt: skip
        return " ".join(made.command())

    assert "--cuda-graph-max-bs-decode 64" in words()
    assert "--cuda-graph-max-bs" not in words("--cuda-graph-bs-decode", "8", "64")


def test_a_server_that_ends_under_load_is_started_again_for_the_rest(fake, monkeypatch):
    monkeypatch.setenv("FAKE_CRASH_AT", "4")
    code, found = fake("--modes", "none", "--concurrency", "2", "4", "8")
    assert code == 0 and [r["concurrency"] for r in found] == [2, 4, 8]
    assert [r["error"] is None for r in found] == [True, False, True]
    assert "server ended" in found[1]["error"] or "exit code" in found[1]["error"]
    assert len(fake.seen("servers")) == 2


def test_requests_that_fail_are_an_error_and_not_a_figure(fake, monkeypatch):
    monkeypatch.setenv("FAKE_LOSE_AT", "2")
    _, found = fake("--modes", "none", "--concurrency", "2")
    assert "1 of 8 requests failed" in found[0]["error"] and found[0]["output_tok_s"] is None


def test_a_client_that_hangs_is_ended(fake, monkeypatch):
    monkeypatch.setenv("FAKE_HANG_AT", "2")
    _, found = fake("--modes", "none", "--concurrency", "2", "4", "--client-timeout", "2")
    assert "no result after 2 s" in found[0]["error"] and found[1]["error"] is None


def test_a_spent_budget_starts_nothing_more(fake, capsys):
    _, found = fake(*TWO, "--budget", "-1")
    assert not found and not fake.seen("servers") and "4 cases left" in capsys.readouterr().out


def test_no_process_is_left_behind(fake):
    fake("--modes", "none", "--concurrency", "2")
    port = fake.seen("servers")[0]["arguments"]
    port = port[port.index("--port") + 1]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        assert not (str(FAKE).encode() in words and port.encode() in words)


def test_interrupted(fake, tmp_path):
    """SIGTERM: the server goes with it, and the rows so far stay."""
    command = [sys.executable, "-m", "bench.serving", *fake.fixed, "--modes", "none", "--concurrency", "2", "4"]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "FAKE_HANG_AT": "4"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    limit = time.monotonic() + 60
    while len(fake.seen("clients")) < 2:
        assert time.monotonic() < limit and child.poll() is None
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 130 and "interrupted" in error
    found = rows.read(next((tmp_path / "out").glob("*.jsonl")))
    assert [r["concurrency"] for r in found] == [2]


def test_plots(fake, capsys):
    pytest.importorskip("matplotlib")
    fake("--modes", "treewy-tree16", "--concurrency", "2", "--repeats", "2")
    path = next((fake.folder / "out").glob("*.jsonl"))
    for name in ("throughput", "ttft", "requests"):
        assert path.with_name(f"{path.stem}-model-{name}.png").read_bytes().startswith(b"\x89PNG")
        path.with_name(f"{path.stem}-model-{name}.png").unlink()
    capsys.readouterr()
    assert bench.main(["--report", str(path)]) == 0
    assert "treewy-tree16" in capsys.readouterr().out
    assert path.with_name(f"{path.stem}-model-requests.png").exists()


def test_plots_of_errors_alone(tmp_path):
    pytest.importorskip("matplotlib")
    assert "no row without an error" in plots.plot([], tmp_path / "x.jsonl")


def test_table_shows_the_spread_of_repeats(fake):
    _, found = fake("--modes", "none", "--concurrency", "2", "--repeats", "2")
    found[1]["output_tok_s"] = 220.0
    line = plots.table(found).splitlines()[-1]
    assert "210 +-4.8%" in line


@pytest.mark.parametrize(
    "name, nodes, steps, topk",
    [("snapshot-chain4", 4, 3, 1), ("treewy-tree15", 15, 3, 3), ("treewy-tree64", 64, 3, 6), ("treewy-tree16@4x4", 16, 4, 4),
     ("replayssm-chain8", 8, 7, 1), ("treewy-ngram16", 16, None, None), ("none", 0, None, None)],
)  # fmt: skip
def test_modes(name, nodes, steps, topk):
    mode = modes.parse(name)
    assert (mode.nodes, mode.steps, mode.topk) == (nodes, steps, topk)
    assert ("--enable-treewy" in mode.arguments) == name.startswith("treewy")
    assert ("--enable-linear-replayssm-spec" in mode.arguments) == name.startswith("replayssm")


def test_options_of_a_mode():
    mode = modes.parse("replayssm-chain4+lazy+ratio2.5")
    assert mode.name == "replayssm-chain4+lazy+ratio2.5" and mode.nodes == 4 and mode.simulated("published") == 3.2
    assert mode.arguments[-5:] == [
        "--enable-linear-replayssm-spec", "--mamba-radix-cache-strategy", "extra_buffer_lazy", "--mamba-full-memory-ratio", "2.5"]  # fmt: skip
    assert modes.parse("none+ratio2").arguments == ["--mamba-full-memory-ratio", "2"]
    assert modes.parse("treewy-chain4").options == ()
    assert [plots.method_of(name) for name in ("none+ratio2", "treewy-chain4+lazy")] == ["none", "treewy"]


@pytest.mark.parametrize(
    "name",
    [
        "tree",
        "treewy",
        "treewy-chain1",
        "treewy-chain129",
        "replayssm-tree8",
        "treewy-tree64@2x2",
        "treewy-chain4@3x1",
        "eagle-chain4",
        "treewy-chain4+eager",
        "treewy-chain4+ratio0",
        "snapshot-chain4+ratio",
    ],
)
def test_bad_modes_say_what_is_allowed(name):
    with pytest.raises(modes.BadMode, match=re.escape(repr(name))):
        modes.parse(name)


@pytest.mark.parametrize(
    "name, asked, value",
    [("none", "published", None), ("treewy-chain4", "published", 3.2), ("treewy-chain3", "published", 3.0), ("treewy-tree15", "published", 3.38),
     ("treewy-tree40", "published", 3.58), ("treewy-chain8", "published", 3.2), ("treewy-chain4", "real", None),
     ("treewy-chain4", "2.5", 2.5), ("treewy-chain4", "9", 4.0), ("treewy-ngram16", "published", None)],
)  # fmt: skip
def test_simulated_lengths(name, asked, value):
    assert modes.parse(name).simulated(asked) == value


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--memory", "huge"], "allowed: tight or ample"),
        (["--memory", "tight=1.5"], "allowed: a fraction between 0 and 1"),
        (["--memory", "tight=slots:0"], "allowed: a fraction"),
        (["--accept", "0.5"], "--accept is '0.5'; allowed: real"),
        (["--modes", "eagle"], "allowed: none"),
        (["--concurrency", "0"], "--concurrency is [0]; allowed"),
        (["--rounds", "0"], "--rounds is 0; allowed"),
        (["--dims", "35B"], "allowed: one of the two"),
    ],
)
def test_wrong_options_end_before_anything_starts(fake, capsys, arguments, words):
    code, found = fake(*arguments)
    assert code == 2 and not found and not fake.seen("servers")
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_complete(name):
    args = bench.fill(bench.parser().parse_args(["--preset", name]))
    plan = bench.cases(args, "model")
    assert plan and all(len({c.server for c in group}) == 1 for group in plan.values())
    if args.device == "cuda":
        assert set(server.OFFLINE) <= set(args.server_args) and args.dims
        assert not (args.quick and args.dims == "27B")  # which is a Qwen3.5
    given = bench.fill(bench.parser().parse_args(["--preset", name, "--concurrency", "3", "--modes", "none"]))
    assert given.concurrency == [3] and given.modes == ["none"]


def test_memory_of_the_presets_is_what_the_planner_says():
    from treewy_sglang.planner import Draft, Server, load, plan

    def running(fraction):
        server_ = Server(gpu_memory=139.2, mem_fraction=fraction, tp=1, requests=256)
        return plan(load("35B"), Draft.make(nodes=4), server_).fits["snapshot"].max_running

    assert presets.PRESETS["tight"]["memory"] == ["tight=0.66"] and running(0.66) == 20
    assert presets.PRESETS["tightest"]["memory"] == ["tight=0.59"] and running(0.59) <= 12


@pytest.mark.parametrize("dims", ["35B", "397B", "27B"])
def test_a_dummy_checkpoint_has_the_dimensions(tmp_path, dims):
    from bench.serving.model import dummy_config, write_dummy
    from treewy_sglang.planner import from_config, load

    known = load(dims)
    found = from_config(dummy_config(known))
    for field in known.__dataclass_fields__:
        if field not in ("name", "source", "mlp_width"):
            assert getattr(found, field) == getattr(known, field), field
    if dims == "35B":
        path = write_dummy(tmp_path / "m", dims, layers=4)
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 4
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        ids = set(tokenizer["model"]["vocab"].values()) | {t["id"] for t in tokenizer["added_tokens"]}
        assert ids == set(range(known.vocabulary))
        stamp = (path / "tokenizer.json").stat().st_mtime_ns
        write_dummy(path, dims, layers=4)
        assert (path / "tokenizer.json").stat().st_mtime_ns == stamp  # not written again


def test_the_tokenizer_gives_random_prompts_the_whole_vocabulary(tmp_path):
    transformers = pytest.importorskip("transformers")
    from bench.serving.model import write_dummy

    tokenizer = transformers.AutoTokenizer.from_pretrained(write_dummy(tmp_path / "m", "35B"))
    assert tokenizer.vocab_size == 248320 - 3
    assert tokenizer.decode([72, 105]) == "Hi" and tokenizer.decode([200000])


def test_a_server_on_a_gpu(tmp_path):
    made = server.make(
        modes.parse("replayssm-chain4"), server.Setting("tight", 0.6), tmp_path, tmp_path / "log", device="cuda", dtype="bfloat16",
        requests=32, accept=3.2, dummy=True, context_length=4096, arguments=server.OFFLINE, timeout=1.0, python="python3",
    )  # fmt: skip
    text = " ".join(made.command())
    for words in ("--load-format dummy", "--cuda-graph-max-bs-decode 32", "--dtype bfloat16", "--mem-fraction-static 0.6",
                  "--context-length 4096", "--enable-linear-replayssm-spec", "--disable-prefill-cuda-graph"):  # fmt: skip
        assert words in text
    env = made.child_environment()
    assert env["SGLANG_SIMULATE_ACC_LEN"] == "3.2" and env["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_logs_are_read():
    log = (
        LOG
        + "[x] Decode batch, #running-req: 12, #full token: 9\n[x] Prefill batch, #new-seq: 4, #new-token: 3, #running-req: 9, #queue\n"
    )
    assert server.started(log) == {
        "max_total_num_tokens": 600000,
        "max_running_requests": 20,
        "max_mamba_cache_size": 101,
    }
    assert server.during(log) == {"running_max": 13, "retractions": 0}
    assert server.during("") == {"running_max": None, "retractions": 0}


LOG = (
    "[x] Mamba Cache is allocated. max_mamba_cache_size: 101, conv_state size: 0.28GB\n"
    "[x] max_total_num_tokens=600000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=20, context_len=4096\n"
)
