"""Counters of bad values inside tensors, which operators skip instead of raising (a check would have to wait for the GPU).

One int64[8] tensor per device, added to by every operator call on it. Kinds (csrc/params.h, ErrorKind); a row counts once
per call, under the first that holds in the order state_index, accepted_node, track, parent:

    parent         any parents[n, t] is not in [-1, t-1]
    state_index    state index >= slots or < -1
    accepted_node  accepted node >= T or < -1
    track          track slot or track node out of range, or the track node is not on the accepted path
    link           first-child / next-sibling link out of range, not after the parent, or reaching a node twice
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes

KINDS = ("parent", "state_index", "accepted_node", "track", "link")
_SIZE = 8
_counters = {}


def _normal(device):
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


@torch.compiler.assume_constant_result
def _made_for_real(name):
    """The counter of a device for code that is being traced: a tensor of the tracer's own would be kept and count nothing."""
    device = torch.device(name)
    if device not in _counters:
        with _disable_current_modes(), torch.inference_mode(False):
            _counters[device] = torch.zeros(_SIZE, dtype=torch.int64, device=device)
    return _counters[device]


def counter(device):
    """The int64[8] counter of a device, made on first use.

    CUDA graphs: call this (or any operator) once before capturing; a counter made during capture would be zeroed by
    every replay, so that is a RuntimeError. Under a mode that makes fake tensors, and for device meta, the counter is as
    unreal as the call that asks for it, and is not kept."""
    device = _normal(device)
    if torch.compiler.is_compiling():
        return _made_for_real(str(device))
    found = _counters.get(device)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"treewy: the error counter of {device} does not exist yet and cannot be made during CUDA-graph capture; "
                "call treewy_sglang.errors.counter(device) or any operator once before capturing"
            )
        with torch.inference_mode(False):  # else nobody outside that mode could set it back to zero
            found = torch.zeros(_SIZE, dtype=torch.int64, device=device)
        if type(found) is torch.Tensor and device.type != "meta":
            _counters[device] = found
    return found


def check_errors(device=None, reset=True):
    """Faults counted so far, as {kind: count} with every kind of `KINDS` present.

    device: one device, or None for the sum over all devices used so far. reset: start again at zero. Waits for the
    device's queued work."""
    if device is None:
        tensors = list(_counters.values())
    else:
        found = _counters.get(_normal(device))
        tensors = [] if found is None else [found]
    total = [0] * _SIZE
    for tensor in tensors:
        for i, value in enumerate(tensor.tolist()):
            total[i] += value
        if reset:
            tensor.zero_()
    return dict(zip(KINDS, total))
