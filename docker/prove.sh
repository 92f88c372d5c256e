#!/bin/bash
# Builds the CPU image without a container engine and has it answer prompts. Prints one PASS line for each thing shown, ends
# with status 1 at the first that fails, and removes what it made.
#
#   docker/prove.sh [--model DIR] [--work DIR] [--keep] [--built]
#
#   --model DIR   a small Qwen3-Next checkpoint; without it the image makes the one of `make demo`
#   --work DIR    where images, downloads and logs go (50 GB while it commits the image); a directory that is kept makes the next run faster
#   --keep        leave it there; the images are then under DIR/storage
#   --built       with --work: build nothing, take the image that an earlier run has left there
#
# Debian, as root: apt-get install buildah debootstrap. Settings of pip on this machine (index, certificates, proxy) reach the
# build as secrets. SUITE and MIRROR choose another Debian for the base than
# bookworm from debootstrap's own mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
SUITE=${SUITE:-bookworm} MIRROR=${MIRROR:-}
model="" work="" keep=0 built=0
while [ $# -gt 0 ]; do
    case "$1" in
        --model) model=$(realpath "$2"); shift 2 ;;
        --work) mkdir -p "$2"; work=$(realpath "$2"); shift 2 ;;
        --keep) keep=1; shift ;;
        --built) built=1; shift ;;
        *) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 64 ;;
    esac
done

started=$SECONDS log=/dev/null holder="" runner=""
pass() { printf 'PASS  %4d s  %s\n' $((SECONDS - started)) "$*"; }
fail() { echo "FAIL  $*; the end of $log:" >&2; tail -n 40 "$log" >&2; exit 1; }
for need in buildah debootstrap unshare nsenter python3; do
    command -v "$need" > /dev/null || { echo "FAIL  $need is missing: apt-get install buildah debootstrap util-linux python3" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "FAIL  debootstrap and chroot isolation need root" >&2; exit 1; }
work=${work:-$(mktemp -d /var/tmp/treewy-image.XXXXXX)}
free=$(df --output=avail -BG "$work" | tail -n 1 | tr -dc 0-9)
[ $built = 1 ] || [ "$free" -ge 50 ] || { echo "FAIL  $work has $free GB free, 50 are needed" >&2; exit 1; }
mkdir -p "$work/tmp"
export TMPDIR=$work/tmp # buildah's cache mounts lie here too
b() { local verb=$1; shift; buildah --root "$work/storage" --runroot "$work/runroot" "$verb" "$@"; }

