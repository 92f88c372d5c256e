"""Draft trees and token slots on CPU, in torch: what EAGLE (NEXTN) and NGRAM need around the model.

Letters: N requests, T nodes of a draft tree (node 0 is the root: the last token of the verified text), S the
longest accepted path. A tree has three spellings. SGLang walks first-child / next-sibling links ``[N, T]``; attention
wants the ancestor mask ``[N, T, T]`` (``mask[n, t, j]``: j is t or an ancestor of t); between the two stand parents
``[N, T]`` with ``parents[n, 0] = -1`` and ``parents[n, t] < t``.
"""

from __future__ import annotations

from typing import Tuple

import torch

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2


def parents_from_selection(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """Parents of the nodes that EAGLE picked from its candidates.

    selected ``[N, T-1]``: candidate of node t at column t-1, ascending. Candidate c is a child of group ``c // topk``;
    group 0 hangs off the root, group g > 0 off candidate ``parent_list[n, g]``. Returns int64 ``[N, T]``. A parent that
    was not picked itself (only scores that are not finite lead there) counts as the root.
    """
    group = selected // topk
    wanted = parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1)) if parent_list.shape[1] else group
    found = selected.unsqueeze(1) == wanted.unsqueeze(2)
    column = torch.arange(selected.shape[1])
    found &= (column.unsqueeze(0) < column.unsqueeze(1)) & (group > 0).unsqueeze(2)
    parent = torch.where(found.any(-1), found.int().argmax(-1) + 1, 0)
    root = parent.new_full((parent.shape[0], 1), -1)
    return torch.cat([root, parent], dim=1)


def parents_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Parents from an ancestor mask bool ``[N, T, T]``: the latest strict ancestor. Returns int64 ``[N, T]``."""
    nodes = mask.shape[-1]
    column = torch.arange(nodes)
    strict = mask & (column.unsqueeze(0) < column.unsqueeze(1))
    return torch.where(strict, column, -1).amax(-1)


def ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """Ancestor mask bool ``[N, T, T]`` of parents ``[N, T]``; a node counts as its own ancestor."""
    rows, nodes = parents.shape
    mask = torch.eye(nodes, dtype=torch.bool).expand(rows, nodes, nodes).clone()
    cursor = parents.clone()
    while bool((cursor >= 0).any()):
        alive = cursor >= 0
        mask |= (cursor.unsqueeze(-1) == torch.arange(nodes)) & alive.unsqueeze(-1)
        cursor = torch.where(alive, parents.gather(1, cursor.clamp(min=0)), -1)
    return mask


def links_from_parents(parents: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every node, -1 for none, children in ascending order; both int64 ``[N, T]``."""
    nodes = parents.shape[1]
    column = torch.arange(nodes)
    child = parents.unsqueeze(1) == column.unsqueeze(1)
    first = torch.where(child.any(-1), child.int().argmax(-1), -1)
    later = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (column.unsqueeze(0) > column.unsqueeze(1))
    later &= (parents >= 0).unsqueeze(-1)
    sibling = torch.where(later.any(-1), later.int().argmax(-1), -1)
    return first, sibling


