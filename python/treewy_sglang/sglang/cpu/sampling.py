"""Sampling from the target along a draft tree, on CPU in torch. Letters as in :mod:`.speculation`; C tokens in all."""

from __future__ import annotations

from typing import Union

import torch


def _per_row(value: Union[torch.Tensor, float, int], rows: int) -> torch.Tensor:
    return torch.as_tensor(value).reshape(-1).expand(rows).unsqueeze(1)


def top_k_renorm(probs: torch.Tensor, top_k: Union[torch.Tensor, int]) -> torch.Tensor:
    """Keep the k likeliest tokens of each row and scale them to sum 1. probs ``[R, C]``, top_k int or ``[R]``.

    Exactly k stay: among equals the lower token wins, so k = 1 is argmax.
    """
    order = probs.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.arange(probs.shape[1]) < _per_row(top_k, probs.shape[0])
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, kept)
    return _renorm(probs, mask)


def top_p_renorm(probs: torch.Tensor, top_p: Union[torch.Tensor, float]) -> torch.Tensor:
    """Keep the fewest likeliest tokens that reach mass p and scale them to sum 1. probs ``[R, C]``, top_p or ``[R]``."""
    value, order = probs.float().sort(dim=-1, descending=True, stable=True)
    before = value.double().cumsum(-1) - value
    kept = before < _per_row(top_p, probs.shape[0])
    kept[:, 0] = True
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, kept)
    return _renorm(probs, mask)


def _renorm(probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = torch.where(mask, probs.float(), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def tree_sample(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk down each tree so that every emitted token is distributed as the target says, in place.

    At a node, the children share one coin, uniform on [0, 1): they are tried in order, and a child is taken when the
    target mass of the children tried so far exceeds the coin. If none is, the next token comes from the target without
    the tokens that were tried. Thresholds below 1 take more: a child by its own mass, or by the common mass divided by
    threshold_acc; then the distribution is no longer the target's.

    candidates, retrive_*, uniform_samples ``[N, T]``, uniform_samples_for_final_sampling ``[N]``, target_probs
    ``[N, T, C]``, draft_probs ``[N, T, C]`` or ``[N, >= T, C]``: mass that the tree was drawn with, taken off before the
    last draw (all zero here in practice). Written: predicts, accept_index and accept_token_num, as in
    :func:`.speculation.verify_greedy`.
    """
    width = accept_index.shape[1]
    token, number = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, last_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    for row in range(len(token)):
        node, path, emitted = 0, [0], []
        rejected = []
        while len(path) < width:
            coin, mass, rejected = coins[row][node], 0.0, []
            choice = child[row][node]
            while choice >= 0:
                single = float(target_probs[row, node, token[row][choice]])
                mass += single
                if coin < mass / threshold_acc or single >= threshold_single:
                    break
                rejected.append(token[row][choice])
                choice = sibling[row][choice]
            if choice < 0:
                break
            path.append(choice)
            emitted.append(token[row][choice])
            node, rejected = choice, []
        rest = target_probs[row, node].double()
        if draft_probs is not None:
            rest = (rest - draft_probs[row, node]).clamp_(min=0)
        else:
            rest = rest.clone()
        if rejected:
            rest[rejected] = 0
        mass = rest.cumsum(0)
        if float(mass[-1]) > 0:
            last = int(torch.searchsorted(mass, mass[-1] * last_coins[row], right=True).clamp(max=mass.numel() - 1))
            while float(rest[last]) == 0:
                last -= 1
        else:
            # every token with any mass was tried and rejected by rounding alone
            last = int(target_probs[row, node].argmax())
        emitted.append(last)
        accepted = torch.tensor([number[row][each] for each in path])
        accept_index[row, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        predicts[accepted] = torch.tensor(emitted, dtype=predicts.dtype)
