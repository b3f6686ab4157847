"""Paged attention: new keys and values are written into a sequence's pages, and attention reads them there.

Semantics:

    write_kv          key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise,
                      unless they are the first elements of the keys (`KvLayer.has_values_in_keys`)
    paged_attention   out[t, h] = softmax(scaling * q[t, h] @ K[s, h // G].T + mask) @ V[s, h // G], for row t of s

In FP8, key[page, h, offset] = E4M3(new_key[t, h] / key_scale[page, h]), and a token at offset 0 sets the scale first
(see `e4m3`). The pages of a sequence are listed in its row of `AttentionBatch.block_table` (vLLM, Kwon et al., 2023).
"""

from __future__ import annotations

import ctypes
import functools

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.e4m3 import decode, encode, scale_for
from loramux_kernels.native.abi import DTYPES, AttentionAbi
from loramux_kernels.native.loader import native_for
from loramux_kernels.tables import AttentionBatch, KvLayer


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Store the step's new keys `[T, num_kv_heads, head_dim_k]` and values `[T, num_kv_heads, head_dim_v]`.

    `slot_mapping` int64[T]; no two tokens share a slot. On a GPU a token with a negative slot is not stored. If the
    layer's values are in its keys, `value` is not read.
    """
    if runs_triton(key):
        from loramux_kernels.cuda import paged_attention as triton

        triton.write_kv(key, value, layer, slot_mapping)
        return
    if (native := native_for(key)) is None:
        write_kv_reference(key, value, layer, slot_mapping)
        return
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    new_value = None if layer.has_values_in_keys else value.data_ptr()
    native.loramux_write_kv(
        DTYPES[key.dtype],
        layer.abi,
        *(key.data_ptr(), key.stride(0), key.stride(1)),
        *(new_value, value.stride(0), value.stride(1)),
        slot_mapping.data_ptr(),
        len(slot_mapping),
        torch.get_num_threads(),
    )


def write_kv_reference(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Compute `write_kv` in torch, on any device and in any dtype."""
    page = slot_mapping // layer.block_size
    offset = slot_mapping % layer.block_size
    sides = [(key, layer.key, layer.key_scale), (value, layer.value, layer.value_scale)]
    for rows, cache, scales in sides[:1] if layer.has_values_in_keys else sides:
        if scales is None:
            cache[page, :, offset] = rows
            continue
        begins = offset == 0
        scales[page[begins]] = scale_for(rows[begins])
        cache[page, :, offset] = encode(rows, scales[page])


def paged_attention(
    query: torch.Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of packed query rows `[T, Hq, Dk]` over each sequence's own pages: `[T, Hq, Dv]`.

    Query row i of a sequence with n query rows is at position context_len - n + i. Query head h reads kv head
    h // (Hq // Hkv). A row at p sees [0, p], or [0, e) if `batch.row_ends` has e for the row. `sliding_window` w: it
    sees no position up to p - w. `softcap` c: scores become c * tanh(score / c).
    `sinks` [Hq]: a score per head that takes part in the softmax and has no value. Scores and sums are float32.

    With `batch.key_ranges`, a row sees only positions in its sequence's range; the result is 0 if the range is empty.
    `lse` float32[T, Hq], contiguous, is filled with the logarithm of the sum of each softmax, -inf for an empty range:
    `merge_attention` joins results over different ranges with it.
    """
    attend = paged_attention_reference
    if runs_triton(query):
        from loramux_kernels.cuda import paged_attention as triton

        attend = triton.paged_attention
    elif (native := native_for(query)) is not None:
        attend = functools.partial(_attend_natively, native)
    return attend(query, layer, batch, scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks, lse=lse)


def _attend_natively(
    native: ctypes.CDLL,
    query: torch.Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scaling: float,
    *,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    query = query if query.stride(2) == 1 else query.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    output = batch.new_output(query, layer, lse)
    call = AttentionAbi(
        query.data_ptr(), output.data_ptr(), None if sinks is None else sinks.data_ptr(),
        query.stride(0), query.stride(1), query.shape[1], sliding_window or 0, scaling, softcap or 0.0,
        None if lse is None else lse.data_ptr(),
    )  # fmt: skip
    native.loramux_attention(DTYPES[query.dtype], call, layer.abi, batch.abi, torch.get_num_threads())
    return output


def paged_attention_reference(
    query: torch.Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `paged_attention` in torch, a sequence at a time, on any device and in any floating dtype."""
    output = batch.new_output(query, layer, lse)
    groups = query.shape[1] // layer.key.shape[1]
    for sequence, (start, stop, context) in enumerate(batch.spans):
        first, end = (0, context) if batch.key_ranges is None else batch.key_ranges[sequence].tolist()
        if first >= end:
            continue
        pages = batch.block_table[sequence, : -(-context // layer.block_size)].long()
        key = _read_pages(layer.key, layer.key_scale, pages, context).repeat_interleave(groups, 0)
        value = _read_pages(layer.value, layer.value_scale, pages, context).repeat_interleave(groups, 0)
        scores = query[start:stop].transpose(0, 1).float() @ key.transpose(1, 2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        ends = None if batch.row_ends is None else batch.row_ends[start:stop]
        visible = _visible(stop - start, context, sliding_window, ends, query.device)
        visible[:, :first] = visible[:, end:] = False
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, stop - start, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :context]
        if lse is not None:
            lse[start:stop] = scores.logsumexp(-1).T
        output[start:stop] = (weights @ value).transpose(0, 1).to(output.dtype)
    return output


def merge_attention(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Join the results of the same rows over two sets of keys, in place, as Flash-Decoding (Dao et al., 2023) does.

    `output` float32[T, Hq, Dv] and `lse` become those over both sets; at least one set is not empty for each row.
    """
    joint = torch.logaddexp(lse, other_lse)
    output *= (lse - joint).exp_()[..., None]
    output += other * (other_lse - joint).exp_()[..., None]
    lse.copy_(joint)


def read_keys(layer: KvLayer, pages: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return the keys at the positions `[first, end)` of a sequence with these pages, float32`[num_kv_heads, n,
    head_dim]`."""
    begin = first // layer.block_size
    held = pages[begin : -(-end // layer.block_size)].long()
    skipped = begin * layer.block_size
    return _read_pages(layer.key, layer.key_scale, held, end - skipped)[:, first - skipped :]


def _read_pages(cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, context: int) -> torch.Tensor:
    """Return the first `context` tokens of `pages` as float32 `[num_kv_heads, context, head_dim]`."""
    held = cache[pages]
    if scales is not None:
        held = decode(held, scales[pages][:, :, None].expand(held.shape[:3]))
    return held.transpose(0, 1).flatten(1, 2)[:, :context].float()


def _visible(
    rows: int, context: int, window: int | None, ends: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return bool[rows, context]: the positions that each of the last `rows` positions may see."""
    at = torch.arange(context - rows, context, device=device)[:, None]
    other = torch.arange(context, device=device)
    visible = other <= at if ends is None else other < ends[:, None]
    return visible if window is None else visible & (other > at - window)