def _node_numbers(rows: int, nodes: int) -> torch.Tensor:
    return torch.arange(rows * nodes).view(rows, nodes)


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Lay out the picked candidates as a tree, in place.

    parent_list ``[N, >= groups]``, selected_index ``[N, T-1]`` (see :func:`parents_from_selection`), verified_seq_len
    ``[N]``. Written: positions ``[N*T]`` (text length + depth), retrive_index ``[N, T]`` (flat node number),
    retrive_next_token and retrive_next_sibling ``[N, T]`` (links, -1 for none), and tree_mask, flat, by mode:
    FULL_MASK bool, request n as ``[T, len_n + T]`` (text columns are left as they are), QLEN_ONLY bool ``[N, T, T]``,
    QLEN_ONLY_BITPACKING one unsigned word per node ``[N, T]``, bit j for node j.
    """
    parents = parents_from_selection(parent_list, selected_index, topk)
    mask = ancestor_mask(parents)
    rows, nodes = parents.shape
    _write_tree(parents, mask, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    if tree_mask_mode == FULL_MASK:
        start = 0
        for row, length in enumerate(verified_seq_len.tolist()):
            stop = start + nodes * (length + nodes)
            tree_mask[start:stop].view(nodes, length + nodes)[:, length:] = mask[row]
            start = stop
    elif tree_mask_mode == QLEN_ONLY:
        tree_mask[: rows * nodes * nodes] = mask.flatten()
    elif tree_mask_mode == QLEN_ONLY_BITPACKING:
        words = (mask.long() << torch.arange(nodes)).sum(-1)
        tree_mask[: rows * nodes] = words.flatten().to(tree_mask.dtype)
    else:
        raise ValueError(f"tree_mask_mode is {tree_mask_mode}; it must be 0 (full), 1 (nodes only) or 2 (bits)")


def reconstruct_tree(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The same outputs as :func:`build_tree` from an ancestor mask ``[N*T*T]``, in place (NGRAM drafts trees so)."""
    mask = tree_mask.bool().view(batch_size, draft_token_num, draft_token_num)
    parents = parents_from_mask(mask)
    _write_tree(parents, None, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling)


def _write_tree(parents, mask, lengths, positions, index, next_token, next_sibling):
    rows, nodes = parents.shape
    if mask is None:
        mask = ancestor_mask(parents)
    depth = mask.sum(-1) - 1
    positions.view(rows, nodes).copy_(lengths.view(rows, 1) + depth)
    index.view(rows, nodes).copy_(_node_numbers(rows, nodes))
    first, sibling = links_from_parents(parents)
    next_token.view(rows, nodes).copy_(first)
    next_sibling.view(rows, nodes).copy_(sibling)


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the tree along the target's own choices, in place.

    candidates, retrive_*, target_predict ``[N, T]``. Written: accept_index ``[N, S+1]`` (flat numbers of the accepted
    nodes, root first; the rest is left as it is), accept_token_num ``[N]`` (accepted drafts, root not counted), and
    predicts ``[N*T]`` at each accepted node: the token that follows it.
    """
    width = accept_index.shape[1]
    token, number = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.tolist()
    for row in range(len(token)):
        node, path = 0, [0]
        while len(path) < width:
            choice = child[row][node]
            while choice >= 0 and token[row][choice] != wanted[row][node]:
                choice = sibling[row][choice]
            if choice < 0:
                break
            path.append(choice)
            node = choice
        accepted = torch.tensor([number[row][each] for each in path])
        accept_index[row, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        predicts[accepted] = torch.tensor([wanted[row][each] for each in path], dtype=predicts.dtype)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """bonus_tokens ``[N]`` := last accepted token of each request. accept_tokens flat ``[N * stride]``, accept_lens
    ``[N]`` counts the bonus token (so it is at least 1)."""
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes to the front. accept_index any shape, -1 = none; out_cache_loc by flat node
    number; accept_out_cache_loc flat (written; the tail is left as it is)."""
    flat = accept_index.flatten()
    kept = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: kept.shape[0]] = kept.to(accept_out_cache_loc.dtype)


def _ranges(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every entry of ``rows[i], start[i]:end[i]``, request 0 first."""
    length = (end - start).long()
    row = torch.repeat_interleave(rows.long(), length)
    first = torch.cumsum(length, 0) - length
    column = torch.arange(row.shape[0]) + torch.repeat_interleave(start.long() - first, length)
    return row, column


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """``req_to_token[req_i, start_i:end_i]`` := the next slots of out_cache_loc (flat, request 0 first)."""
    row, column = _ranges(req_pool_indices, start_offset, end_offset)
    req_to_token[row, column] = out_cache_loc[: row.shape[0]].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse: out_cache_loc (flat, written from the front) := ``req_to_token[req_i, start_i:end_i]``."""
    row, column = _ranges(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: row.shape[0]] = req_to_token[row, column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """out_cache_loc ``[N * topk * num_steps]`` := the slots that follow each text in its row of req_to_token."""
    count = topk * num_steps
    column = seq_lens.long().unsqueeze(1) + torch.arange(count)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), column]
    out_cache_loc.view(-1)[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)
