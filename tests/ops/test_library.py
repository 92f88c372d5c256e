"""The border: what importing does, what the library links, what the schemas say, opcheck of every operator."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops_common import F32, verify_layers

import treewy_sglang
from treewy_sglang import check_errors, errors, ops, tree
from treewy_sglang.testing import make_inputs

PACKAGE = Path(treewy_sglang.__file__).parent

QUIET_IMPORT = """
import sys
sys.path.insert(0, {path!r})

def refuse(*a, **k):
    raise SystemExit(f"importing treewy_sglang called something it must not: {{a}}")

import treewy_sglang
assert "torch" not in sys.modules, "the package alone must not load torch"
import torch
def driver_loaded():
    return os.path.exists("/proc/self/maps") and "libcuda.so" in open("/proc/self/maps").read()
import os, socket, subprocess
before = driver_loaded()  # torch itself loads it where there is one
subprocess.Popen.__init__ = refuse
os.system = os.posix_spawn = os.fork = refuse
socket.socket.connect = socket.getaddrinfo = refuse
torch.cuda._lazy_init = refuse
torch._C._cuda_init = refuse
from treewy_sglang import Stash, check_errors, errors, ops, reference, stash, testing, tree
assert not torch.cuda.is_initialized()
assert driver_loaded() == before, "importing loaded the CUDA driver"
assert torch.ops.treewy.commit is not None
print("quiet")
"""


def test_importing_touches_no_cuda_compiler_or_network():
    run = subprocess.run(
        [sys.executable, "-c", QUIET_IMPORT.format(path=str(PACKAGE.parent))], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.strip() == "quiet", run.stdout + run.stderr


def test_library_links_no_python():
    """Any Python with the same torch can load _ops.so."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    text = subprocess.run(["readelf", "-d", str(PACKAGE / "_ops.so")], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert any("torch_cpu" in n for n in needed)
    assert not [n for n in needed if "python" in n or "cuda" in n or "cudart" in n], needed
    symbols = subprocess.run(["readelf", "-Ws", "--dyn-syms", str(PACKAGE / "_ops.so")], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"UND Py|UND _Py", symbols)


def test_schemas_mark_what_is_written():
    written = {
        "tree_verify": ["out", "stash_u", "stash_k", "stash_k_rnorm", "stash_g", "errors"],
        "tree_conv_verify": ["out", "stash_u", "stash_k", "stash_k_rnorm", "stash_g", "stash_conv", "errors"],
        "commit": ["state", "conv_state", "errors"],
        "parents_from_links": ["parents", "ancestors", "errors"],
    }
    for name, expected in written.items():
        schema = getattr(torch.ops.treewy, name).default._schema
        assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == expected
        assert len(schema.returns) == 0


def zeroed(stash):
    for t in (stash.u, stash.k, stash.k_rnorm, stash.g, stash.conv):
        if t is not None:
            t.zero_()
    return stash


def opcheck_args(op, device, chain):
    errors = torch.zeros(8, dtype=torch.int64, device=device)
    x = make_inputs(N=2, T=4, H=1, HV=2, K=64, act=F32, conv=op != "tree_verify", device=device)
    parents = None if chain else x.parents
    out = torch.zeros(8, 2, 64, device=device)
    if op == "tree_verify":
        s = zeroed(x.stash()).layer(0)
        return (*x.args()[:-1], parents, 0.125, out, s.u, s.k, s.k_rnorm, s.g, errors)
    if op == "tree_conv_verify":
        s = zeroed(x.stash(conv=True)).layer(0)
        return (*x.conv_args()[:-1], parents, 0.125, out, s.u, s.k, s.k_rnorm, s.g, s.conv, errors)
    if op == "commit":
        s = verify_layers(x, 1, conv=True)
        track = None if chain else torch.full((2,), -1, device=device)
        conv_pool = None if chain else x.conv_pool
        return (s.u, s.k, s.k_rnorm, s.g, None if chain else s.conv, x.parents, x.accepted, x.state_indices, track, track, x.pool, conv_pool, errors)  # fmt: skip
    links = tree.links_from_parents(tree.random_tree(5, 1))
    as_tensor = lambda l: torch.tensor([l], device=device)
    sets = None if chain else torch.zeros(1, 5, 1, dtype=torch.int32, device=device)
    return (as_tensor(links[0]), as_tensor(links[1]), torch.zeros(1, 5, dtype=torch.int32, device=device), sets, errors)


@pytest.mark.parametrize("chain", [False, True], ids=["all", "optional arguments absent"])
@pytest.mark.parametrize("op", ["tree_verify", "tree_conv_verify", "commit", "parents_from_links"])
def test_opcheck(device, op, chain):
    torch.library.opcheck(getattr(torch.ops.treewy, op).default, opcheck_args(op, device, chain))


def test_fake_tensors_run_through(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in opcheck_args("tree_verify", "cpu", False)]
        assert torch.ops.treewy.tree_verify(*args) is None


def one_verify(device, **changes):
    x = make_inputs(N=2, T=4, H=1, HV=2, K=64, act=F32, device=device)
    for name, value in changes.items():
        setattr(x, name, value)
    ops.tree_verify(*x.args(), x.out(), x.stash().layer(0))


