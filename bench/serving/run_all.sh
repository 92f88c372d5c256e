#!/usr/bin/env bash
# run_all.sh OUT [SECONDS=1400]: the serving benchmark on a rented H200, as much of it as fits, most wanted first.
#
# Needs a Python with the pinned SGLang, patched (`treewy patch apply`), and no network: the model is a config.json with
# dummy weights. OUT may hold the rows of an earlier stay: what they have is not measured again. A stay that is cut short
# leaves whole rows. Knobs, from the environment:
#   PRESETS   in order (default: those below; `python -m bench.serving --list-presets` says what each is)
#   PYTHON    the Python (default python3)
#   BENCH_ARGS  more arguments for bench.serving, e.g. "--repeats 1"
#   LEAST     seconds that must be left to start a server (default 120: a start, and one short case)
set -u
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:?OUT folder}" && cd "$1" && pwd)
limit=${2:-1400}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
for preset in ${PRESETS:-tight split ample trees tightest best trees-wide best-dense}; do
  left=$((limit - SECONDS))
  if ((left < ${LEAST:-120})); then echo "[$SECONDS s] $preset: no time left"; continue; fi
  echo "[$SECONDS s] $preset"
  # A server that started just before the budget ran out still has to serve: hence the second, harder limit.
  timeout --signal=TERM --kill-after=30 "$((left + 90))" "$python" -m bench.serving --preset "$preset" --budget "$left" \
    --least "${LEAST:-120}" --out "$out" --logs "$out/logs" ${BENCH_ARGS:-} > "$out/$preset.log" 2>&1
  echo "[$SECONDS s] $preset ended with $?"
  tr '\r' '\n' < "$out/$preset.log" | grep -v -E '^ *(cases|server)' | tail -n "${TAIL:-40}"
done
