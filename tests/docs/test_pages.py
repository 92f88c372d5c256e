"""What the pages claim is what the code says: refusals, flags, messages, figures, the worked example."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "treewy_sglang"
GLUE = PACKAGE / "sglang"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert found, f"there is no section {title!r}"
    return found[1]


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- text of the code ----------------------------------------------------------------------------------------------------


def constants(body: list[ast.stmt]) -> dict[str, str]:
    """Names that are given a literal, as text."""
    return {
        target.id: str(statement.value.value)
        for statement in body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def pattern(node: ast.expr, names: dict[str, str]) -> str | None:
    """A regular expression for a string of the source: what is put in may be anything, names of `names` their text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(re.escape(part.value))
            else:
                known = isinstance(part.value, ast.Name) and part.value.id in names
                parts.append(re.escape(names[part.value.id]) if known else "(.+)")
        return "".join(parts)
    return None


def refusals() -> dict[str, str]:
    """{pattern: place} of every sentence that config.py, or a function `refusal...` beside it, can refuse with; without the
    leading `--enable-treewy: `."""
    found = {}
    for file in sorted(GLUE.glob("*.py")):
        tree = ast.parse(file.read_text())
        outer = constants(tree.body)
        for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
            if file.name != "config.py" and not function.name.startswith("refusal"):
                continue
            names = {**outer, **constants(function.body)}
            for node in ast.walk(function):
                value = None
                if isinstance(node, ast.Return) and isinstance(node.value, (ast.JoinedStr, ast.Constant)):
                    value = pattern(node.value, names)
                elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    value = pattern(node.exc.args[0], names)
                # Other functions return names and the like; a refusal is a sentence.
                if value and value.endswith(r"\."):
                    found[value.removeprefix(re.escape("--enable-treewy: "))] = f"{file.name}, {function.name}, line {node.lineno}"
    return found


def documented_refusals() -> list[str]:
    rows = re.findall(r"^\| (?!---|given)[^|]+ \| ([^|]+) \|$", section(page("supported.md"), "Refused at start"), re.M)
    return [row.strip() for row in rows]


def test_refusals_of_the_code_are_found():
    assert len(refusals()) >= 28
    assert any("of Gated" in p or "not\\ Gated" in p for p in refusals()), "those that are raised, too"


@pytest.mark.parametrize("sentence", documented_refusals())
def test_a_documented_refusal_is_what_the_code_says(sentence):
    assert [p for p in refusals() if re.fullmatch(p, sentence)], "config.py says no such thing"


def test_no_refusal_is_missing():
    sentences = documented_refusals()
    missing = {p: place for p, place in refusals().items() if not any(re.fullmatch(p, s) for s in sentences)}
    # `{reason}` alone stands for another sentence of this table.
    missing = {p: place for p, place in missing.items() if p != "(.+)"}
    assert not missing, f"docs/supported.md lacks: {missing}"


def test_refusals_with_the_documented_values():
    """Some sentences with their numbers are produced, so that the example values are possible ones."""
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from treewy_sglang.sglang.config import GDNShape, refusal_of_settings, refusal_of_shape

    sentences = documented_refusals()
    base = dict(
        enable_linear_replayssm=False, enable_linear_replayssm_spec=False, speculative_algorithm="EAGLE",
        max_speculative_num_draft_tokens=4, speculative_num_steps=3, speculative_eagle_topk=1, speculative_adaptive=False,
        disaggregation_mode="null", enable_unified_memory=False, enable_page_major_kv_layout=False, pp_size=1,
        enable_two_batch_overlap=False, enable_pdmux=False, device="cpu", tp_size=1, enable_torch_compile=False, mamba_ssm_dtype=None,
        speculative_num_draft_tokens=4, disable_cuda_graph=False,
    )  # fmt: skip
    for change in (
        dict(enable_linear_replayssm_spec=True), dict(speculative_algorithm=None), dict(speculative_algorithm="EAGLE3"),
        dict(max_speculative_num_draft_tokens=0), dict(max_speculative_num_draft_tokens=200, speculative_eagle_topk=8),
        dict(max_speculative_num_draft_tokens=201, speculative_num_steps=200), dict(speculative_num_steps=0),
        dict(speculative_eagle_topk=0), dict(speculative_eagle_topk=2, max_speculative_num_draft_tokens=16), dict(disaggregation_mode="decode"),
        dict(pp_size=2), dict(device="xpu"), dict(device="cuda", speculative_adaptive=True, max_speculative_num_draft_tokens=8), dict(tp_size=2), dict(mamba_ssm_dtype="float8_e4m3fn"),
    ):  # fmt: skip
        assert refusal_of_settings(SimpleNamespace(**{**base, **change})) in sentences, change
    shape = dict(layers=36, key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4, activation="silu")
    for change in (dict(layers=0), dict(key_dim=96, value_dim=96), dict(value_heads=24), dict(conv_width=5), dict(activation="gelu")):
        assert refusal_of_shape(GDNShape(**{**shape, **change}), torch.bfloat16) in sentences, change
    assert refusal_of_shape(GDNShape(**shape), torch.bfloat16, 5) in sentences
    assert refusal_of_shape(GDNShape(**shape), torch.float64) in sentences


