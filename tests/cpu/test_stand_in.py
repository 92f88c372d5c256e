"""The stand-in sgl_kernel: when it takes over, what it registers, and that it imports where the wheel cannot."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from treewy_sglang.sglang import after_import
from treewy_sglang.sglang.cpu import adapters, bootstrap

PYTHON = Path(bootstrap.__file__).resolve().parents[3]
SERVER = ["/somewhere/sglang/launch_server.py", "--model-path", "m"]


@pytest.mark.parametrize(
    "argv, environ, answer",
    [
        (SERVER + ["--device", "cpu"], {}, True),
        (SERVER + ["--device=cpu"], {}, True),
        (SERVER + ["--device", "cpu", "--device", "cuda"], {}, False),
        (SERVER + ["--device", "cuda"], {"SGLANG_USE_CPU_ENGINE": "1"}, False),
        (SERVER, {}, False),
        (SERVER, {"SGLANG_USE_CPU_ENGINE": "1"}, True),
        (SERVER + ["--device"], {}, False),
        (["-m", "--device", "cpu"], {}, True),
        (["/env/bin/sglang", "serve", "--device", "cpu"], {}, True),
        (["/env/bin/pytest", "--device", "cpu"], {}, False),
        ([], {}, False),
    ],
)
def test_wants_cpu(argv, environ, answer):
    assert bootstrap.wants_cpu(argv, environ) is answer


def fake_wheel(tmp_path, monkeypatch, folders):
    package = tmp_path / "site" / "sgl_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name in folders:
        (package / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])


def test_activate_takes_over_from_a_cuda_wheel(tmp_path, monkeypatch):
    fake_wheel(tmp_path, monkeypatch, ["sm90", "sm100"])
    environ = {"PYTHONPATH": "/a"}
    argv = SERVER + ["--device", "cpu", "--dtype", "float32"]
    assert bootstrap.activate(argv, environ) and bootstrap.activate(argv, environ)
    assert sys.path[0] == str(bootstrap.OVERLAY) and sys.path.count(str(bootstrap.OVERLAY)) == 1
    assert environ["PYTHONPATH"] == os.pathsep.join([str(bootstrap.OVERLAY), "/a"])
    assert environ["SGLANG_USE_CPU_ENGINE"] == "1" and environ["CUDA_VISIBLE_DEVICES"] == ""
    assert environ["SGLANG_MAMBA_CONV_DTYPE"] == "float32" and environ["TORCH_COMPILE_DISABLE"] == "1"
    assert environ["OMP_WAIT_POLICY"] == "passive"


def test_activate_leaves_a_cpu_build_and_other_devices_alone(tmp_path, monkeypatch):
    fake_wheel(tmp_path, monkeypatch, [])
    environ = {}
    assert not bootstrap.activate(SERVER + ["--device", "cpu"], environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") is None
    before = list(sys.path)
    environ = {"PYTHONPATH": "/a"}
    assert not bootstrap.activate(SERVER, environ)
    assert environ == {"PYTHONPATH": "/a"} and sys.path == before


def test_defaults_do_not_override_the_user():
    environ = {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16", "OMP_WAIT_POLICY": "active"}
    bootstrap.set_defaults(["x", "--dtype", "float32", "--enable-torch-compile"], environ)
    assert environ == {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16", "OMP_WAIT_POLICY": "active"}


def run(code, *path):
    inherited = {k: v for k, v in os.environ.items() if k != "TREEWY_CPU_FORK"}
    environ = {**inherited, "PYTHONPATH": os.pathsep.join([*map(str, path), str(PYTHON)]), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)


def test_fork_is_opt_in():
    code = (
        "import multiprocessing, os\n"
        "from treewy_sglang.sglang.cpu import bootstrap\n"
        "on = [bootstrap.start_by_fork(os.environ) for _ in range(2)]\n"
        "multiprocessing.set_start_method('spawn', force=True)\n"
        "print(on, multiprocessing.get_start_method())"
    )
    assert run(code).stdout.strip() == "[False, False] spawn"
    assert run("import os; os.environ['TREEWY_CPU_FORK'] = '1'\n" + code).stdout.strip() == "[True, True] fork"


def test_importing_the_folder_loads_nothing():
    done = run(
        "import sys, treewy_sglang.sglang.cpu.bootstrap, treewy_sglang.sglang.cpu.adapters\n"
        "print([m for m in ('torch', 'sglang', 'sgl_kernel', 'triton') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.skipif(bootstrap.wheel_folder() is None, reason="the wheel of sgl_kernel is not installed")
def test_stand_in_imports_without_a_gpu_and_keeps_the_wheels_python_files():
    done = run(
        "import sgl_kernel, torch, sys\n"
        "from sgl_kernel.scalar_type import scalar_types\n"
        "from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu\n"
        "from sgl_kernel.speculative import reconstruct_indices_from_tree_mask\n"
        "from treewy_sglang.sglang.cpu import bootstrap\n"
        "names = 'fused_gdn_gating_cpu fused_rmsnorm_gated_cpu fused_sigmoid_gating_delta_rule_update_cpu'.split()\n"
        "print(bootstrap.is_active(), all(hasattr(torch.ops.sgl_kernel, n) for n in names))\n"
        # what would make SGLang believe in Intel AMX must not be there
        "print(hasattr(torch.ops.sgl_kernel, 'convert_weight_packed'))",
        bootstrap.OVERLAY,
    )
    assert done.stdout.split() == ["True", "True", "False"], done.stdout + done.stderr


def test_adapters_apply_once_the_module_has_run_and_refuse_another_sglang(tmp_path, monkeypatch):
    (tmp_path / "victim.py").write_text("switch = False\nseen = [1]\n")
    (tmp_path / "stranger.py").write_text("other = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(adapters, "TABLE", {"victim": {"switch": lambda: True}, "stranger": {"switch": lambda: True}})
    monkeypatch.setattr(adapters, "_changes", {name: adapters._apply for name in adapters.TABLE})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    adapters.install()
    adapters.install()
    assert sum(isinstance(f, after_import.Finder) and f.changes is adapters._changes for f in sys.meta_path) == 1
    import victim

    assert victim.switch is True and victim.seen == [1]
    with pytest.raises(ImportError, match="stranger has no switch"):
        import stranger  # noqa: F401
    del sys.modules["victim"]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_adapters_name_things_that_sglang_has():
    """By source text, so that nothing of SGLang is imported."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    for module, values in adapters.TABLE.items():
        text = root.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
        for name in values:
            assert f"\n{name} = " in text or f"\ndef {name}(" in text, f"{module} has no {name}"


