"""`treewy plan` as it is typed: nothing but the standard library, one object behind JSON and table, errors with exit code 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from treewy_sglang.cli import main
from treewy_sglang.planner import report

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "plan --model 397B-A17B --nodes 4 --state-dtype bfloat16"

# -I -S: no site-packages at all, so that whatever is imported is the standard library's or this package's.
ALONE = """
import sys
sys.path.insert(0, {path!r})
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "sglang", "matplotlib", "transformers"):
            raise ImportError(name + " is blocked by the test")
sys.meta_path.insert(0, Blocked())
sys.argv = ["treewy"] + {arguments!r}
import runpy
try:
    runpy.run_module("treewy_sglang", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
others = {{m.partition(".")[0] for m in sys.modules}} - set(sys.stdlib_module_names) - {{"treewy_sglang", "__main__", "_distutils_hack"}}
assert not others, others
sys.exit(code)
"""


def alone(*arguments):
    code = ALONE.format(path=str(ROOT / "python"), arguments=list(arguments))
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)


def call(capsys, *arguments):
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_runs_where_nothing_is_installed():
    done = alone(*EXAMPLE.split(), "--json")
    assert done.returncode == 0, done.stderr
    d = json.loads(done.stdout)
    assert d["snapshot_bytes_per_node"] == 90 << 20 and d["draft"]["nodes"] == 4
    assert alone("plan", "--help").returncode == 0 and alone("--help").returncode == 0


def test_png_where_matplotlib_is_missing(tmp_path):
    done = alone(*EXAMPLE.split(), "--png", str(tmp_path / "plan.png"))
    assert done.returncode == 2 and not done.stdout
    assert "matplotlib" in done.stderr and "treewy-sglang[plot]" in done.stderr and "Traceback" not in done.stderr


def test_png(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert call(capsys, *EXAMPLE.split(), "--png", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = call(capsys, *EXAMPLE.split(), "--png", str(tmp_path / "nowhere" / "plan.png"))
    assert code == 2 and "--png" in err


def test_sweep_has_every_number_of_nodes():
    from treewy_sglang.planner import Draft, Server, load, plan

    points = list(report.sweep(plan(load("35B"), Draft.make(nodes=4), Server(tp=1, gpu_memory=139.0))))
    assert [x["nodes"] for x in points] == list(range(1, 129))
    assert points[0]["treewy"].running >= points[-1]["treewy"].running > 0


@pytest.mark.parametrize(
    "more",
    [[], ["--tp", "8"], ["--topk", "2"], ["--gpu-memory", "20", "--tp", "1"], ["--algorithm", "NGRAM"], ["--requests", "2000", "--context-length", "512"]],
    ids=" ".join,
)
def test_the_table_says_what_the_json_says(capsys, more):
    code, text, _ = call(capsys, *EXAMPLE.split(), *more)
    assert code == 0
    d = json.loads(call(capsys, *EXAMPLE.split(), *more, "--json")[1])
    assert report.table(d) + "\n" == text
    lines = {
        re.split(r"\s{2,}", line.strip())[0]: re.split(r"\s{2,}", line.strip())[1:]
        for line in text.splitlines()
        if line
    }
    raised = d["methods"]["treewy"]
    from_slots, to_slots = raised["max_mamba_cache_size_raised_from"], raised["max_mamba_cache_size"]
    assert (from_slots is not None) == ("--requests" in more)
    assert (f"raises the state slots from {from_slots} to {to_slots}" in text) == (from_slots is not None)
    methods = [d["methods"][m] for m in ("snapshot", "replayssm", "treewy")]
    assert lines["requests that run at a time"] == [str(m["running_requests"]) if m["served"] else "-" for m in methods]
    for m, cell in zip(methods, lines["state of the draft"]):
        if not m["served"]:
            assert cell == "-"
            continue
        value, unit = cell.split()
        shown = float(value) * 1024 ** ["bytes", "KiB", "MiB", "GiB", "TiB"].index(unit)
        assert shown == pytest.approx(m["draft_bytes_per_request"], rel=0.01)
        assert sum(m["parts"].values()) == m["draft_bytes_per_request"]
        assert (
            m["bytes_per_request"]
            == m["draft_bytes_per_request"] + d["slots_per_request"] * d["state_slot_bytes"] + d["kv_bytes_per_request"]
        )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            "--model nothing --nodes 4",
            "--model is 'nothing'; allowed: a config.json, a directory with one, or one of Qwen3.5-35B-A3B",
        ),
        ("--model 35B", "--nodes is not given; allowed"),
        ("--model 35B --nodes 400", "--nodes is 400; allowed: an integer from 1 to 128"),
        ("--model 35B --nodes 4 --kv-dtype fp2", "--kv-dtype is 'fp2'; allowed: auto"),
        ("--model 35B --nodes 4 --tp 5", "--tp is 5; allowed: 1, 2, 4, 8, 16"),
    ],
)
def test_errors_name_argument_value_and_what_is_allowed(capsys, arguments, words):
    code, out, err = call(capsys, "plan", *arguments.split())
    assert code == 2 and not out
    assert err.startswith("treewy plan: ") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--nodes 4", "--model 35B --nodes four", "--model 35B --tree 2,x"])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments.split()])
    assert end.value.code == 2 and "usage:" in capsys.readouterr().err


def test_tree_in_brackets_and_without():
    from treewy_sglang.planner.command import numbers

    assert numbers("[2, 2, 2]") == numbers("2,2,2") == numbers("2 2 2") == [2, 2, 2]


def examples():
    """Commands and what the page says they print: ```sh blocks that are followed by a ```text block."""
    text = (ROOT / "docs" / "capacity.md").read_text()
    return re.findall(r"```sh\n(.+?)\n```\s+```text\n(.+?)\n```", text, re.S)


def test_the_page_has_examples():
    assert examples()


@pytest.mark.parametrize("command, expected", examples())
def test_examples_of_the_page_print_what_it_says(capsys, command, expected):
    words = command.split()
    assert words[:4] == ["python", "-m", "treewy_sglang", "plan"]
    code, out, err = call(capsys, *words[3:])
    assert code == 0, err
    assert [line.rstrip() for line in out.strip().splitlines()] == [line.rstrip() for line in expected.splitlines()]
