from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import treewy_sglang.patching
from treewy_sglang.cli import main
from treewy_sglang.patching.state import JOURNAL, STAMP

from .conftest import FIELDS, git, make_checkout, make_package, snapshot

SOURCE = Path(treewy_sglang.patching.__file__).parents[2]


@pytest.fixture
def treewy(patches, capsys):
    def call(*arguments, expect=0):
        code = main(["patch", *map(str, arguments), "--patches", str(patches)])
        captured = capsys.readouterr()
        assert code == expect, captured
        assert bool(captured.err) == bool(expect) and bool(captured.out) != bool(expect)
        return (captured.err if expect else captured.out).strip()

    return call


def test_the_whole_way(treewy, package):
    before = snapshot(package)
    assert "applies cleanly" in treewy("check", package)
    assert "Applied 3 patches" in treewy("apply", package)
    assert "Already applied" in treewy("apply", package)
    assert "applied and intact" in treewy("check", package)
    text = treewy("status", package)
    assert "state:   applied" in text and "  patched  srt/pool.py" in text and str(package) in text
    status = json.loads(treewy("status", package, "--json"))
    assert status["state"] == "applied" and status["stamp"]["series"] == status["series"]
    assert status["pin"] == {"tag": "v1.2.3", "version": "1.2.3"} and len(status["files"]) == 7
    assert "Reverted 7 files" in treewy("revert", package)
    assert snapshot(package) == before


def test_exit_codes(treewy, package, tmp_path, patches, capsys, monkeypatch):
    other = make_package(tmp_path / "other", "1.2.4")
    assert treewy("apply", other, expect=1).startswith("treewy patch apply: Not applied, nothing was changed: ")
    treewy("check", other, expect=1)
    assert "state:   wrong-version" in treewy("status", other)
    assert "is not a directory" in treewy("apply", tmp_path / "nowhere", expect=2)
    with pytest.raises(SystemExit) as usage:
        main(["patch", "aply"])
    assert usage.value.code == 2
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_, **__: False)
        assert "No permission to write" in treewy("apply", package, expect=3)
    assert main(["patch", "check", str(package), "--patches", str(tmp_path)]) == 4
    assert "holds no patch series" in capsys.readouterr().err
    (package / JOURNAL).write_text("{}")
    assert "interrupted" in treewy("check", package, expect=1)
    treewy("revert", package)


def test_export_and_import(tmp_path, patches, capsys):
    top = make_checkout(tmp_path / "checkout", edits=())
    assert main(["patch", "import", str(top), "--patches", str(patches)]) == 0
    output = tmp_path / "out"
    assert main(["patch", "export", str(top), "--output", str(output), "--patches", str(patches)]) == 0
    assert {p.name: p.read_bytes() for p in output.iterdir()} == {p.name: p.read_bytes() for p in patches.iterdir()}
    (top / "python/sglang/srt/untouched.py").write_text("x = 3\n")
    git(top, "commit", "-qam", f"More\n\n{FIELDS}")
    assert main(["patch", "export", str(top), "--output", str(output)]) == 0, "the pin comes from the output directory"
    assert "Exported 4 patches" in capsys.readouterr().out


def test_help_names_the_exit_codes(capsys):
    for arguments in (["patch", "--help"], ["patch", "apply", "--help"]):
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 0
        assert "exit codes:" in capsys.readouterr().out


ALONE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "triton", "pybind11"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
from treewy_sglang.cli import main
import treewy_sglang.patching.exporting
code = main(sys.argv[1:])
assert not {"sglang", "torch"} & set(sys.modules)
sys.exit(code)
"""


def run(arguments, code=ALONE, **environment):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    command = [sys.executable, *(["-c", code] if code else ["-m", "treewy_sglang"]), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def test_without_torch_and_without_importing_sglang(package, patches):
    """No TARGET: the sglang of this Python, found and not imported (its __init__ would raise here)."""
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    path = os.pathsep.join([str(package.parent), str(SOURCE)])
    for action in ("check", "apply", "status", "revert"):
        done = run(["patch", action, "--patches", patches], PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        if action == "status":
            assert str(package) in done.stdout and "applied" in done.stdout


def test_python_dash_m(package, patches):
    done = run(["patch", "check", package, "--patches", patches], code=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert "applies cleanly" in done.stdout


def test_no_sglang_anywhere(tmp_path, patches):
    (tmp_path / "sglang").mkdir()  # a bare directory is no package
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n" + ALONE
    done = run(["patch", "status", "--patches", patches], code, PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}")
    assert done.returncode == 2 and "SGLang is not installed for" in done.stderr


def test_pip_keeps_working(tmp_path, patches, treewy):
    """pip installs, checks, uninstalls and installs again, whatever was patched in between."""
    content = make_package(tmp_path / "content").parent
    info = next(content.glob("*.dist-info"))
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel = tmp_path / "sglang-1.2.3-py3-none-any.whl"
    files = sorted(p for p in content.rglob("*") if p.is_file() and p.name != "RECORD")
    names = [str(p.relative_to(content)) for p in files]
    with zipfile.ZipFile(wheel, "w") as zipped:
        for path, name in zip(files, names):
            zipped.write(path, name)
        zipped.writestr(f"{info.name}/RECORD", "".join(f"{n},,\n" for n in [*names, f"{info.name}/RECORD"]))

    venv.create(tmp_path / "env", symlinks=True)
    pip_for = [sys.executable, "-m", "pip", "--no-input", "--python", str(tmp_path / "env" / "bin" / "python")]

    def pip(*arguments):
        done = subprocess.run([*pip_for, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    install = ("install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
    pip(*install)
    root = next((tmp_path / "env/lib").glob("python3*/site-packages/sglang"))
    record = next(root.parent.glob("sglang-*.dist-info/RECORD"))
    before = record.read_bytes()
    treewy("apply", root)
    assert record.read_bytes() == before
    assert "No broken requirements" in pip("check")
    pip("uninstall", "-q", "-y", "sglang")
    left = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert STAMP in left and "srt/pool.py" not in left
    pip(*install)
    treewy("revert", root)
    assert "Applied" in treewy("apply", root)
    treewy("revert", root)
    pip("uninstall", "-q", "-y", "sglang")
    assert not root.exists()
