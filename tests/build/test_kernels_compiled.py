"""What the build left: kernels for the architectures that were asked for, none of which spills registers."""

import re
from pathlib import Path

import pytest

import treewy_sglang

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "build" / "ptxas.log"


def kernels(log: str) -> list[tuple[str, str, int, int]]:
    """(kernel, architecture, registers, bytes of spills) for each that ptxas reported."""
    found = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log)[1:]:
        name, arch = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", part).groups()
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", part)))
        registers = re.search(r"Used (\d+) registers", part)
        found.append((name, arch, int(registers[1]) if registers else 0, spills))
    return found


SAMPLE = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onev' for 'sm_90'
ptxas info    : Function properties for _Z3onev
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3twov' for 'sm_90'
ptxas info    : Function properties for _Z3twov
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""


def test_log_is_read():
    assert kernels(SAMPLE) == [("_Z3onev", "sm_90", 168, 16), ("_Z3twov", "sm_90", 32, 0)]


def test_no_kernel_spills():
    if not treewy_sglang.build_info()["cuda"]:
        pytest.skip("built without CUDA: no nvcc, no kernels, or TREEWY_CUDA=0")
    found = kernels(LOG.read_text())
    assert found, f"{LOG} names no kernel"
    spilling = [f"{name} ({arch}): {spills} bytes, {registers} registers" for name, arch, registers, spills in found if spills]
    assert not spilling, "\n".join(spilling)


def test_nvcc_means_kernels():
    """Where nvcc is, `make test` compiles the kernels: a machine with nvcc that tests only the CPU would hide a break."""
    import os
    import shutil

    if not (shutil.which("nvcc") or os.access("/usr/local/cuda/bin/nvcc", os.X_OK)):
        pytest.skip("no nvcc")
    if os.environ.get("TREEWY_CUDA") == "0":
        pytest.skip("TREEWY_CUDA=0")
    assert treewy_sglang.build_info()["cuda"]
