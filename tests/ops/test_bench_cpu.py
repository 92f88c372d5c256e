"""bench/kernels_cpu.py: it times a shape, and refuses to when an operator is wrong."""

import importlib.util
import json
from pathlib import Path

import pytest

ONE_SHAPE = ["kernels_cpu.py", "--quick", "--only", "N  1 H  4 HV  8 chain 4 float32", "--threads", "1", "--clock", "cpu"]


@pytest.fixture
def bench(monkeypatch):
    import torch

    spec = importlib.util.spec_from_file_location("kernels_cpu", Path(__file__).resolve().parents[2] / "bench" / "kernels_cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ONE_SHAPE)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_it_times_and_is_not_slower(bench, capsys):
    assert bench.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["kernel"] for line in lines] == ["verify", "conv", "round"]
    assert all(line["speedup"] >= 1 and line["cpu"] and line["commit"] and line["repeats"] >= 5 for line in lines)


@pytest.mark.parametrize("operator", ["tree_verify", "tree_conv_verify", "commit"])
def test_it_does_not_time_what_is_wrong(bench, capsys, monkeypatch, operator):
    right = getattr(bench.ops, operator)

    def wrong(*args):
        right(*args)
        written = args[4] if operator == "commit" else args[-2]
        written[..., -1, -1] += 1e-3

    monkeypatch.setattr(bench.ops, operator, wrong)
    assert bench.main() == 1
    out = capsys.readouterr().out
    assert "not timed, the check is red" in out and '"speedup"' not in out
