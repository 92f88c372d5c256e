#!/usr/bin/env bash
# sanitize.sh [LOG_FOLDER]: compute-sanitizer's memcheck, racecheck and initcheck over small calls of every launcher.
#   SANITIZE_BINARY   a binary made before (sanitize.sh --build FILE); default: built now with nvcc for this GPU
#   SANITIZE_SECONDS  limit of each tool (default 300); SANITIZE_NODES largest draft (default 128; racecheck: 65)
#   SANITIZE_REQUESTS of the large batches (default: the number of multiprocessors, which is where their kernels begin; 0: none)
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
build() {  # kernels that setup.py has compiled are linked; otherwise they are compiled here
  local objects=("$root"/build/*/*.cuda.o)
  [ -e "${objects[0]}" ] || objects=("$root"/csrc/cuda/*.cu)
  "${NVCC:-nvcc}" -std=c++17 -O2 -lineinfo -arch="${1:-native}" -I"$root/csrc" "$root/tests/cuda/sanitize.cu" "${objects[@]}" -o "$2"
}
if [ "${1:-}" = --build ]; then build "${ARCH:-sm_90}" "$2"; exit; fi
logs=${1:-.}; mkdir -p "$logs"
command -v compute-sanitizer >/dev/null || { echo "sanitize.sh: compute-sanitizer is not on the PATH" >&2; exit 2; }
binary=${SANITIZE_BINARY:-}
if [ -z "$binary" ]; then binary=$logs/sanitize; build native "$binary" || exit 2; fi
nodes=${SANITIZE_NODES:-128} requests=${SANITIZE_REQUESTS:--1}
"$binary" "$nodes" "$requests" || { echo "sanitize.sh: results are wrong before any tool looks" >&2; exit 1; }
declare -A pids
for tool in memcheck racecheck initcheck; do
  most=$nodes; [ $tool = racecheck ] && [ "$nodes" -gt 65 ] && most=65
  timeout "${SANITIZE_SECONDS:-300}" compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 20 "$binary" "$most" "$requests" \
    > "$logs/sanitize-$tool.log" 2>&1 &
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
