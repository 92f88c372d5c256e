"""The stash: what verify leaves behind per draft node, and all that commit needs to rebuild the accepted state.

Rows are rows of the batch, not pool slots, so a stash costs max_running_requests rows however large the pool is.
"""

from dataclasses import dataclass

import torch

from .sizes import ACTIVATION, FLOAT32, stash_row_bytes, stash_shapes


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
    def _shapes(activation_dtype, **dimensions):
        kinds = {FLOAT32: torch.float32, ACTIVATION: activation_dtype}
        return {name: (shape, kinds[kind]) for name, (shape, kind) in stash_shapes(**dimensions).items()}

    @classmethod
    def allocate(
        cls, *, layers, rows, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim=None,
        activation_dtype=torch.bfloat16, device="cpu",
    ):  # fmt: skip
        """An uninitialised stash for `rows` requests of up to `nodes` draft nodes. conv_dim: D = 2*H*K + HV*V, or None."""
        shapes = cls._shapes(
            activation_dtype, layers=layers, rows=rows, nodes=nodes, key_heads=key_heads, value_heads=value_heads,
            key_dim=key_dim, value_dim=value_dim, conv_dim=conv_dim,
        )  # fmt: skip
        return cls(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()})

    @staticmethod
    def bytes_per_row(
        *, layers, nodes, key_heads, value_heads, key_dim, value_dim, conv_dim=None, activation_dtype=torch.bfloat16
    ):
        """Bytes that one request costs, all layers together."""
        return sum(
            stash_row_bytes(
                activation_bytes=activation_dtype.itemsize, layers=layers, nodes=nodes, key_heads=key_heads,
                value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_dim=conv_dim,
            ).values()
        )  # fmt: skip

    def layer(self, i):
        """A view of layer `i`, to hand to verify."""
        return StashLayer(
            self.u[i], self.k[i], self.k_rnorm[i], self.g[i], None if self.conv is None else self.conv[i]
        )

    @property
    def nbytes(self):
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.u, self.k, self.k_rnorm, self.g, self.conv) if t is not None)
