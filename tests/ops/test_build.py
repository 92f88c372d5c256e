"""What the build decides and says, without compiling anything."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """setup.py as a module, in a checkout that has one CUDA kernel and, on the PATH, an nvcc that knows three architectures."""
    spec = importlib.util.spec_from_file_location("treewy_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cuda" / "kernel.cu").touch()
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '--version) echo "Cuda compilation tools, release 12.4, V12.4.131";;\n'
        "--list-gpu-arch) echo compute_80; echo compute_86; echo compute_90;;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in ("TREEWY_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    module.nvcc = str(nvcc)
    return module


def test_cuda_is_built_when_nvcc_is_found(build):
    cuda = build.Cuda()
    assert cuda.on and cuda.reason == f"nvcc 12.4 found at {build.nvcc}"
    assert cuda.names() == ["sm_80", "sm_86", "sm_90a"], "defaults that this nvcc does not know are left out"
    assert cuda.flags()[0] == "-gencode=arch=compute_80,code=[sm_80]"


def test_architecture_list(build, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a;9.0+PTX 9.0")
    cuda = build.Cuda()
    assert cuda.names() == ["sm_80", "sm_90a", "sm_90+PTX", "sm_90a"]
    assert cuda.flags()[2] == "-gencode=arch=compute_90,code=[sm_90,compute_90]"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "12.0")
    with pytest.raises(SystemExit, match=r"nvcc 12.4 does not know compute capability 12.0; it knows \['80', '86', '90'\]"):
        build.Cuda()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match="holds 'Hopper'; allowed: numbers such as 9.0"):
        build.Cuda()


def test_switch(build, monkeypatch):
    monkeypatch.setenv("TREEWY_CUDA", "0")
    assert not build.Cuda().on and build.Cuda().reason == "TREEWY_CUDA=0"
    monkeypatch.setenv("TREEWY_CUDA", "1")
    assert build.Cuda().on and build.Cuda().reason.endswith(", TREEWY_CUDA=1")
    monkeypatch.setenv("TREEWY_CUDA", "yes")
    with pytest.raises(SystemExit, match="TREEWY_CUDA is 'yes'; allowed: 0, 1 or unset"):
        build.Cuda()


def test_no_nvcc(build, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    cuda = build.Cuda()
    assert not cuda.on and cuda.reason.startswith("nvcc not found")
    monkeypatch.setenv("TREEWY_CUDA", "1")
    with pytest.raises(SystemExit, match="TREEWY_CUDA=1 asks for CUDA operators, but nvcc not found"):
        build.Cuda()


def test_cuda_home_comes_first(build, monkeypatch, tmp_path):
    other = tmp_path / "toolkit" / "bin"
    other.mkdir(parents=True)
    (other / "nvcc").write_bytes(Path(build.nvcc).read_bytes())
    (other / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(other.parent))
    assert build.Cuda().nvcc == str(other / "nvcc")


def test_words_survive_ninja_and_shell(build):
    assert build.words("-DX=\"a b\"", "$HOME") == "'-DX=\"a b\"' '$$HOME'"
    assert build.path("/a b/c:d$") == "/a$ b/c$:d$$"


def test_one_version(build):
    import treewy_sglang

    assert build.version() == treewy_sglang.__version__
    for name in ("setup.py", "pyproject.toml", "csrc/host.cpp"):
        assert not re.search(r"\b" + re.escape(treewy_sglang.__version__) + r"\b", (ROOT / name).read_text()), name
