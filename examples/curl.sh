#!/bin/sh
# Ask a running server with curl: a chat answer, the same as a stream, and what the server says of its drafts.
#
#   sh examples/curl.sh "What is a draft?"
#
# TREEWY_URL names the server (default http://127.0.0.1:30000, as `make serve` leaves it).
set -eu
url=${TREEWY_URL:-http://127.0.0.1:30000}
prompt=${1:-What is a draft?}

# JSON wants quotes and backslashes escaped.
text=$(printf '%s' "$prompt" | sed 's/\\/\\\\/g; s/"/\\"/g')
body="\"model\": \"default\", \"max_tokens\": 64, \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"$text\"}]"

ask() {
    curl -sS --fail "$url$1" -H 'Content-Type: application/json' ${2:+-d "$2"}
    echo
}

echo "chat:"
ask /v1/chat/completions "{$body}"

echo "streamed:"
ask /v1/chat/completions "{$body, \"stream\": true}"

echo "drafts, from /server_info:"
ask /server_info | grep -o '"requests_verified":[0-9]*\|"nodes_verified":[0-9]*\|"stash_bytes_per_request":[0-9]*'