def in_fake_mode(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        errors.counter(device)


def in_inference_mode(device):
    with torch.inference_mode():
        one_verify(device)


def with_a_meta_state(device):
    x = make_inputs(N=2, T=4, H=1, HV=2, K=64, act=F32, device=device)
    args = list(x.args())
    args[7] = args[7].to("meta")
    with pytest.raises(RuntimeError, match="device is meta"):
        ops.tree_verify(*args, x.out(), x.stash().layer(0))


class Verifies(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.x = make_inputs(N=2, T=4, H=1, HV=2, K=64, act=F32, device=device)
        self.out, self.stash = self.x.out(), self.x.stash()

    def forward(self, q):
        ops.tree_verify(q, *self.x.args()[1:], self.out, self.stash.layer(0))
        return q + 0


def in_export(device):
    model = Verifies(device)
    torch.export.export(model, (model.x.q,), strict=True)


def in_a_compiled_function(device):
    model = Verifies(device)
    torch.compile(model, backend="eager", fullgraph=True)(model.x.q)


@pytest.mark.parametrize("first", [in_fake_mode, in_inference_mode, with_a_meta_state, in_export, in_a_compiled_function])
def test_the_first_call_may_come_from_anywhere(device, monkeypatch, first):
    """The error counter is made by the first call on a device, and is kept: a tensor of a tracer would count for nobody,
    and turn every later call into nothing."""
    monkeypatch.setattr(errors, "_counters", {})
    torch._dynamo.reset()
    first(device)
    one_verify(device, state_indices=torch.full((2,), 99, dtype=torch.int32, device=device))
    assert check_errors(device)["state_index"] == 2 and not any(check_errors().values())


def test_cpu_only_build_says_so():
    """CUDA tensors on a build without CUDA: a sentence that names the build and the way out."""
    if treewy_sglang.build_info()["cuda"]:
        return  # nothing to say on a full build
    schema = torch.ops.treewy.tree_verify.default
    with pytest.raises(RuntimeError, match="this build of treewy_sglang is CPU-only. Rebuild it where nvcc is found"):
        # Calling the CUDA kernel by its key needs no GPU.
        schema.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *opcheck_args("tree_verify", "cpu", False))


def test_every_instruction_set_agrees():
    """The lesser variants of the CPU kernels, chosen by TREEWY_CPU_ISA, pass the same checks as the best one."""
    script = """
import sys, torch
sys.path[:0] = {paths!r}
from ops_common import check_verify, verify_layers
from test_commit import check_commit
from treewy_sglang.testing import make_inputs
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
for act, state in ((F32, F32), (BF16, BF16), (F16, F16)):
    for K, T, shape in ((64, 1, "path"), (128, 5, "random"), (256, 9, "topk4"), (64, 40, "path")):
        x = make_inputs(N=2, T=T, H=1, HV=2, K=K, act=act, state=state, shape=shape, conv=True, device="cpu")
        check_verify(x, conv=True)
        check_commit(x, 1, conv=True)
print("agree", torch.ops.treewy.cpu_isa())
"""
    paths = [str(PACKAGE.parent), str(Path(__file__).parent)]
    best = treewy_sglang.build_info()["cpu_isa"]
    for isa in {"avx512": ["baseline", "avx2"], "avx2": ["baseline"], "baseline": []}[best]:
        run = subprocess.run([sys.executable, "-c", script.format(paths=paths)], capture_output=True, text=True, env={**os.environ, "TREEWY_CPU_ISA": isa})  # fmt: skip
        assert run.returncode == 0 and f"agree {isa}" in run.stdout, f"{isa}: {run.stdout}{run.stderr}"


def test_thread_counts_agree(device):
    """The split into tasks depends on the number of threads; the bits do not."""
    if device != "cpu":
        return
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5, 32):
            torch.set_num_threads(threads)
            x = make_inputs(N=1, T=9, H=2, HV=4, K=256, act=F32, conv=True, device=device)
            out, stash = x.out(), zeroed(x.stash(conv=True))
            ops.tree_conv_verify(*x.conv_args(), out, stash.layer(0))
            ops.commit(stash, x.parents, x.accepted, x.state_indices, x.pool, x.conv_pool)
            results.append((out.clone(), stash.u, stash.k, stash.g, x.pool.clone(), x.conv_pool.clone()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_kernels_of_every_vector_width(tmp_path, lanes):
    """The CPU kernels compiled without torch for vectors of any width, that of AVX-512 included, against the recurrence."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    root = Path(__file__).resolve().parents[2]
    sources = [root / "tests/ops/cpu_selfcheck.cpp", root / "csrc/cpu_kernels.cpp", root / "csrc/cpu_launch.cpp"]
    program = tmp_path / "selfcheck"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-Wno-psabi", "-Wno-unknown-pragmas", f"-DTREEWY_VL={lanes}", f"-I{root / 'csrc'}", *map(str, sources), "-o", str(program)],
        check=True,
    )  # fmt: skip
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("all good\n"), run.stdout + run.stderr
