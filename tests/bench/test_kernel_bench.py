"""The parts of bench/kernels that need no GPU: drafts, the yardstick, targets, and that wrong results are seen."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels import __main__ as command  # noqa: E402
from bench.kernels import accuracy, cases, check, report, run, truth  # noqa: E402

from treewy_sglang import reference, tree  # noqa: E402


@pytest.mark.parametrize("draft", cases.DRAFTS)
def test_drafts_and_their_links(draft):
    kind, nodes = cases.parse_draft(draft)
    parents = cases.parents_of(kind, 9, nodes)
    child, sibling = cases.links_of(parents)
    for n in range(9):
        assert tree.parents_from_links(child[n].tolist(), sibling[n].tolist()) == parents[n].tolist()
    accepted, depth = cases.deepest(parents)
    for n in range(9):
        assert len(tree.ancestor_path(parents[n].tolist(), int(accepted[n]))) in (int(depth[n]), int(depth[n]) - 1)


def test_both_truths_agree():
    for s in accuracy.samples(6, seed=3):
        d = accuracy.tensors(s, "cpu")
        q, k, v = (x.flatten(0, 1) for x in truth.split(d["mixed"].reshape(s.N, s.T, -1), s.H, s.HV, s.K, s.K))
        want = reference.recurrence(
            q, k, v, d["a"], d["b"], d["A_log"], d["dt_bias"], d["state"], d["indices"], d["parents"]
        ).out
        got, _ = accuracy.recurrence(s, d, torch.float64)
        torch.testing.assert_close(got.reshape(want.shape), want, rtol=1e-10, atol=1e-12)


def test_every_twentieth_sample_is_a_large_batch():
    """Large batches run kernels that small ones never reach."""
    found = accuracy.samples(60, large=140)
    assert [i for i, s in enumerate(found) if s.N == 140] == [7, 27, 47]
    assert all(s.K == 128 and s.T <= 64 and s.HV > s.H for s in found if s.N == 140) and {s.N for s in found} == {2, 140}
    assert accuracy.large_batch("cpu") == 0 and {s.N for s in accuracy.samples(60)} == {2}


def test_the_matrix_holds_every_case_once():
    todo = cases.matrix(["35B", "397B-tp8", "397B"], cases.REQUESTS, cases.DRAFTS, cases.MODES, "float32")
    assert len(todo) == len(set(todo)) == 3 * 6 * (7 * 3 + 2)  # ReplaySSM: chains only
    assert [c.shape for c in todo] == sorted((c.shape for c in todo), key=["35B", "397B-tp8", "397B"].index)


def test_a_red_check_stops_the_benchmark(monkeypatch, tmp_path, capsys):
    from bench.kernels import __main__ as main

    monkeypatch.setattr(check, "run", lambda *a, **k: ["a planted fault"])
    rc = main.main(["--device", "cpu", "--shapes", "tiny", "--requests", "2", "--drafts", "chain4", "--out", str(tmp_path)])
    assert rc == 1 and "a planted fault" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.jsonl"))


def test_nan_and_one_wrong_head_are_seen():
    want = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    got = want.clone()
    got[1, 2, 3] *= 1.5
    errors = truth.output_errors(got, want)
    assert errors[1, 3] > 0.05 and errors.sum() == errors[1, 3]
    got[0, 0, 0, 0] = float("nan")
    assert truth.output_errors(got, want)[0, 0] == float("inf")


def test_targets_from_rows():
    def row(requests, draft, nodes, mode, verify, commit, **more):
        return dict(gpu="x", commit="y", shape="35B", requests=requests, nodes=nodes, draft=draft, mode=mode,
                    state_dtype="float32", verify_us=verify, conv_us=0.0, commit_us=commit, read_gbps=4400.0,
                    readwrite_gbps=4100.0, **more)  # fmt: skip

    rows = [
        row(64, "chain", 4, "treewy", 40.0, 75.0),
        row(64, "chain", 4, "snapshot", 188.0, 72.0, commit_state_us=69.0),
        row(64, "tree", 16, "treewy", 80.0, 75.0),
    ]
    found = {name: (measured, met) for name, _, measured, met in report.targets(rows)}
    assert found["verify 64 x chain 4, share of read bandwidth"][1] is True
    assert found["verify 64 x tree 16 / chain 4"] == ("2.00", False)
    measured, met = found["verify+commit 64 x chain 4: snapshot / treewy"]
    assert met is True and measured.startswith("2.23")
    assert found["verify+commit 256 x chain 4: snapshot / treewy"] == ("not measured", None)
    assert "MISSED" in report.table(rows)


def test_stash_is_a_fiftieth_of_the_snapshots():
    from treewy_sglang import Stash

    for name in ("35B", "397B-tp8", "397B"):
        shape = cases.SHAPES[name]
        mine = Stash.bytes_per_row(
            layers=1, nodes=1, key_heads=shape.H, value_heads=shape.HV, key_dim=shape.K, value_dim=shape.V, conv_dim=shape.D
        )
        assert mine == cases.stash_bytes_per_node(shape)
        assert mine * 50 <= cases.snapshot_bytes_per_node(shape, "float32")


def test_errors_that_end_a_context():
    assert run.fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not run.fatal(RuntimeError("CUDA out of memory"))


@pytest.mark.parametrize(
    "arguments, words",
    [(["--accuracy", "-3"], "-3; allowed: 1 or more"), (["--drift", "0"], "0; allowed: 1 or more"), (["--requests", "4", "0"], "0; allowed: 1 or more"),
     (["--drafts", "tree16", "foo"], "draft 'foo' is not chainN or treeN")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_runs(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(check, "run", lambda *_, **__: pytest.fail("checked"))
    monkeypatch.setattr(accuracy, "campaign", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


NO_CEILINGS = '{"gpu": "x", "commit": "y", "shape": "35B", "requests": 64, "nodes": 4, "draft": "chain", "mode": "treewy", "state_dtype": "float32"}\n'


@pytest.mark.parametrize("text, words", [(None, "No such file"), ("{\"check\": 1}\n", "shape"), ("not json\n", "Expecting"), ("", "everything missing"), ("3\n", "shape"), (NO_CEILINGS, "read_gbps")])
def test_a_report_of_something_else_is_refused(tmp_path, capsys, text, words):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    assert command.main(["--report", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("bench.kernels: --report") and words in told and len(told.splitlines()) == 1


def test_a_choice_of_nothing_is_refused():
    script = Path(__file__).resolve().parents[2] / "bench" / "kernels_cpu.py"
    done = subprocess.run([sys.executable, str(script), "--only", "zzz"], capture_output=True, text=True)
    assert done.returncode == 2 and "'zzz' is in no label" in done.stderr and "tree 16" in done.stderr
