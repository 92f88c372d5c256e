"""What a running server knows about TreeWY: sizes, drafts verified, and bad values that the operators counted."""

from __future__ import annotations

import logging
import time
from typing import Any, Dict

logger = logging.getLogger(__name__)

_started: Dict[str, Any] = {}
_requests_verified = 0
_nodes_verified = 0
_errors: Dict[str, int] = {}
_last_check = 0.0


def started(**facts: Any) -> None:
    """Facts fixed at start; `device` is where the operators count errors."""
    _started.update(facts)


def count_verified(requests: int, nodes: int) -> None:
    global _requests_verified, _nodes_verified
    _requests_verified += requests
    _nodes_verified += nodes


def collect_errors() -> Dict[str, int]:
    """Counts since the start, by kind. Reads the device, so it is called when nothing is in flight."""
    from treewy_sglang import check_errors

    fresh = {kind: count for kind, count in check_errors(_started.get("device")).items() if count}
    for kind, count in fresh.items():
        _errors[kind] = _errors.get(kind, 0) + count
    if fresh:
        logger.error("TreeWY operators skipped rows with bad values: %s (since the start: %s).", fresh, _errors)
    return _errors


def on_idle(interval: float = 5.0) -> None:
    """Beside SGLang's leak check, at most every `interval` seconds: it runs in a loop while the server is idle."""
    global _last_check
    now = time.monotonic()
    if now - _last_check >= interval:
        _last_check = now
        collect_errors()


def report() -> Dict[str, Any]:
    """For /server_info."""
    return {
        **_started,
        "requests_verified": _requests_verified,
        "nodes_verified": _nodes_verified,
        "operator_errors": dict(collect_errors()),
    }
