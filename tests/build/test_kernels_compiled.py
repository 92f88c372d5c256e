"""What the build left: kernels for the architectures that were asked for, and none that spills more than is known.

spills.json beside this file lists the kernels that still spill registers on sm_90a, in bytes. A kernel that is not in it
must not spill, one that is may only get better. After an improvement (or a change that is worth its spills):

    python tests/build/test_kernels_compiled.py
"""

import json
import re
from pathlib import Path

import pytest

import treewy_sglang

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "build" / "ptxas.log"
KNOWN = Path(__file__).with_name("spills.json")


def kernels(log: str) -> list[tuple[str, str, int, int]]:
    """(kernel, architecture, registers, bytes of spills) for each that ptxas reported."""
    found = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log)[1:]:
        name, arch = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", part).groups()
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", part)))
        registers = re.search(r"Used (\d+) registers", part)
        found.append((name, arch, int(registers[1]) if registers else 0, spills))
    return found


def short(name: str) -> str:
    """Kernel and template arguments of a mangled name, without namespaces (an unnamed one holds a hash of the path)."""
    found = re.search(r"\d([a-z][a-z_]*_kernel)(?:I(\w+?)E)?Ev", name)
    return name if not found else found[1] + (f"<{found[2]}>" if found[2] else "")


def spilling(log: str) -> dict[str, int]:
    return {f"{short(name)} {arch}": spills for name, arch, _, spills in kernels(log) if spills}


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


def test_names_are_short():
    assert short("_ZN6treewy4cuda41_GLOBAL__N__fc32_9_commit_cu_b113commit_kernelI6__halfLi64EEEvNS1_12CommitLaunchE") == "commit_kernel<6__halfLi64E>"
    assert short("_Z3onev") == "_Z3onev"


def test_no_kernel_spills_more_than_known():
    if not treewy_sglang.build_info()["cuda"]:
        pytest.skip("built without CUDA: no nvcc, no kernels, or TREEWY_CUDA=0")
    log, known = LOG.read_text(), json.loads(KNOWN.read_text())
    assert kernels(log), f"{LOG} names no kernel"
    worse = [
        f"{name}: {spills} bytes, known {known.get(name, 0)}"
        for name, spills in spilling(log).items()
        if name.endswith(" sm_90a") and spills > known.get(name, 0)
    ]
    assert not worse, "\n".join(worse)


def test_every_architecture_holds_every_kernel():
    info = treewy_sglang.build_info()
    if not info["cuda"]:
        pytest.skip("built without CUDA: no nvcc, no kernels, or TREEWY_CUDA=0")
    found: dict[str, dict[str, int]] = {}
    for name, arch, registers, _ in kernels(LOG.read_text()):
        found.setdefault(arch, {})[short(name)] = registers
    asked = {arch.removesuffix("+PTX") for arch in info["architectures"]}
    assert set(found) == asked
    names = set().union(*found.values())
    assert {arch: sorted(names - set(of)) for arch, of in found.items()} == {arch: [] for arch in found}
    # A kernel without room for its shared memory is compiled empty, and so is, elsewhere than on 9.0, one that moves registers
    # between warpgroups. Where shared memory is largest only the latter are.
    empty = {arch: [name for name, registers in of.items() if registers < 16] for arch, of in found.items()}
    for arch, of in empty.items():
        assert all(name.startswith(("verify_stream_kernel", "verify_long_kernel")) for name in of), arch
        assert not arch.startswith("sm_90") or not of, of
        if arch.startswith("sm_10"):
            assert all(moves_registers(name) for name in of), of


def moves_registers(name: str) -> bool:
    """Twelve consumers and a convolution, or eight producers beside 64 nodes: csrc/cuda/verify_parts.cuh, Options."""
    tiles, conv, options = re.search(r"VerifyTileILi\d+ELi(\d+)ELb\dELb(\d)ELi(\d+)E", name).groups()
    return bool(int(options) & 64) or (conv == "1" and bool(int(options) & 32))


def test_nvcc_means_kernels():
    """Where nvcc is, `make test` compiles the kernels: a machine with nvcc that tests only the CPU would hide a break."""
    import os
    import shutil

    if not (shutil.which("nvcc") or os.access("/usr/local/cuda/bin/nvcc", os.X_OK)):
        pytest.skip("no nvcc")
    if os.environ.get("TREEWY_CUDA") == "0":
        pytest.skip("TREEWY_CUDA=0")
    assert treewy_sglang.build_info()["cuda"]


if __name__ == "__main__":
    found = {name: spills for name, spills in spilling(LOG.read_text()).items() if name.endswith(" sm_90a")}
    KNOWN.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(f"{KNOWN}: {len(found)} kernels")
