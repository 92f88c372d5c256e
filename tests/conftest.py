"""Options and fixtures of all tests.

--device cpu|cuda   where the operator tests run; the tests themselves are the same
--require-gpu       --device cuda, and a test that would be skipped because no GPU is there fails instead
--wheel FILE        tests/packaging also installs this wheel into an environment of its own and goes all the way to an answer
--image             tests/docker builds the CPU image and gets an answer from it (root, buildah, debootstrap; 50 GB)
"""

import os

import pytest

# Idle OpenMP threads sleep instead of spinning: the tests make thousands of small calls, and on a machine that does
# something else as well, spinning threads take the time away from those that work. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device of the operator tests")
    parser.addoption("--full", action="store_true", help="tests/server at full size: 64 prompts, 512 new tokens, 16 at a time")
    parser.addoption("--require-gpu", action="store_true", help="--device cuda; fail, not skip, where a GPU is missing")
    parser.addoption("--image", action="store_true", help="tests/docker: build the CPU image and get an answer from it")
    parser.addoption("--wheel", metavar="FILE", help="tests/packaging: a built wheel to install and to get an answer from")


def pytest_configure(config):
    if config.getoption("--require-gpu"):
        config.option.device = "cuda"  # operator tests that ran on the CPU would show nothing of the GPU that was asked for


def need_gpu(config):
    """Skip the calling test if no GPU can be used, or fail it under --require-gpu; the reason is the same sentence."""
    import torch

    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    else:
        import treewy_sglang

        if not treewy_sglang.build_info()["cuda"]:
            reason = "treewy_sglang was built without CUDA"
    if reason is not None:
        (pytest.fail if config.getoption("--require-gpu") else pytest.skip)(reason)


@pytest.fixture
def device(request):
    """"cpu" or "cuda", as --device says."""
    name = request.config.getoption("--device")
    if name == "cuda":
        need_gpu(request.config)
    return name


@pytest.fixture
def gpu(request):
    """For tests that only make sense with a GPU, whatever --device says."""
    need_gpu(request.config)
    return "cuda"


@pytest.fixture(autouse=True)
def no_counted_errors(request):
    """Operators count bad values instead of raising; a test that does not look at the counters must leave them at zero."""
    yield
    import sys

    errors = sys.modules.get("treewy_sglang.errors")
    if errors is not None:
        counted = errors.check_errors()
        assert not any(counted.values()), f"the test left error counts behind: {counted}"