# ---- flags and variables ---------------------------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    files = [*PACKAGE.rglob("*.py"), ROOT / "setup.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "csrc").glob("*.cpp"),
             *(ROOT / "examples").iterdir()]  # fmt: skip
    return {str(f.relative_to(ROOT)): f.read_text() for f in files}


def variables() -> dict[str, str]:
    """{environment variable: file} that the code reads or sets. Benchmarks are left out: bench/README.md."""
    found = {}
    for file, text in sources().items():
        names = re.findall(r"""(?:environ|env)(?:\.get|\.setdefault|\.pop)?[\[(]\s*["']([A-Z][A-Z0-9_]+)["']""", text)
        names += re.findall(r"""getenv\("([A-Z0-9_]+)"\)""", text) + re.findall(r"\benvs\.([A-Z][A-Z0-9_]+)", text)
        names += re.findall(r"\$\{([A-Z][A-Z0-9_]+)", text)
        for update in re.findall(r"env\.update\(([^)]*)\)", text):
            names += re.findall(r"\b([A-Z][A-Z0-9_]+)=", update)
        found.update(dict.fromkeys(names, file))
        found.update(dict.fromkeys(re.findall(r"""= ["'](TREEWY_[A-Z0-9_]+)["']""", text), file))
    # Of the machine, not of the project.
    return {name: file for name, file in found.items() if name not in ("PATH", "HOME", "PYTHONHOME", "VIRTUAL_ENV")}


def in_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_variable_is_documented():
    assert {"TREEWY_CUDA", "TREEWY_CPU_FORK", "TREEWY_FLOAT32", "TREEWY_CPU_ISA", "SGLANG_MAMBA_CONV_DTYPE", "TREEWY_URL"} <= set(variables())
    missing = {n: f for n, f in variables().items() if n not in in_code(page("flags.md"))}
    assert not missing, f"docs/flags.md lacks {missing}"


def test_every_documented_variable_is_in_the_code():
    bench = [f for f in (ROOT / "bench").rglob("*") if f.suffix in (".py", ".sh")]
    everything = "\n".join([*sources().values(), *(f.read_text() for f in [ROOT / "Makefile", *bench])])
    for name in in_code(page("flags.md")):
        if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|CXX|PYTHONPATH", name):
            assert re.search(rf"\b{name}\b", everything), f"nothing reads {name}"


def flags_read() -> set[str]:
    """Server arguments that the glue looks at, as flags."""
    found = set()
    for file in GLUE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            call = owner.func.id if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) else None
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else None
            if name in ("args", "view", "server_args") or call in ("get_schedule", "get_memory", "get_spec", "get_server_args"):
                found.add(node.attr)
    found -= {"get_model_config"}
    # Worked out by SGLang from --speculative-num-draft-tokens.
    return {"--" + name.removeprefix("max_" if name == "max_speculative_num_draft_tokens" else "").replace("_", "-") for name in found}


def test_every_flag_that_is_read_is_documented():
    read = flags_read()
    assert {"--speculative-algorithm", "--pp-size", "--max-mamba-cache-size", "--mamba-full-memory-ratio", "--enable-metrics"} <= read
    missing = read - in_code(page("flags.md"))
    assert not missing, f"docs/flags.md lacks {sorted(missing)}"


