"""One SGLang server as a child process: start, wait until it answers, ask, stop. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Mode:
    """How drafts are made. `nodes` is the size of the tree that one verify reads, 0 without drafts."""

    name: str
    nodes: int = 0
    arguments: tuple[str, ...] = ()

    @property
    def speculative(self) -> bool:
        return self.nodes > 0


def _nextn(name: str, steps: int, topk: int, nodes: int) -> Mode:
    values = {"algorithm": "NEXTN", "num-steps": steps, "eagle-topk": topk, "num-draft-tokens": nodes}
    return Mode(name, nodes, tuple(w for key, value in values.items() for w in (f"--speculative-{key}", str(value))))


def _ngram(name: str, nodes: int) -> Mode:
    return Mode(name, nodes, ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(nodes)))


PLAIN = Mode("no drafts")
CHAIN3 = _nextn("NEXTN chain of 3", steps=3, topk=1, nodes=4)
TREE16 = _nextn("NEXTN tree, topk 4, 16 nodes", steps=4, topk=4, nodes=16)
TREE64 = _nextn("NEXTN tree, topk 8, 64 nodes", steps=5, topk=8, nodes=64)
NGRAM16 = _ngram("NGRAM tree, 16 nodes", nodes=16)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def other_models(python: str) -> list[str]:
    """Model files of SGLang that this model does not need; importing all of them takes longer than all the rest."""
    code = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    models = Path(found.stdout.strip() or ".") / "srt" / "models"
    return sorted(f.stem for f in models.glob("*.py") if f.stem not in ("__init__", "qwen3_next", "qwen3_next_mtp"))


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time; the message holds the end of its log."""


@dataclass
class Server:
    """`python -m sglang.launch_server` on a checkpoint, in `mode`; a context manager."""

    model: Path
    mode: Mode
    log: Path
    device: str = "cpu"
    dtype: str = "float32"
    running: int = 8
    tokens: int = 16384  # of the KV cache; 0: SGLang sizes it and the state slots from memory
    treewy: bool | None = None  # None: where there are drafts
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    host: str = "127.0.0.1"
    port: int = 0
    quick_start: bool = True  # for the small checkpoint
    timeout: float = 600.0
    patience: float = 15.0  # seconds to end by itself when it is stopped
    until: str = ""  # words in the log that end the wait before the server answers
    on_wait: Callable[[str], None] = lambda text: None
    on_start: Callable[[subprocess.Popen], Any] = lambda process: None
    process: subprocess.Popen | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        treewy = self.mode.speculative if self.treewy is None else self.treewy
        sizes = ("--max-total-tokens", str(self.tokens), "--max-mamba-cache-size", str(8 * self.running)) if self.tokens else ()
        return [
            self.python, "-m", "sglang.launch_server", "--model-path", str(self.model), "--host", self.host,
            "--port", str(self.port), "--device", self.device, "--dtype", self.dtype, "--random-seed", "0",
            "--max-running-requests", str(self.running), "--sleep-on-idle", *sizes,
            *self.mode.arguments, *(["--enable-treewy"] if treewy else []), *self.arguments,
        ]  # fmt: skip

    def child_environment(self) -> dict[str, str]:
        env = dict(os.environ)
        # ninja and the compiler are looked up on PATH when SGLang compiles its NGRAM corpus.
        env["PATH"] = os.pathsep.join([str(Path(self.python).parent), env.get("PATH", "")])
        env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
        if self.dtype == "float32":
            env["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # SGLang's default is bfloat16, whatever the model's dtype
        if self.device == "cpu":
            # Server, client and detokenizer share the cores; threads that spin while they wait cost a factor of ten.
            env.setdefault("OMP_WAIT_POLICY", "passive")
            if self.quick_start:
                env.setdefault("OMP_NUM_THREADS", "1")  # the small model's matrices are not worth a second one
        if self.quick_start:
            env.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(other_models(self.python)))
        env.update(self.environment)
        return env

    def start(self) -> "Server":
        self.port = self.port or free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as sink:
            sink.write(f"$ {' '.join(self.command())}\n")
            sink.flush()
            # A session of its own, so that its scheduler and detokenizer are stopped with it.
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                env=self.child_environment(), start_new_session=True,
            )  # fmt: skip
        self.on_start(self.process)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        started = told = time.monotonic()
        while True:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with exit code {self.process.returncode}; {self.log_end()}")
            if self.until and self.until in self.log_text():
                return
            now = time.monotonic()
            if now - started > self.timeout:
                raise ServerFailed(f"the server does not answer after {self.timeout:.0f} s; {self.log_end()}")
            if now - told >= 10:
                told = now
                self.on_wait(f"{now - started:.0f} s: {self._last_line()}")
            try:
                # Answers once a first token has been generated.
                with urllib.request.urlopen(f"{self.url}/health_generate", timeout=30) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError, http.client.HTTPException):
                pass
            time.sleep(0.5)

    def stop(self) -> None:
        if self.process is None:
            return
        for sig, patience in ((signal.SIGTERM, self.patience), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, sig)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        # Children that outlived their parent.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_end(self, lines: int = 30) -> str:
        return f"the end of {self.log}:\n  " + "\n  ".join(self.log_text().splitlines()[-lines:])

    def _last_line(self) -> str:
        lines = re.findall(r"^\[\d{4}-[^\]]*\] (.+)$", self.log_text(), re.M)  # log lines, not what libraries print
        return lines[-1][:90] if lines else "Python imports SGLang"

    def request(self, path: str, body: Any = None, timeout: float = 600.0) -> Any:
        """GET, or POST when there is a body; the JSON of the answer, or its text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerFailed(f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            raise ServerFailed(f"{path} failed: {error}; {self.log_end()}") from error
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def generate(self, tokens: Sequence[int], new_tokens: int, **more: Any) -> dict:
        """SGLang's own endpoint, greedy, never stopped by an end token: output_ids and meta_info."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
            **more,
        }
        return self.request("/generate", body)

    def stream(self, tokens: Sequence[int], new_tokens: int, **more: Any) -> Iterator[dict]:
        """The same as server-sent events; closing the iterator closes the connection, which is an abort."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "stream": True,
            **more,
        }
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise ServerFailed(f"/generate answered {reply.status}: {reply.read(500)!r}")
            for line in reply:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def state(self) -> dict:
        """What the scheduler says of itself."""
        return self.request("/server_info")["internal_states"][0]
