"""Stands in for `sglang.launch_server` and `sglang.bench_serving`: what bench/serving needs of either, without a model.

Run as `python fake_server.py -m sglang.launch_server ARGS`, or `... -c CODE` where CODE imports SGLang's client; FAKE_* in
the environment make it misbehave.
"""

import http.server
import json
import os
import sys
import time
import types

LOG = """\
[2026-01-01 00:00:00] Mamba Cache is allocated. max_mamba_cache_size: 101, conv_state size: 0.1GB, ssm_state size: 1.0GB
[2026-01-01 00:00:00] max_total_num_tokens=16384, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=20, context_len=4096
"""


def note(name, text):
    with open(os.path.join(os.environ["FAKE_FOLDER"], name), "a") as f:
        f.write(text + "\n")


def value(arguments, name):
    return arguments[arguments.index(name) + 1]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os._exit(3)
        if self.path == "/work":
            print(
                "[2026-01-01 00:00:01] Prefill batch, #new-seq: 2, #new-token: 9, #running-req: 5, #queue-req: 0",
                flush=True,
            )
            print("[2026-01-01 00:00:02] Decode batch, #running-req: 6, #full token: 89, accept len: 1.38", flush=True)
            print(
                "[2026-01-01 00:00:03] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 7",
                flush=True,
            )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def serve(arguments):
    note("servers", json.dumps({"arguments": arguments, "accept": os.environ.get("SGLANG_SIMULATE_ACC_LEN")}))
    if os.environ.get("FAKE_FAILS_AT") and os.environ["FAKE_FAILS_AT"] in arguments:
        print(
            "Traceback (most recent call last):\nRuntimeError: Not enough GPU memory for hybrid state cache.",
            flush=True,
        )
        return 1
    print(LOG, end="", flush=True)
    port = int(value(arguments, "--port"))
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def drive(arguments):
    import urllib.request

    note("clients", json.dumps(arguments))
    url, concurrency = value(arguments, "--base-url"), int(value(arguments, "--max-concurrency"))
    prompts = int(value(arguments, "--num-prompts"))
    urllib.request.urlopen(url + "/work").read()
    print(f"50%|#####     | {prompts // 2}/{prompts} [00:01<00:01]", flush=True)
    if os.environ.get("FAKE_CRASH_AT") == str(concurrency):
        try:
            urllib.request.urlopen(url + "/crash").read()
        except OSError:
            pass
        time.sleep(1)
        print("ConnectionRefusedError: the server is gone", flush=True)
        return 1
    if os.environ.get("FAKE_HANG_AT") == str(concurrency):
        time.sleep(600)
    errors = [""] * prompts
    if os.environ.get("FAKE_LOSE_AT") == str(concurrency):
        errors[0] = "Traceback: request was refused"
    result = {
        "accept_length": 3.2049, "output_throughput": 100.0 * concurrency, "median_ttft_ms": 10.004, "p99_ttft_ms": 50.0,
        "median_tpot_ms": 5.5551, "p99_tpot_ms": 9.0, "duration": 2.0, "completed": prompts, "errors": errors,
    }  # fmt: skip
    with open(value(arguments, "--output-file"), "a") as f:
        f.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        client = types.ModuleType("sglang.benchmark.serving")
        client.cli_main = lambda: sys.exit(drive(sys.argv[1:]))
        sys.modules.update({"sglang": types.ModuleType("sglang"), "sglang.benchmark": types.ModuleType("x"), client.__name__: client})
        exec(sys.argv[2])
    else:
        module, arguments = sys.argv[2], sys.argv[3:]
        sys.exit({"sglang.launch_server": serve}[module](arguments))