def test_every_documented_flag_exists():
    installed = Path(importlib.util.find_spec("sglang").origin).parent
    fields = set(re.findall(r"^    (\w+): A\[", (installed / "srt" / "server_args.py").read_text(), re.M)) | {"enable_treewy"}
    known = {"--" + f.replace("_", "-") for f in fields} | {"--tp-size", "--pp-size", "--dp-size", "--help"}
    for name in ("flags.md", "supported.md", "server.md", "cpu.md"):
        # Launch commands: test_blocks.py. Other programs have flags of their own.
        text = re.sub(r"^```.*?^```$|`(?:python|treewy|make) [^`]*`", "", page(name), flags=re.S | re.M)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
            assert flag in known, f"docs/{name}: the server has no {flag}"


# ---- messages --------------------------------------------------------------------------------------------------------------


def messages() -> list[str]:
    """Patterns of all strings in the code, with what is put in left open."""
    found = set()
    for file in [*PACKAGE.rglob("*.py"), ROOT / "setup.py", ROOT / "tools" / "environment.py"]:
        tree = ast.parse(file.read_text())
        names = constants(tree.body)
        for node in ast.walk(tree):
            value = pattern(node, names) if isinstance(node, (ast.Constant, ast.JoinedStr)) else None
            if value and len(value) > 20:
                # `logger.error("... %d ...", n)` too; of several lines, each
                found |= set(re.sub(r"%[ds]|%\\\.\df", "(.+)", value).split("\\\n"))
    return sorted(found)


def quoted() -> list[str]:
    lines = [line for block in re.findall(r"^```text\n(.*?)^```$", page("troubleshooting.md"), re.S | re.M) for line in block.splitlines()]
    return [line.strip().removeprefix("- ") for line in lines]


def static(text: str) -> str:
    """The longest part of a pattern that is fixed: a quote has to hold it."""
    return max(re.split(r"\(\.\+\)", text), key=len)


@functools.cache
def beginnings() -> list[re.Pattern]:
    """All messages, whole and up to a value or the end of a sentence, where enough of them is fixed to be told apart."""
    found = set()
    for text in messages():
        cuts = {len(text), *(m.start() for m in re.finditer(r"\(\.\+\)", text)), *(m.end() - 2 for m in re.finditer(r"\\\.\\ ", text))}
        for cut in cuts:
            start = re.sub(r"(\\ )+$", "", text[:cut])
            if len(static(start.removeprefix(re.escape("--enable-treewy: ")))) > 15:
                found.add(start)
    return [re.compile(start) for start in found]


def is_printed(line: str) -> bool:
    # What refuse() and require() put in front.
    return any(p.fullmatch(x) for p in beginnings() for x in (line, line.removeprefix("--enable-treewy: ")))


@pytest.mark.parametrize("line", quoted())
def test_a_quoted_message_is_one_of_the_code(line):
    assert is_printed(line), "nothing in the code prints this"


@pytest.mark.parametrize(
    "line", ["treewy: the build wants a compiler", "TreeWY operators skipped 3 columns.", "--enable-treewy: the operators run on cuda:0 here: "]
)
def test_a_message_that_nobody_prints_is_noticed(line):
    assert not is_printed(line)


def test_states_of_the_patches():
    from treewy_sglang.patching import state

    documented = set(re.findall(r"^\| `([a-z-]+)` \|", page("troubleshooting.md"), re.M))
    assert documented == {state.UNPATCHED, state.OUTDATED, state.UNSTAMPED, state.PARTIAL, state.MODIFIED, state.WRONG_VERSION, state.INTERRUPTED}


def test_error_kinds():
    from treewy_sglang.errors import KINDS

    assert "`, `".join(("parent", "state_index", "accepted_node", "track", "link")) in " ".join(page("troubleshooting.md").split())
    assert set(KINDS) == {"parent", "state_index", "accepted_node", "track", "link"}


# ---- figures ---------------------------------------------------------------------------------------------------------------


def test_tables_of_the_performance_page_are_the_rows():
    assert tool("performance_tables").filled(page("performance.md")) == page("performance.md"), "python tools/performance_tables.py --write"
    assert tool("performance_tables").filled_supported(page("supported.md")) == page("supported.md"), "python tools/performance_tables.py --write"


