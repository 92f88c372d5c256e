"""What a running server knows about TreeWY: sizes, drafts verified, and bad values that the operators counted. Read by
/server_info, by Prometheus where metrics are on, and by the log."""

from __future__ import annotations

import logging
import time
from typing import Any, Dict, Mapping, Optional

logger = logging.getLogger(__name__)

_started: Dict[str, Any] = {}
_counts = {"verify_calls": 0, "commit_calls": 0, "requests_verified": 0, "nodes_verified": 0, "idle_checks": 0}
_errors: Dict[str, int] = {}
_last_check = 0.0
_gauges: Optional[Dict[str, Any]] = None


def started(**facts: Any) -> None:
    """Facts fixed at start; `device` is where the operators count errors."""
    _started.update(facts)


def start_metrics(labels: Mapping[str, str]) -> None:
    """Prometheus gauges beside SGLang's own."""
    global _gauges
    # After SGLang has set PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads when it is imported.
    from prometheus_client import Gauge

    about = {
        "stash_bytes": "Bytes of the TreeWY stash.",
        "nodes_verified": "Draft nodes verified by TreeWY since the start.",
        "operator_errors": "Rows skipped by TreeWY's operators because of bad values since the start.",
    }
    _gauges = {
        name: Gauge(f"sglang:treewy_{name}", text, labelnames=list(labels), multiprocess_mode="mostrecent").labels(
            **labels
        )
        for name, text in about.items()
    }
    publish()


def publish() -> None:
    if _gauges is not None:
        _gauges["stash_bytes"].set(_started.get("stash_bytes", 0))
        _gauges["nodes_verified"].set(_counts["nodes_verified"])
        _gauges["operator_errors"].set(sum(_errors.values()))


def count_verify() -> None:
    _counts["verify_calls"] += 1


def count_commit(requests: int, nodes: int) -> None:
    _counts["commit_calls"] += 1
    _counts["requests_verified"] += requests
    _counts["nodes_verified"] += nodes
    if _gauges is not None and _counts["commit_calls"] % 64 == 0:
        publish()


def collect_errors() -> Dict[str, int]:
    """Counts since the start, by kind. Waits for the device, so it is called when little is in flight."""
    from treewy_sglang import check_errors

    for kind, count in check_errors(_started.get("device")).items():
        _errors[kind] = _errors.get(kind, 0) + count
        if count:
            logger.error("TreeWY operators skipped %d rows with a bad %s (%d since the start).", count, kind, _errors[kind])
    publish()
    return dict(_errors)


def on_idle(interval: float = 5.0) -> None:
    """After SGLang's leak check has passed. It is called in a loop while the server is idle, so the device is asked at
    most every `interval` seconds."""
    global _last_check
    _counts["idle_checks"] += 1
    now = time.monotonic()
    if now - _last_check >= interval:
        _last_check = now
        collect_errors()


def report() -> Dict[str, Any]:
    """For /server_info."""
    return {**_started, **_counts, "errors": collect_errors()}