descendants() { local child; for child in $(pgrep -P "$1"); do echo "$child"; descendants "$child"; done; }
server() { for p in $(descendants "$runner"); do [ "$(cat "/proc/$p/comm" 2> /dev/null)" != "$1" ] || { echo "$p"; return; }; done; }
cleanup() {
    local p
    if [ -n "$runner" ]; then for p in $(descendants "$runner") "$runner"; do kill -KILL "$p" 2> /dev/null || true; done; fi
    [ -z "$holder" ] || kill "$holder" 2> /dev/null || true
    b umount --all > /dev/null 2>&1 || true
    b rm --all > /dev/null 2>&1 || true
    if [ $keep = 0 ]; then
        b rmi --all --force > /dev/null 2>&1 || true
        umount "$work/storage/overlay" 2> /dev/null || true # the driver mounts it on itself
        # Its own files only: the directory may hold others.
        rm -rf "$work"/{storage,runroot,tmp,base,models,cache,logs} "$work"/{base.log,build.log,pip,ca,image.json,config,before} "$work"/answer-*
        rmdir "$work" 2> /dev/null || true
    fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

make_base() {
    log=$work/base.log
    if ! b inspect --type image localhost/base > /dev/null 2>&1; then
        rm -rf "$work/base"
        debootstrap --variant=minbase "$SUITE" "$work/base" ${MIRROR:+"$MIRROR"} > "$log" 2>&1 || fail "debootstrap $SUITE"
        rm -rf "$work"/base/var/cache/apt/archives/*.deb "$work"/base/var/lib/apt/lists/*
        c=$(b from scratch)
        { b add --quiet "$c" "$work/base" / && b config --cmd /bin/bash "$c" && b commit --quiet --rm "$c" localhost/base; } >> "$log" 2>&1 || fail "base image"
        rm -rf "$work/base"
    fi
    base=localhost/base@$(b inspect --type image --format '{{.FromImageDigest}}' localhost/base)
    pass "base: Debian $SUITE by debootstrap, $base"
}

# Only what holds inside the build: a directory of this machine does not.
settings_of_pip='
import os, shutil, subprocess, sys
work, kept = sys.argv[1], {}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
for line in listed.splitlines():
    name, _, value = line.partition("=")
    name, value = name.rpartition(".")[2], value.strip("\"\x27")
    if name in ("cert", "index-url", "proxy", "trusted-host", "default-timeout", "timeout", "retries"):
        kept[name] = value
    elif name == "extra-index-url":
        kept[name] = " ".join(v for v in value.replace("\\n", " ").split() if v.startswith("http"))
shutil.copyfile(kept.pop("cert", "/etc/ssl/certs/ca-certificates.crt"), f"{work}/ca")
with open(os.open(f"{work}/pip", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as sink:
    sink.write("[global]\ncert = /run/secrets/ca\n" + "".join(f"{k} = {v}\n" for k, v in kept.items() if v))
'
make_image() {
    python3 -c "$settings_of_pip" "$work" || fail "settings of pip"
    commit=$(git rev-parse --short=12 HEAD 2> /dev/null || cat GIT_COMMIT 2> /dev/null || echo unknown)
    git diff --quiet HEAD 2> /dev/null || commit=$commit-dirty
    log=$work/build.log
    b build --isolation chroot --format docker --layers=false --file docker/Dockerfile --tag localhost/treewy:cpu \
        --build-arg BASE_IMAGE="$base" --build-arg DEVICE=cpu --build-arg COMMIT="$commit" \
        --secret id=pip,src="$work/pip" --secret id=ca,src="$work/ca" . > "$log" 2>&1 || fail "build"
    grep -q 'CPU-only operators' "$log" || fail "the build did not say which operators it makes"
    grep -q "'cuda': False" "$log" || fail "the final stage did not look at the operators"
    pass "build: docker/Dockerfile, DEVICE=cpu, commit $commit; CPU-only operators, patches and self-test checked in the last stage"
}

if [ $built = 0 ]; then
    make_base
    make_image
else
    commit=$(b inspect --type image --format '{{index .Docker.Config.Labels "org.opencontainers.image.revision"}}' localhost/treewy:cpu)
    echo "      not built again: the image in $work, of commit $commit"
fi

b inspect --type image localhost/treewy:cpu > "$work/image.json"
python3 - "$work/image.json" "$commit" << 'END' > "$work/config" || fail "configuration of the image"
import json, shlex, sys
config = json.load(open(sys.argv[1]))["Docker"]["config"]
assert config["User"] not in ("", "0", "root", "0:0"), config["User"]
assert list(config["ExposedPorts"]) == ["30000/tcp"], config["ExposedPorts"]
assert set(config["Volumes"]) == {"/models", "/cache"}, config["Volumes"]
assert config["Healthcheck"]["Test"][0] == "CMD", config["Healthcheck"]
assert "HF_HUB_OFFLINE=1" in config["Env"]
assert config["Labels"]["org.opencontainers.image.revision"] == sys.argv[2], config["Labels"]
print("entrypoint=(%s)" % shlex.join(config["Entrypoint"]))
print("health=(%s)" % shlex.join(config["Healthcheck"]["Test"][1:]))
print("user=%s" % shlex.quote(config["User"]))
END
user="" entrypoint=() health=()
# shellcheck source=/dev/null
. "$work/config"
pass "image: user $user, one port, volumes /models and /cache, health check, revision label"

# ---- running it: a network of its own, in which nothing but loopback exists ------------------------------------------------
loopback='import fcntl, signal, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1)); signal.pause()'
unshare --net python3 -c "$loopback" &
holder=$!
inside() { nsenter --net="/proc/$holder/ns/net" "$@"; }
c=$(b from localhost/treewy:cpu)
# buildah would put empty directories over the mounts below; an engine lets the mounts win.
b config --volume /models- --volume /cache- "$c"
root=$(b mount "$c")
rm -rf "$work/models" "$work/cache"
install -d "$work/models" "$work/logs"
install -d -o "${user%%:*}" -g "${user##*:}" "$work/cache"
# Mounts as with `docker run -v`; /models read-only.
in_image() { inside buildah --root "$work/storage" --runroot "$work/runroot" run --isolation chroot \
    --volume "$work/models:/models:${models:-ro}" --volume "$work/cache:/cache" "$c" -- "$@"; }

leaked=$(grep -rlsF -e /run/secrets/ca -e "$work" "$root/etc" "$root/opt/treewy/pip-freeze.txt" "$root/usr/local" || true)
if [ -n "$leaked" ] || [ -e "$root/etc/pip.conf" ] || [ -e "$root/src" ]; then fail "the build's settings are in the image: $leaked"; fi
[ "$(grep -c == "$root/opt/treewy/pip-freeze.txt")" -gt 50 ] || fail "no pip freeze in the image"
grep -qx "sglang==$(sed -n 's/^version: *//p' patches/UPSTREAM)" "$root/opt/treewy/pip-freeze.txt" || fail "SGLang is not the pinned one"
pass "contents: pip freeze recorded, SGLang as in patches/UPSTREAM, no settings of this machine, no sources"

log=$work/logs/doctor.log
in_image "${entrypoint[@]}" treewy doctor --device cpu > "$log" 2>&1 || fail "treewy doctor in the image"
[ "$(in_image "${entrypoint[@]}" id -u 2> /dev/null)" = "${user%%:*}" ] || fail "the entry point does not run as $user"
pass "treewy doctor --device cpu: this image can serve"

if [ -n "$model" ]; then
    cp -r "$model" "$work/models/demo"
else
    log=$work/logs/checkpoint.log
    chown "$user" "$work/models"
    models=rw in_image python -m treewy_sglang.demo.checkpoint /models/demo > "$log" 2>&1 || fail "making a checkpoint in the image"
fi
chmod -R a+rX "$work/models"
if in_image "${health[@]}" > /dev/null 2>&1; then fail "the health check calls a server healthy that does not run"; fi
pass "health check: unhealthy before a server runs"

touch "$work/before"
serve() { # serve NAME ARGUMENTS...: start, wait for the health check, ask, stop
    local name=$1 began=$SECONDS p; shift
    log=$work/logs/$name.log
    in_image "${entrypoint[@]}" --model-path /models/demo --dtype float32 --random-seed 0 --max-running-requests 4 \
        --max-total-tokens 8192 --max-mamba-cache-size 32 --sleep-on-idle "$@" > "$log" 2>&1 &
    runner=$!
    until in_image "${health[@]}" > /dev/null 2>&1; do
        kill -0 $runner 2> /dev/null || fail "$name: the server ended"
        [ $((SECONDS - began)) -lt 600 ] || fail "$name: not healthy after 600 s"
        sleep 2
    done
    pass "$name: health check healthy"
    inside env -u http_proxy -u HTTP_PROXY python3 - "$name" "$work/answer-$name" << 'END' || fail "$name: the question"
import json, sys, urllib.request
name, out = sys.argv[1:]
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:30000" + path, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
answer = ask("/v1/chat/completions", {"model": "default", "max_tokens": 64, "temperature": 0,
                                      "messages": [{"role": "user", "content": "What is a draft?"}]})
text = answer["choices"][0]["message"]["content"]
assert answer["usage"]["completion_tokens"] == 64 and text.strip(), answer
open(out, "w").write(text)
print(f"      {name} answers: {text!r}")
status = ask("/server_info")["internal_states"][0].get("treewy")
if name == "plain":
    assert not status, status
else:
    assert status["verify_calls"] > 0 and status["commit_calls"] > 0 and not any(status["errors"].values()), status
    print(f"      verify_calls {status['verify_calls']}, commit_calls {status['commit_calls']}, errors none")
END
    pass "$name: answers a prompt over HTTP"
    p=$(server tini)
    [ -n "$p" ] || fail "$name: tini does not run"
    [ "$(awk '/^Uid:/ { print $2 }' "/proc/$p/status")" = "${user%%:*}" ] || fail "$name: the server is not of user $user"
    kill -TERM "$p"
    for _ in $(seq 60); do kill -0 $runner 2> /dev/null || break; sleep 0.5; done
    kill -0 $runner 2> /dev/null && fail "$name: still there 30 s after SIGTERM"
    [ -z "$(descendants $runner)" ] || fail "$name: processes are left"
    runner=""
    pass "$name: ends on SIGTERM to tini"
}
serve plain
serve tree --enable-treewy --speculative-algorithm NEXTN --speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16
serve ngram --enable-treewy --speculative-algorithm NGRAM --speculative-num-draft-tokens 16
for name in tree ngram; do cmp -s "$work/answer-plain" "$work/answer-$name" || fail "$name drafts change the answer"; done
pass "the same text without drafts, with a tree of NEXTN drafts, and with NGRAM drafts"
written=$(find "$root" -xdev -newer "$work/before" -user "${user%%:*}" -type f -not -path "$root/tmp/*" -not -path "$root/cache/*" | head -5)
[ -z "$written" ] || fail "written outside /cache and /tmp: $written"
pass "written only below /cache ($(du -sh "$work/cache" | cut -f1)) and /tmp; no network but loopback while it ran"
echo "PASS  all, commit $commit"
