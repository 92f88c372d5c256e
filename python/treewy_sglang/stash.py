"""The stash: what verify leaves behind per draft node, and all that commit needs to rebuild the accepted state.

Rows are rows of the batch, not pool slots, so a stash costs max_running_requests rows however large the pool is.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StashLayer:
    """The stash of one layer, as verify writes it: R rows, Tc nodes a row.

    u        float32    [R, HV, Tc, V]  solution of the triangular solve
    k        act dtype  [R, H, Tc, K]   key before normalisation
    k_rnorm  float32    [R, H, Tc]      1 / sqrt(sum k^2 + 1e-6)
    g        float32    [R, HV, Tc]     the node's own log decay (<= 0); commit sums it over the path that it needs
    conv     act dtype  [R, Tc, D]      raw convolution input of the node; None without convolution
    """

    u: torch.Tensor
    k: torch.Tensor
    k_rnorm: torch.Tensor
    g: torch.Tensor
    conv: torch.Tensor | None = None


@dataclass(frozen=True)
class Stash:
    """The stash of all layers: the fields of `StashLayer` with a leading layer axis L."""

    u: torch.Tensor
    k: torch.Tensor
    k_rnorm: torch.Tensor
    g: torch.Tensor
    conv: torch.Tensor | None = None

    @staticmethod
    def _shapes(layers, rows, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim, activation_dtype):
        shapes = {
            "u": ((layers, rows, value_heads, nodes, value_dim), torch.float32),
            "k": ((layers, rows, key_heads, nodes, key_dim), activation_dtype),
            "k_rnorm": ((layers, rows, key_heads, nodes), torch.float32),
            "g": ((layers, rows, value_heads, nodes), torch.float32),
        }
        if conv_dim is not None:
            shapes["conv"] = ((layers, rows, nodes, conv_dim), activation_dtype)
        return shapes

    @classmethod
    def allocate(
        cls, *, layers, rows, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim=None,
        activation_dtype=torch.bfloat16, device="cpu",
    ):  # fmt: skip
        """An uninitialised stash for `rows` requests of up to `nodes` draft nodes. conv_dim: D = 2*H*K + HV*V, or None."""
        shapes = cls._shapes(
            layers, rows, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim, activation_dtype
        )
        return cls(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()})

    @staticmethod
    def bytes_per_row(
        *, layers, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim=None, activation_dtype=torch.bfloat16
    ):
        """Bytes that one request costs, all layers together."""
        shapes = Stash._shapes(
            layers, 1, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim, activation_dtype
        )
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())

    def layer(self, i):
        """A view of layer `i`, to hand to verify."""
        return StashLayer(
            self.u[i], self.k[i], self.k_rnorm[i], self.g[i], None if self.conv is None else self.conv[i]
        )

    @property
    def nbytes(self):
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.u, self.k, self.k_rnorm, self.g, self.conv) if t is not None)
