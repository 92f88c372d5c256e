"""What a running server knows about TreeWY: sizes, drafts verified, and bad values that the operators counted."""

from __future__ import annotations

import logging
import time
from typing import Any, Dict

logger = logging.getLogger(__name__)

_started: Dict[str, Any] = {}
_counts = {"verify_calls": 0, "commit_calls": 0, "requests_verified": 0, "nodes_verified": 0}
_errors: Dict[str, int] = {}
_last_check = 0.0


def started(**facts: Any) -> None:
    """Facts fixed at start; `device` is where the operators count errors."""
    _started.update(facts)


def count_verify() -> None:
    _counts["verify_calls"] += 1


def count_commit(requests: int, nodes: int) -> None:
    _counts["commit_calls"] += 1
    _counts["requests_verified"] += requests
    _counts["nodes_verified"] += nodes


def collect_errors() -> Dict[str, int]:
    """Counts since the start, by kind. Waits for the device, so it is called when little is in flight."""
    from treewy_sglang import check_errors

    for kind, count in check_errors(_started.get("device")).items():
        _errors[kind] = _errors.get(kind, 0) + count
        if count:
            logger.error("TreeWY operators skipped %d rows with a bad %s (%d since the start).", count, kind, _errors[kind])
    return dict(_errors)


def on_idle(interval: float = 5.0) -> None:
    """Beside SGLang's leak check, at most every `interval` seconds: it runs in a loop while the server is idle."""
    global _last_check
    now = time.monotonic()
    if now - _last_check >= interval:
        _last_check = now
        collect_errors()


def report() -> Dict[str, Any]:
    """For /server_info."""
    return {**_started, **_counts, "errors": collect_errors()}
