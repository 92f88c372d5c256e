#!/bin/sh
# Arguments that begin with a dash are those of sglang.launch_server; anything else is a command to run instead.
#
# HOST, PORT   where the server listens in the container; the health check asks at the same port
# DEVICE       cuda or cpu, as the image was built; --device among the arguments wins
set -eu

stop() {
    echo "treewy image: $1" >&2
    exit 64
}

case "${1-}" in
    "") stop "give the server's arguments, such as --model-path /models/NAME --enable-treewy, or a command, such as treewy doctor" ;;
    -*) ;;
    *) exec "$@" ;;
esac

model="" chosen="" previous=""
for word in "$@"; do
    case "$previous" in
        --model-path | --model) model=$word ;;
    esac
    case "$word" in
        --model-path=* | --model=*) model=${word#*=} ;;
        --device | --device=*) chosen=yes ;;
        --port | --port=*) stop "--port is set from the variable PORT (now $PORT), which the health check reads too: docker run -e PORT=..." ;;
        --host | --host=*) stop "--host is set from the variable HOST (now $HOST): docker run -e HOST=..." ;;
    esac
    previous=$word
done

# Without a network a missing file ends in a message about the hub, so the usual slips with mounts are named here.
case "$model" in
    /*)
        [ -e "$model" ] || stop "$model is not in the container; mount the directory of the checkpoint: docker run -v DIR:$model:ro"
        for file in "$model" "$model"/config.json "$model"/*.safetensors; do
            [ ! -e "$file" ] || [ -r "$file" ] || stop "user $(id -u) may not read $file; chmod -R a+rX the checkpoint, or docker run --user"
        done
        ;;
esac

[ -n "$chosen" ] || set -- --device "$DEVICE" "$@"
exec python -m sglang.launch_server --host "$HOST" --port "$PORT" "$@"