def test_the_performance_page_holds_no_other_figure():
    text = re.sub(r"<!-- figures: [\w ]+ -->.*?<!-- figures: end -->", "", page("performance.md"), flags=re.S)
    assert "<!-- figures" not in text
    text = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.S | re.M)
    found = re.findall(r"\b\d[\d.,]*\s*(?:µs|us|ms|s|x|%|[KMGT]i?B(?:/s)?|microseconds|times|percent)(?![\w-])", text)
    assert not found, f"{found}: no command made these"


def test_a_changed_figure_is_noticed():
    tables = tool("performance_tables")
    text = page("performance.md")
    changed = re.sub(r"\| chain of 4 \| 64 \| \d+", "| chain of 4 | 64 | 1", text, count=1)
    assert changed != text and tables.filled(changed) == text


def test_committed_float32_states_have_a_row_of_their_own():
    """Among all states, the rounding to 16 bits hides the operators: it is the same on both sides."""
    tables = tool("performance_tables")
    groups = json.loads((tables.RESULTS / f"accuracy-{tables.RUN}.json").read_text())["accuracy"]["groups"]
    state = groups["state=float32"]["state"]
    (row,) = [line for line in tables.exactness().splitlines() if "committed state in float32," in line and "bfloat16" not in line]
    assert f"{groups['state=float32']['cases']} of these" in row and row.endswith(f"| {state['error']:.1e} | {state['yardstick']:.1e} |")


def test_figures_of_the_kernels_page():
    """Spills are those of the list, bandwidths and the longest drafts those of the rows."""
    text, tables = " ".join(page("kernels.md").split()), tool("performance_tables")
    spills = json.loads((ROOT / "tests" / "build" / "spills.json").read_text()).values()
    for words, figure in (("kernels that spill", len(spills)), ("bytes, worst kernel", max(spills)), ("bytes, all", sum(spills))):
        assert f"| {words} | {figure:,} |" in text
    (read,), (both,) = ({row[key] for row in tables.rows()} for key in ("read_gbps", "readwrite_gbps"))
    assert f"{read:,.0f} GB/s read only and {both:,.0f} GB/s read and written" in text
    state = 64 * 32 * 128 * 128 * 4  # bytes of 64 requests, shape 35B
    assert f"{state / read / 1e3:.0f} us at the read bandwidth" in text and f"{2 * state / both / 1e3:.0f} us at the bandwidth of both" in text
    found = tables.report()._Rows(tables.rows())
    plain, conv = (found.get(4, "tree", 128, mode, "verify_us") for mode in ("treewy", "treewy-fused-conv"))
    assert f"and {plain:.0f} after without the convolution" in text and f"and {conv:.0f} with it" in text
    few, many = (found.get(n, "chain", 4, "treewy", "verify_us") for n in (64, 256))
    each = (many - few) / (256 - 64)
    assert f"{each:.2f} us (its state at {100 * state / 64 / each / 1e3 / read:.0f} % of the read bandwidth)" in text


def test_figures_of_the_readme_are_the_rows():
    """Its kernel table: TreeWY, then each peer with how much longer it takes."""
    readme = (ROOT / "README.md").read_text()
    tables = tool("performance_tables")
    lines = re.findall(r"^\| (chain|tree) of (\d+) \| (\d+) \| (\d+) \(([\d.]+)x\) \| (?:(\d+) \(([\d.]+)x\)|-) \|$", readme, re.M)
    assert len(lines) == 3 and f"kernels-{tables.RUN}.jsonl" in readme
    found = tables.report()._Rows(tables.rows())
    for draft, nodes, ours, *peers in lines:
        mine = found.total(64, draft, int(nodes), "treewy")
        assert int(ours) == round(mine)
        for mode, time, ratio in (("snapshot", *peers[:2]), ("replayssm", *peers[2:])):
            theirs = found.total(64, draft, int(nodes), mode)
            assert (int(time), ratio) == (round(theirs), f"{theirs / mine:.1f}") if time else theirs is None, (draft, nodes, mode)
    commit = json.loads((ROOT / "bench" / "results" / f"kernels-{tables.RUN}.jsonl").read_text().splitlines()[0])["commit"]
    assert commit in readme


