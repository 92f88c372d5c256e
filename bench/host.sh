#!/usr/bin/env bash
# host.sh STEP ...: a rented GPU host, which may have no network and another Python than the operators were built with.
#
#   host.sh prepare SITE OPS            SITE: a folder with an unpacked SGLang, not patched yet; OPS: a _ops.so for this GPU and torch
#   host.sh servers OUT SECONDS LANE... tests/server/matrix, lanes side by side: f32 bf16 sampled load rest memory
#   host.sh kernels OUT SECONDS         operator tests and sanitizers (bench/kernels/run_all.sh)
#   host.sh serving OUT SECONDS         the serving benchmark, alone on the GPU (bench/serving/run_all.sh)
#
# From the environment: SITE (for the last three), PYTHON (python3), PARALLEL servers a lane (4), SIZE options for the matrix, as in
# "new_tokens=256 prompts=32", PRESETS and BENCH_ARGS of the serving benchmark, TREEWY_COMMIT where there is no git.
# A lane goes on where the time of an earlier call was over. A server takes a minute to start, and longer with many beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
step=${1:?STEP: prepare, servers, kernels or serving}; shift
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
onpath() { export PYTHONPATH="$PWD/python:$1${PYTHONPATH:+:$PYTHONPATH}"; }

lane() {
  case $1 in
    f32) echo 'f32-*-extra_buffer' 'f32-*-retract' 'f32-*-no_buffer' 'f32-*' ;;
    bf16) echo bf16-chain3 bf16-tree16 'without*' bf16-adaptive 'bf16-*' ;;
    sampled) echo 'sampled-*' 'grammar-*' 'qwen35-*' refusals ;;
    load) echo 'mixed-*-extra_buffer' 'mixed-*' ;;
    rest) echo 'drift-*' 'long-*' ;;
    memory) echo 'memory-*' ;;
    *) echo "host.sh: no lane $1" >&2; return 2 ;;
  esac
}

case $step in
  prepare)
    site=$(cd "${1:?SITE}" && pwd); cp "${2:?OPS}" python/treewy_sglang/_ops.so
    onpath "$site"
    # Only _host is bound to one Python; the operators are not.
    "$python" - <<'P'
import os, re, subprocess, sysconfig
import pybind11, torch
version = re.search(r'__version__ = "(.+)"', open("python/treewy_sglang/_version.py").read())[1]
facts = {"VERSION": version, "GIT_COMMIT": os.environ.get("TREEWY_COMMIT", "unknown"), "TORCH_VERSION": torch.__version__,
         "COMPILER": "c++", "CUDA_COMPILER": "nvcc", "ARCHITECTURES": "sm_%d%d" % torch.cuda.get_device_capability() if torch.cuda.is_available() else "unknown"}
target = "python/treewy_sglang/_host" + sysconfig.get_config_var("EXT_SUFFIX")
command = ["c++", "-O2", "-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden", "-DTREEWY_WITH_CUDA", "-DTREEWY_X86_VARIANTS", "-Icsrc",
           "-I" + sysconfig.get_paths()["include"], "-I" + pybind11.get_include(), *(f'-DTREEWY_{k}="{v}"' for k, v in facts.items())]
subprocess.run([*command, "csrc/host.cpp", "-o", target], check=True)
P
    "$python" -m treewy_sglang patch apply "$site/sglang"
    "$python" -m compileall -q -j 0 "$site" > /dev/null 2>&1 || true  # a second server then imports in half the time
    "$python" -c 'import treewy_sglang, torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", treewy_sglang.build_info())'
    ;;
  servers)
    out=$(mkdir -p "${1:?OUT}" && cd "$1" && pwd); seconds=${2:?SECONDS}; shift 2
    onpath "${SITE:?the folder with the patched SGLang}"
    work=$out/matrix
    set -f
    # Checkpoints and the unpatched copy once, before lanes that would make them side by side.
    "$python" tests/server/matrix --prepare --work "$work" > "$out/prepare.log" 2>&1
    pids=()
    for name in "$@"; do
      # shellcheck disable=SC2046,SC2086
      timeout --signal=TERM --kill-after=20 $((seconds + 60)) "$python" tests/server/matrix --parallel "${PARALLEL:-4}" --budget "$seconds" \
        --patience 5 --work "$work" ${SIZE:+--set $SIZE} --json "$out/rows-$name.jsonl" --scenarios $(lane "$name") > "$out/$name.log" 2>&1 &
      pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || true; done
    for name in "$@"; do echo "== $name"; grep -E 'FAILED|^(ok|MISSED|failed|not run) ' "$out/$name.log" || true; done
    ;;
  kernels)
    onpath "${SITE:?the folder with the patched SGLang}"
    STEPS=${STEPS:-tests sanitize} SIDE_SECONDS=${2:?SECONDS} bash bench/kernels/run_all.sh "${1:?OUT}"
    ;;
  serving)
    onpath "${SITE:?the folder with the patched SGLang}"
    bash bench/serving/run_all.sh "${1:?OUT}" "${2:?SECONDS}"
    ;;
  *) echo "host.sh: no step $step" >&2; exit 2 ;;
esac
