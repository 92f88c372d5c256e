#!/usr/bin/env bash
# ab.sh OUT: correctness, racecheck and times of the candidate kernels (csrc/cuda/verify_variants.h), under four minutes on one GPU.
#
# The GPU tests and racecheck of every variant run side by side first, then the A/B table has the GPU to itself.
#   VARIANTS (default "1 20 2 32"), SIDE_SECONDS (default 75), AB_SECONDS (default 120), PYTHON (default python3)
#   SANITIZE_BINARY  made before with tests/cuda/sanitize.sh --build FILE; else it is built here, which takes minutes
set -u
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:?OUT folder}" && cd "$1" && pwd)
python=${PYTHON:-python3}
side=${SIDE_SECONDS:-75}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
status=0
binary=${SANITIZE_BINARY:-}
if [ -z "$binary" ]; then binary=$out/sanitize; NVCC=${NVCC:-nvcc} ARCH=${ARCH:-native} bash tests/cuda/sanitize.sh --build "$binary" || exit 2; fi
pids=() names=()
start() { names+=("$1"); shift; timeout "$side" "$@" & pids+=($!); }
for v in 0 ${VARIANTS:-1 20 2 32}; do
  start "results $v" env TREEWY_VARIANT="$v" "$binary" 128 > "$out/results-$v.log" 2>&1
  # Variants differ at these sizes: 4 and 16 nodes, 17 to 33, 65 and more.
  start "racecheck $v" env TREEWY_VARIANT="$v" compute-sanitizer --tool racecheck --error-exitcode 9 --print-limit 20 "$binary" 65 \
    > "$out/racecheck-$v.log" 2>&1
  start "tests $v" env TREEWY_VARIANT="$v" "$python" -m pytest tests/ops/test_verify.py tests/ops/test_tree.py tests/ops/test_commit.py \
    --device cuda --require-gpu -q -x -p no:cacheprovider > "$out/tests-$v.log" 2>&1
done
for i in "${!pids[@]}"; do
  wait "${pids[$i]}"; rc=$?
  log=$out/$(echo "${names[$i]}" | tr ' ' '-').log
  [ $rc = 0 ] && verdict=clean || { verdict="failed ($rc)"; [ $rc = 124 ] && verdict="not finished in $side s"; status=1; }
  printf '%-14s %s; %s\n' "${names[$i]}" "$verdict" "$(tail -n 1 "$log" | cut -c1-150)"
done
"$python" -m bench.kernels.ab --budget "${AB_SECONDS:-120}" --out "$out/ab.jsonl" 2>&1 | tee "$out/ab.log"
[ "${PIPESTATUS[0]}" = 0 ] || status=1
exit $status
