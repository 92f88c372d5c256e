"""Counters that /server_info and the idle check read."""

import logging

import pytest
import torch

from treewy_sglang import Stash, ops
from treewy_sglang.sglang import status


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    import treewy_sglang

    treewy_sglang.check_errors()
    monkeypatch.setattr(status, "_started", {})
    monkeypatch.setattr(status, "_errors", {})
    monkeypatch.setattr(status, "_last_check", 0.0)
    monkeypatch.setattr(status, "_gauges", None)


def provoke():
    """A link from the root to itself."""
    links = torch.zeros(1, 3, dtype=torch.int64)
    ops.parents_from_links(links, links - 1, torch.empty(1, 3, dtype=torch.int32))


def test_errors_add_up_and_are_logged_once(caplog):
    with caplog.at_level(logging.ERROR):
        assert not any(status.collect_errors().values()) and not caplog.records
        provoke()
        provoke()
        assert status.collect_errors()["link"] == 2
        assert "2 rows with a bad link" in caplog.text
        caplog.clear()
        assert status.report()["errors"]["link"] == 2
        assert not caplog.records


def test_idle_check_is_not_made_at_every_turn(monkeypatch):
    calls = []
    monkeypatch.setattr(status, "collect_errors", lambda: calls.append(1))
    monkeypatch.setattr(status.time, "monotonic", lambda: 100.0)
    for _ in range(10):
        status.on_idle()
    assert len(calls) == 1
    assert status._counts["idle_checks"] >= 10


def test_report_is_made_of_plain_values():
    import json

    status.started(device="cpu", stash_bytes=Stash.bytes_per_row(
        layers=1, nodes=2, key_heads=1, value_heads=1, key_dim=64, value_dim=64
    ))  # fmt: skip
    status.count_verify()
    status.count_commit(2, 8)
    report = json.loads(json.dumps(status.report()))
    assert report["verify_calls"] >= 1 and report["commit_calls"] >= 1 and report["nodes_verified"] >= 8


def test_prometheus_gauges(monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    status.started(stash_bytes=4096)
    status.start_metrics({"model_name": "m", "tp_rank": "0"})
    provoke()
    status.count_commit(1, 16)
    status.collect_errors()
    text = prometheus.generate_latest().decode()
    labels = '{model_name="m",tp_rank="0"}'
    assert f"sglang:treewy_stash_bytes{labels} 4096.0" in text
    assert f"sglang:treewy_operator_errors{labels} 1.0" in text
    assert f"sglang:treewy_nodes_verified{labels} {float(status._counts['nodes_verified'])}" in text
