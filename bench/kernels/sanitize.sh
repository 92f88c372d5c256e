#!/usr/bin/env bash
# sanitize.sh [LOG_FOLDER]: compute-sanitizer's memcheck, racecheck and initcheck over small calls of every operator.
# Without torch's caching allocator, so that every tensor is an allocation of its own with bounds of its own.
set -u
here=$(cd "$(dirname "$0")" && pwd)
logs=${1:-.}; mkdir -p "$logs"
python=${PYTHON:-python3}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_MODULE_LOADING=LAZY
command -v compute-sanitizer >/dev/null || { echo "sanitize.sh: compute-sanitizer is not on the PATH" >&2; exit 2; }
declare -A pids
for tool in memcheck racecheck initcheck; do
  timeout "${SANITIZE_SECONDS:-240}" compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 20 \
    "$python" "$here/sanitize.py" > "$logs/sanitize-$tool.log" 2>&1 &
  pids[$tool]=$!
done
status=0
for tool in memcheck racecheck initcheck; do
  wait "${pids[$tool]}"; rc=$?
  case $rc in 0) verdict=clean ;; 9) verdict=FAULTS ;; 124) verdict="not finished in time" ;; *) verdict="failed ($rc)" ;; esac
  echo "$tool: $verdict; $(grep -h 'ERROR SUMMARY\|RACECHECK SUMMARY\|^sanitize:' "$logs/sanitize-$tool.log" | tr '\n' ' ')"
  [ $rc = 0 ] || status=1
done
exit $status
