"""Writes down, in the scheduler's process, what the Gated DeltaNet layers of one request read, and the states it left.

Only for a server that runs one request at a time without CUDA graphs: under a graph the Python below would not run. Tokens
of a draft are kept once they are accepted. After MATRIX_DRIFT_TOKENS tokens of one request, prompt included, inputs and
states go to MATRIX_DRIFT_FILE.
"""

import os

from treewy_sglang.sglang import after_import


class Recorder:
    def __init__(self, path: str, tokens: int):
        self.path, self.wanted = path, tokens
        self.done = False
        self.layers: dict[int, object] = {}
        self.rows: dict[int, list] = {}
        self.pending: dict[int, tuple] = {}

    def clear(self) -> None:
        self.rows.clear()

    def keep(self, layer, mixed_qkv, a, b) -> None:
        self.layers[layer.layer_id] = layer
        self.rows.setdefault(layer.layer_id, []).append(tuple(x.detach().to("cpu", copy=True) for x in (mixed_qkv, a, b)))

    def count(self) -> int:
        return min((sum(len(step[0]) for step in steps) for steps in self.rows.values()), default=0)

    def write(self, backend, slot: int) -> None:
        import torch

        pool, out = backend.req_to_token_pool, {}
        for name, steps in self.rows.items():
            layer = self.layers[name]
            out[name] = {
                **{key: torch.cat([step[i] for step in steps]) for i, key in enumerate(("mixed_qkv", "a", "b"))},
                "conv_weight": layer.conv_weights.detach().cpu(),
                "conv_bias": None if layer.bias is None else layer.bias.detach().cpu(),
                "A_log": layer.A_log.detach().cpu(),
                "dt_bias": layer.dt_bias.detach().cpu(),
                "key_heads": layer.num_k_heads,
                "state": pool.mamba2_layer_cache(name).temporal[slot].detach().cpu(),
            }
        torch.save(out, self.path + ".new")
        os.rename(self.path + ".new", self.path)
        self.done = True
        self.clear()

    def step_ended(self, backend) -> None:
        if not self.done and self.count() >= self.wanted:
            self.write(backend, int(backend.forward_metadata.mamba_cache_indices[0]))


def path_to(node: int, parents) -> list[int]:
    """Nodes from the root to `node`; parents None: a chain."""
    if parents is None:
        return list(range(node + 1))
    out = []
    while node >= 0:
        out.append(node)
        node = int(parents[node])
    return out[::-1]


def record_plain(recorder: Recorder, module) -> None:
    """SGLang's backend: prompts, and plain decoding."""
    cls = module.GDNAttnBackend
    extend, decode = cls.forward_extend, cls.forward_decode

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        if not forward_batch.forward_mode.is_target_verify() and not recorder.done:
            first = not recorder.rows or layer.layer_id == min(recorder.rows)
            if first and int(forward_batch.extend_prefix_lens[0]) == 0:
                recorder.clear()
            recorder.keep(layer, mixed_qkv, a, b)
        return extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        if not recorder.done:
            assert len(mixed_qkv) == 1, f"{len(mixed_qkv)} requests; the recorder follows one"
            recorder.keep(layer, mixed_qkv, a, b)
        out = decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)
        if recorder.rows and layer.layer_id == max(recorder.rows):
            recorder.step_ended(self)
        return out

    cls.forward_extend, cls.forward_decode = forward_extend, forward_decode


def record_treewy(recorder: Recorder, module) -> None:
    """TreeWY's backend: drafts, once it is known what was accepted."""
    cls = module.TreeWYGDNAttnBackend
    verify, commit = cls.target_verify, cls.commit

    def target_verify(self, layer, nodes, mixed_qkv, a, b):
        if not recorder.done:
            assert len(mixed_qkv) == nodes, f"{len(mixed_qkv) // nodes} requests; the recorder follows one"
            recorder.pending[layer.layer_id] = (layer, *(x.detach().clone() for x in (mixed_qkv, a, b)))
        return verify(self, layer, nodes, mixed_qkv, a, b)

    def committed(self, accepted, track_indices, track_nodes):
        if not recorder.done:
            parents = self.forward_metadata.retrieve_parent_token
            path = path_to(int(accepted[0]), None if parents is None else parents[0].tolist())
            for layer, mixed_qkv, a, b in recorder.pending.values():
                recorder.keep(layer, mixed_qkv[path], a[path], b[path])
        commit(self, accepted, track_indices, track_nodes)
        recorder.step_ended(self)

    cls.target_verify, cls.commit = target_verify, committed


def install() -> None:
    recorder = Recorder(os.environ["MATRIX_DRIFT_FILE"], int(os.environ["MATRIX_DRIFT_TOKENS"]))
    after_import.install({
        "sglang.srt.layers.attention.linear.gdn_backend": lambda module: record_plain(recorder, module),
        "treewy_sglang.sglang.backend": lambda module: record_treewy(recorder, module),
    })  # fmt: skip