class TestOperators:
    """Schemas say what is written; opcheck's schema test runs each operator and compares."""

    @pytest.fixture(autouse=True)
    def load(self):
        if not hasattr(torch.ops.sgl_kernel, "fused_gdn_gating_cpu"):
            from treewy_sglang.sglang.cpu import operators  # noqa: F401

    def check(self, name, *args, **kwargs):
        torch.library.opcheck(getattr(torch.ops.sgl_kernel, name).default, args, kwargs, test_utils="test_schema")

    def test_gdn(self):
        index, starts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
        x, w = torch.randn(6, 5), torch.randn(6, 4)
        states = torch.randn(3, 6, 3)
        self.check(
            "causal_conv1d_fwd_cpu", x, w, None, states, starts, index, torch.tensor([True, False]), True, -1, False
        )
        self.check("causal_conv1d_update_cpu", torch.randn(2, 6), states, w, None, True, None, index, -1, False)
        A_log, dt_bias = torch.zeros(4), torch.zeros(4)
        a, b = torch.randn(5, 4), torch.randn(5, 4)
        self.check("fused_gdn_gating_cpu", A_log, a, b, dt_bias)
        q, k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 4, 8)
        g, beta = torch.ops.sgl_kernel.fused_gdn_gating_cpu(A_log, a, b, dt_bias)
        pool = torch.randn(3, 4, 8, 8)
        self.check("chunk_gated_delta_rule_cpu", q, k, v, g, beta, pool, True, starts, False, True, index)
        self.check(
            "fused_sigmoid_gating_delta_rule_update_cpu",
            A_log, dt_bias, q[:, :2], k[:, :2], v[:, :2], a[:2], b[:2], pool, index, starts, True,
        )  # fmt: skip
        self.check("fused_rmsnorm_gated_cpu", torch.randn(5, 8), torch.ones(8), torch.randn(5, 8), 1e-6)

    def test_qwen3_5(self):
        generator = torch.Generator().manual_seed(0)
        qkvz, ba = torch.randn(3, 2 * 16 + 4 * 8 * 2, generator=generator), torch.randn(3, 8, generator=generator)
        self.check("fused_qkvzba_split_reshape_cat_contiguous_cpu", qkvz, ba, 2, 4, 8, 8)
        qkv, z, b, a = torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 2, 4, 8, 8)
        assert torch.equal(torch.cat([qkv, z.flatten(1)], 1), qkvz) and torch.equal(torch.cat([b, a], 1), ba)
        q_gate, k = torch.randn(3, 4 * 2 * 8, generator=generator), torch.randn(3, 16, generator=generator)
        w, u = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
        self.check("fused_qk_gemma_rmsnorm_with_gate_cpu", q_gate, k, w, u, 1e-6, 8, 4)
        self.check("fused_qk_gemma_rmsnorm_cpu", q_gate, k, w, u, 1e-6, 8)
        q, key, gate = torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, w, u, 1e-6, 8, 4)
        heads = q_gate.view(3, 4, 16).double()
        norm = lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
        torch.testing.assert_close(q.view(3, 4, 8).double(), norm(heads[..., :8], w), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(key.view(3, 2, 8).double(), norm(k.view(3, 2, 8).double(), u), rtol=2e-6, atol=1e-6)
        assert torch.equal(gate.view(3, 4, 8), q_gate.view(3, 4, 16)[..., 8:])
        x, strided = torch.randn(3, 32, generator=generator), q_gate.view(3, 4, 16)[..., 8:]
        truth = x.double() * strided.reshape(3, 32).double().sigmoid()
        out = torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, strided, inplace=True)
        assert out.data_ptr() == x.data_ptr()
        torch.testing.assert_close(x.double(), truth, rtol=2e-6, atol=1e-6)
        with pytest.raises(ValueError, match="inplace is False"):
            torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, strided)

    def test_speculation(self):
        long = lambda *shape: torch.zeros(*shape, dtype=torch.int64)
        tree = lambda: (long(6), long(2, 3), long(2, 3), long(2, 3))
        self.check(
            "build_tree_kernel_efficient_cpu",
            torch.tensor([[-1, 0, 1], [-1, 1, 0]]), torch.tensor([[0, 2], [0, 1]]), torch.tensor([4, 2]),
            torch.ones(18, dtype=torch.bool), *tree(), 2, 2, 3, 1,
        )  # fmt: skip
        mask = torch.ones(2, 3, 3).tril().bool().flatten()
        self.check("reconstruct_indices_from_tree_mask_cpu", mask, torch.tensor([4, 2]), *tree(), 2, 3)
        int32 = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
        child = torch.tensor([[1, 2, -1], [1, 2, -1]])
        self.check(
            "verify_tree_greedy_cpu", int32(6), int32(2, 3), int32(2), long(2, 3), torch.arange(6).view(2, 3), child,
            torch.full((2, 3), -1), long(2, 3),
        )  # fmt: skip
        self.check("fill_bonus_tokens_cpu", long(6), int32(2) + 1, int32(2), 3)
        self.check("fill_accept_out_cache_loc_cpu", torch.tensor([0, -1, 1]), torch.arange(6), long(3))
        one = torch.tensor([1, 0])
        self.check("assign_req_to_token_pool_cpu", one, int32(2, 6), one, one + 2, torch.arange(1, 5), 6)
        self.check("assign_extend_cache_locs_cpu", one, torch.arange(12).view(2, 6), one, one + 2, long(4), 6)
        self.check("assign_draft_cache_locs_contiguous_cpu", one, torch.arange(12).view(2, 6), one, long(4), 6, 2, 1)

    def test_copy_reads_all_before_it_writes_any(self):
        buffers = [torch.arange(40, dtype=torch.float32).view(10, 4), torch.arange(20, dtype=torch.int16).view(10, 2)]
        expected = [b.clone() for b in buffers]
        source, target = torch.tensor([5, 3, 9]), torch.tensor([3, 4, 5], dtype=torch.int32)
        for b in expected:
            b[target.long()] = b[source].clone()
        torch.ops.sgl_kernel.copy_all_layer_kv_cache_cpu(
            torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
            torch.tensor([b.stride(0) * b.element_size() for b in buffers]),
            target,
            source,
        )
        assert all(torch.equal(a, b) for a, b in zip(buffers, expected))
        torch.ops.sgl_kernel.copy_all_layer_kv_cache_cpu(
            torch.tensor([1], dtype=torch.uint64), torch.tensor([8]), target[:0], source[:0]
        )

    def test_bad_requests_are_named(self):
        x = torch.randn(1, 1, 1, 8)
        with pytest.raises(ValueError, match="head_first is True"):
            torch.ops.sgl_kernel.chunk_gated_delta_rule_cpu(
                x, x, x, x[..., 0], x[..., 0], torch.zeros(1, 1, 8, 8), True, torch.tensor([0, 1]), True, True,
                torch.tensor([0]),
            )  # fmt: skip
        with pytest.raises(ValueError, match="softplus_threshold 5.0"):
            torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
                torch.zeros(1), torch.zeros(1), x, x, x, x[0, :, :, 0], x[0, :, :, 0], torch.zeros(1, 1, 8, 8),
                torch.tensor([0]), torch.tensor([0, 1]), True, 1.0, 5.0,
            )  # fmt: skip
