"""The in-process engine's KV cache: one slot of fixed length a session, attended where it lies.

A step feeds a packed row of tokens, each with its own slot and position. transformers' attention
interface hands every layer's queries, keys and values to `slot_attention`, which writes the new keys and
values where they belong and attends over the buffers as they lie: no cache is copied, cut or padded when
an episode joins or leaves. Rows are attended in two groups: slots that decode one token, and slots that
feed several (a prompt or tool output), padded to the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_sat.errors import EngineError

ATTENTION = "agent_sat_slots"  # the name under which transformers finds slot_attention

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The packed input of a step: single-token slots first, then the rest, each slot's tokens in order."""

    slots: Index  # [A]
    counts: Index  # [A] tokens fed
    num_single: int  # the first of them feed one token
    row_slots: Index  # [N]
    positions: Index  # [N]

    @staticmethod
    def pack(slots: Index, starts: Index, counts: Index) -> Rows:
        """slots [A] ascending, each feeding `counts` tokens from position `starts` on."""
        order = np.argsort(counts > 1, kind="stable")
        slots, starts, counts = slots[order], starts[order], counts[order]
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        return Rows(
            slots=slots,
            counts=counts,
            num_single=int((counts == 1).sum()),
            row_slots=np.repeat(slots, counts),
            positions=np.repeat(starts, counts) + offsets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """P slots whose queries are attended together, T of each."""

    slots: slice | Tensor  # P of them
    shape: tuple[int, int]  # P, T
    rows: Tensor  # [P * T] row of each query; padding repeats a real one
    take: Tensor  # [rows of the group] where each row's query stands among P * T
    bias: Tensor  # [P, T, length] 0 where a query sees a position, else -inf
    head_bias: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by (KV heads, queries of each)

    def bias_of(self, num_kv_heads: int, group: int) -> Tensor:
        """The bias [P * KV heads, group * T, length], made once for all layers."""
        if (bias := self.head_bias.get((num_kv_heads, group))) is None:
            (size, queries), length = self.shape, self.bias.shape[-1]
            expanded = self.bias[:, None, None].expand(size, num_kv_heads, group, queries, length)
            bias = expanded.reshape(size * num_kv_heads, group * queries, length)
            self.head_bias[num_kv_heads, group] = bias
        return bias


class SlotCache:
    """Keys and values of all slots, and the groups of the step that is running."""

    def __init__(self, *, num_slots: int, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._num_slots = num_slots
        self._max_length = max_length
        self._device = device
        self._dtype = dtype
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> [slots, KV heads, max_length, dim]
        self._every_position = torch.arange(max_length, device=device)
        self._rows: Rows | None = None
        self._destinations: dict[int, Tensor] = {}
        self.groups: list[Group] = []

    def begin(self, rows: Rows) -> None:
        """Lay out the attention of the next forward pass."""
        self._rows = rows
        self._destinations = {}
        split, end = rows.num_single, len(rows.slots)
        parts = [slice(0, split), slice(split, end)]
        self.groups = [self._group(rows, part) for part in parts if part.start < part.stop]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [KV heads, N, dim] of the step's rows; gives the layer's buffers."""
        num_heads = keys.shape[0]
        if layer not in self._buffers:
            shape = (self._num_slots, num_heads, self._max_length)
            self._buffers[layer] = (
                keys.new_zeros(*shape, keys.shape[-1]),
                values.new_zeros(*shape, values.shape[-1]),
            )
        destination = self._destination(num_heads)
        for buffer, new in zip(self._buffers[layer], (keys, values), strict=True):
            flat = buffer.view(-1, new.shape[-1])
            flat.index_copy_(0, destination, new.reshape(-1, new.shape[-1]))
        return self._buffers[layer]

    def _destination(self, num_heads: int) -> Tensor:
        """Where the rows of each head go in a layer's flat buffer, [KV heads * N]."""
        if num_heads not in self._destinations:
            assert self._rows is not None
            first = self._rows.row_slots * (num_heads * self._max_length) + self._rows.positions
            heads = np.arange(num_heads)[:, None] * self._max_length
            self._destinations[num_heads] = self._tensor((first[None] + heads).reshape(-1))
        return self._destinations[num_heads]

    def _group(self, rows: Rows, part: slice) -> Group:
        """Attention of a part of the slots, padded to the longest of them.

        Unless they are few among the slots up to the last of them, all of those are attended as they lie, and
        what comes out for the others is dropped.
        """
        slots, counts = rows.slots[part], rows.counts[part]
        first_row = int(rows.counts[: part.start].sum())
        positions = rows.positions[first_row : first_row + int(counts.sum())]
        longest, span = int(counts.max()), int(slots.max()) + 1
        dense = 2 * len(slots) >= span
        size, places = (span, slots) if dense else (len(slots), np.arange(len(slots)))
        starts = np.cumsum(counts) - counts
        # the row of each query; padding repeats a slot's last one, idle slots the first of all
        table = np.zeros((size, longest), np.int64)
        table[places] = starts[:, None] + np.minimum(np.arange(longest), counts[:, None] - 1)
        take = np.repeat(places * longest - starts, counts) + np.arange(len(positions))
        return Group(
            slots=slice(0, span) if dense else self._tensor(slots),
            shape=(size, longest),
            rows=self._tensor(table.reshape(-1) + first_row),
            take=self._tensor(take),
            bias=self._bias(positions[table], int(positions.max()) + 1),
        )

    def _bias(self, seen: Index, length: int) -> Tensor:
        visible = self._every_position[:length] <= self._tensor(seen)[..., None]
        return torch.where(visible, 0.0, float("-inf")).to(self._dtype)

    def _tensor(self, array: Index) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_cache: SlotCache,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed rows over their slots, for transformers' AttentionInterface.

    query [1, heads, N, dim], key and value [1, KV heads, N, dim]; gives [1, N, heads, dim]. The softmax is
    float32, as in transformers' eager attention. Raises EngineError for attention with sinks or a soft cap.
    """
    if unknown := [name for name in ("s_aux", "softcap", "position_bias") if kwargs.get(name) is not None]:
        raise EngineError(f"{type(module).__name__} needs {unknown[0]}, which the in-process engine lacks")
    layer: Any = module.layer_idx
    keys, values = slot_cache.write(layer, key[0], value[0])
    queries = query[0].transpose(0, 1)  # [N, heads, dim]
    outputs = [_attend(group, queries, keys, values, scaling) for group in slot_cache.groups]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend(group: Group, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """The outputs [rows of the group, heads, dim]; heads that share a KV head are further queries of it."""
    (size, num), num_heads, kv_heads = group.shape, queries.shape[1], keys.shape[1]
    shared = num_heads // kv_heads
    bias = group.bias_of(kv_heads, shared)
    length = bias.shape[-1]
    ours = queries.index_select(0, group.rows).view(size, num, kv_heads, shared, -1)
    ours = ours.permute(0, 2, 3, 1, 4).reshape(size * kv_heads, shared * num, -1)
    scores = torch.baddbmm(bias, ours, _of(group, keys, length).transpose(1, 2), alpha=scaling)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    output = torch.bmm(shares, _of(group, values, length)).view(size, kv_heads, shared, num, -1)
    return output.permute(0, 3, 1, 2, 4).reshape(size * num, num_heads, -1).index_select(0, group.take)


def _of(group: Group, buffer: Tensor, length: int) -> Tensor:
    """The group's part of a layer's buffer, [P * KV heads, length, dim]; a view where its slots adjoin."""
    if isinstance(group.slots, slice):
        return buffer[group.slots].flatten(0, 1)[:, :length]
    return buffer[:, :, :length].index_select(0, group.slots).flatten(0, 1)
