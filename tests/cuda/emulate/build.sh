#!/usr/bin/env bash
# build.sh BINARY: the kernels and sanitize.cu (or PROGRAM), compiled for the host (x86-64, g++ 12 or newer); no GPU, no CUDA toolkit.
set -eu
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../../.." && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work/csrc/cuda"
cp "$root/csrc/params.h" "$work/csrc/"
"${PYTHON:-python3}" - "$root/csrc/cuda" "$work/csrc/cuda" <<'P'
import pathlib, re, sys
for f in pathlib.Path(sys.argv[1]).iterdir():
    if f.name == "ptx.cuh": continue
    s = f.read_text().replace("extern __shared__", "extern").replace("__shared__", "static")
    s = re.sub(r"((?:\w+::)*\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\((.*?)\);", r"emu::launch([=] { \1(\3); }, \2);", s, flags=re.S)
    pathlib.Path(sys.argv[2], f.stem + ".cu.cpp" if f.suffix == ".cu" else f.name).write_text(s)
P
cp "$here/ptx.cuh" "$work/csrc/cuda/"
flags="-std=c++17 ${EMULATE_OPT:--O1} -march=native -D__CUDA_ARCH__=900 -Wno-unknown-pragmas -fno-strict-aliasing -I$here -I$work/csrc"
cache=${EMULATE_CACHE:-$work/cache}; mkdir -p "$cache"; objects=()
cp "${PROGRAM:-$root/tests/cuda/sanitize.cu}" "$work/program.cpp"; cp "$here/emulate.cpp" "$work/"
for f in "$work"/csrc/cuda/*.cu.cpp "$work"/emulate.cpp "$work"/program.cpp; do  # objects are kept by what the preprocessor makes of a file
  key=$(${CXX:-g++} $flags -E -P "$f" | sha256sum | cut -c1-20)
  [ -e "$cache/$key.o" ] || ${CXX:-g++} $flags -c "$f" -o "$cache/$key.o"
  objects+=("$cache/$key.o")
done
${CXX:-g++} "${objects[@]}" -o "$1"
