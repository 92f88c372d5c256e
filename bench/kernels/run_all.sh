#!/usr/bin/env bash
# run_all.sh OUT: everything that needs a GPU, in one go: the operator tests, exactness, sanitizers, then the benchmark.
#
# For a rented GPU whose minutes count: what does not disturb a timing (tests, sanitizers, compiling the peers' Triton
# kernels) runs side by side first; the benchmark has the GPU to itself. Knobs, from the environment:
#   STEPS          any of "precompile tests accuracy sanitize bench" (default: all)
#   BENCH_SECONDS  no new case after this long (default 240); SIDE_SECONDS limit of tests and sanitizers (default 150)
#   PRECOMPILE_UNTIL  seconds from the start to wait for the compiler, after the benchmark, to fill the cache (default 0)
#   BENCH_ARGS     more arguments for bench.kernels; TRITON_CACHE folder of compiled peers (see precompile.py)
#   CASES, CYCLES  of the accuracy step (default 1000 and 1000); PYTEST_ARGS; PYTHON (default python3)
# Logs go to OUT, rows and plot to OUT/results.
set -u
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:?OUT folder}" && cd "$1" && pwd)
python=${PYTHON:-python3}
steps=" ${STEPS:-precompile tests accuracy sanitize bench} "
side=${SIDE_SECONDS:-150}
cache=${TRITON_CACHE:-/tmp/treewy-triton-cache}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHON="$python"
has() { [[ $steps == *" $1 "* ]]; }
say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

pids=() precompile=
if has precompile; then
  # Slowest first, one process a variant: SGLang's convolution unrolls every node. All of it is CPU work.
  mkdir -p "$cache"
  {
    for draft in tree128 tree64; do for shape in 35B 397B 397B-tp8; do for n in 64 1 4; do
      echo "--shapes $shape --requests $n --drafts $draft"; done; done; done
    for shape in 35B 397B 397B-tp8; do for n in 64 1 4; do
      echo "--shapes $shape --requests $n --drafts chain4 chain8 tree8 tree16 tree32"; done; done
  } > "$out/precompile.txt"
  xargs -a "$out/precompile.txt" -P "${PRECOMPILE_JOBS:-12}" -I{} sh -c \
    "nice -n 10 $python -m bench.kernels.precompile '$cache' {}" > "$out/precompile.log" 2>&1 &
  precompile=$!
fi
if has tests; then
  { timeout "$side" "$python" -m pytest tests/ops tests/cuda --device cuda --require-gpu -q -p no:cacheprovider \
      ${PYTEST_ARGS:-} > "$out/pytest.log" 2>&1; echo "pytest ended with $?" >> "$out/pytest.log"; } &
  pids+=($!)
fi
if has sanitize; then
  SANITIZE_SECONDS=$side bash tests/cuda/sanitize.sh "$out" > "$out/sanitize.log" 2>&1 &
  pids+=($!)
fi
if has accuracy; then
  for what in "accuracy ${CASES:-1000}" "drift ${CYCLES:-1000}"; do
    timeout "$side" "$python" -m bench.kernels --$what --out "$out/results" > "$out/${what% *}.log" 2>&1 &
    pids+=($!)
  done
fi
for pid in "${pids[@]}"; do wait "$pid"; done
if has accuracy; then say "exactness"; cat "$out/accuracy.log" "$out/drift.log"; fi
if has tests; then say "tests"; grep -E '^(FAILED|ERROR)' "$out/pytest.log" | cut -c1-220 | head -30; tail -n 3 "$out/pytest.log"; fi
if has sanitize; then say "sanitizers"; cat "$out/sanitize.log"; fi
if has bench; then
  say "benchmark"
  "$python" -m bench.kernels --triton-cache "$cache" --budget "${BENCH_SECONDS:-240}" --out "$out/results" ${BENCH_ARGS:-} \
    > "$out/bench.log" 2>&1
  say "benchmark ended with $?"; tail -n "${TAIL:-70}" "$out/bench.log"
fi
if [ -n "$precompile" ]; then
  while [ "$SECONDS" -lt "${PRECOMPILE_UNTIL:-0}" ] && kill -0 "$precompile" 2>/dev/null; do sleep 1; done
  kill "$precompile" 2>/dev/null && say "compiling the peers was cut short"
fi