def test_serving_figures_of_the_readme_are_the_rows():
    readme = (ROOT / "README.md").read_text()
    tables = tool("performance_tables")
    assert f"serving-{tables.SERVING_RUN}.jsonl" in readme
    found = {(r["mode"], r["concurrency"]): r["output_tok_s"] for r in tables.serving_rows()}
    lines = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \(([\d.]+)x\) \| (\d+) \(([\d.]+)x\) \|$", readme, re.M)
    assert len(lines) == 2
    for n, ours, *peers in lines:
        mine = found["treewy-chain4", int(n)]
        assert int(ours) == round(mine)
        for mode, rate, ratio in (("snapshot-chain4", *peers[:2]), ("replayssm-chain4", *peers[2:])):
            assert (int(rate), ratio) == (round(found[mode, int(n)]), f"{mine / found[mode, int(n)]:.2f}"), (n, mode)


def test_figures_of_the_cpu_page_are_the_rows():
    rows = tool("performance_tables").cpu_rows()
    ratios = [r["speedup"] for r in rows]
    (commit,) = {r["commit"] for r in rows}
    text = " ".join(page("cpu.md").split())
    found = re.search(r"(\d+) measurements on one thread .* at commit (\w+), .*: ([\d.]+)x to ([\d.]+)x faster, median ([\d.]+)x", text)
    assert found, "the sentence with the figures has changed: read it here again"
    assert found[1] == str(len(rows)) and commit.startswith(found[2])
    assert found.groups()[2:] == (f"{min(ratios):.1f}", f"{max(ratios):.0f}", f"{statistics.median(ratios):.1f}")


# ---- the worked example ------------------------------------------------------------------------------------------------------


def test_the_example_is_what_the_reference_computes():
    example = tool("example_tree")
    assert example.filled(page("how-it-works.md")) == page("how-it-works.md"), "python tools/example_tree.py --write"
    assert example.picture() == example.PICTURE.read_text(), "python tools/example_tree.py --write"


def test_the_example_agrees_with_the_recurrence():
    """Numbers of the page's table, read back, against one step per node without the reference."""
    example = tool("example_tree")
    rows = re.findall(r"^\| (\d) \| (?:S0|\d) \| [\d ]+ \| 1/\d \| .* \| \(([^)]*)\) \| \(([^)]*)\) \|$", page("how-it-works.md"), re.M)
    assert len(rows) == len(example.PARENTS)
    states = {-1: example.S0}
    for t, parent in enumerate(example.PARENTS):
        k, q, v = example.unit(example.K[t]), example.unit(example.Q[t]), example.V[t]
        faded = [[x / 2 for x in row] for row in states[parent]]
        u = [(v[i] - example.dot(faded[i], k)) / 2 for i in range(2)]
        states[t] = [[faded[i][j] + u[i] * k[j] for j in range(2)] for i in range(2)]
        out = [example.dot(states[t][i], q) for i in range(2)]
        number, u_text, out_text = rows[t]
        assert int(number) == t
        # Four decimals are shown, and the operator adds 1e-6 to the square of a norm.
        for shown, right in ((u_text, u), (out_text, out)):
            assert [float(x) for x in shown.split(",")] == pytest.approx(right, abs=6e-5)
    assert example.matrix(states[example.ACCEPTED]) in page("how-it-works.md")


def test_the_version_in_the_documents_is_the_pin():
    from treewy_sglang.patching import Series

    version = Series.load().upstream.version
    for document in (ROOT / "docs").glob("*.md"):
        for found in re.findall(r"sglang==([\d.]+\d)", document.read_text()):
            assert found == version, document.name


def test_layout_names_what_is_there():
    for path in re.findall(r"`((?:csrc|python|patches|tests|bench|docs|examples|tools)/[\w/.]*)`", page("contributing.md")):
        assert (ROOT / path).exists(), path
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        top = {line.split("/")[0] + "/" for line in tracked.stdout.splitlines() if "/" in line and not line.startswith(".")}
        layout = section(page("contributing.md"), "Layout")
        missing = {d for d in top if f"`{d}" not in layout}
        assert not missing, f"docs/contributing.md does not say what is in {missing}"
