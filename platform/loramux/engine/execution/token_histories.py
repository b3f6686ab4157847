"""Tokens of the sequences that have penalties, kept on the device.

A penalty counts every token that a sequence has read or generated. They are sent once: a step sends those that are new,
one for a sequence that decodes, so that the host's work for a step grows with its rows and not with their contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from loramux.engine.scheduling.sequence import Sequence
from loramux.engine.scheduling.step import PENDING
from loramux_kernels.device import to_device

FIRST_WIDTH = 1024
"""Tokens of the longest sequence that there is room for at first; the room doubles when it is too small."""


@dataclass(slots=True)
class _Place:
    """A row of the table, and how many of its tokens are written."""

    row: int
    length: int = 0


class TokenHistories:
    """A table on the device with a row for each sequence that has had penalties and has not ended.

    It takes 4 bytes a token, far below a thousandth of the sequence's KV, and so is in no budget.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = torch.zeros(0, FIRST_WIDTH, dtype=torch.int32, device=device)
        self._places: dict[str, _Place] = {}
        self._free: list[int] = []

    def flat(
        self, sequences: list[Sequence], rows: list[int], drawn: torch.Tensor | None, sources: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all tokens of `sequences`, one sequence after the other, after what is new of them was added.

        A last token that is PENDING is `drawn[source]`. The results have N elements, on the device: the sequence's
        element of `rows`, int32; the token, int32; whether the sequence generated it, bool.
        """
        places = [self._place(sequence) for sequence in sequences]
        self._append(sequences, places, drawn, sources)
        total = sum(place.length for place in places)
        columns = np.array(
            [
                [place.length for place in places],
                [place.row * self._tokens.shape[1] for place in places],
                [sequence.num_prompt_tokens for sequence in sequences],
                rows,
            ],
            dtype=np.int64,
        )
        lengths, firsts, prompts, own = to_device(columns, self._device)
        owner = torch.repeat_interleave(lengths, output_size=total)
        offsets = torch.arange(total, device=self._device) - (lengths.cumsum(0) - lengths)[owner]
        tokens = self._tokens.view(-1)[firsts[owner] + offsets]
        return own[owner].to(torch.int32), tokens, offsets >= prompts[owner]

    def forget(self, request_id: str) -> None:
        """Free the row of a request that has ended."""
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place.row)

    def _append(
        self, sequences: list[Sequence], places: list[_Place], drawn: torch.Tensor | None, sources: list[int]
    ) -> None:
        new = [sequence.token_ids[place.length :] for sequence, place in zip(sequences, places, strict=True)]
        counts = [len(tokens) for tokens in new]
        if not any(counts):
            return
        starts = np.repeat([place.length for place in places], counts)
        within = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.array(
            [
                np.repeat([place.row for place in places], counts),
                starts + within,
                np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in new]),
                np.repeat(sources, counts),
            ],
            dtype=np.int64,
        )
        for sequence, place in zip(sequences, places, strict=True):
            place.length = len(sequence.token_ids)
        self._widen(max(place.length for place in places))
        rows, positions, values, source = to_device(table, self._device)
        if drawn is not None and PENDING in table[2]:
            values = torch.where(values == PENDING, drawn[source], values)
        self._tokens[rows, positions] = values.to(torch.int32)

    def _place(self, sequence: Sequence) -> _Place:
        place = self._places.get(sequence.id)
        if place is None:
            if not self._free:
                self._add_rows()
            place = self._places[sequence.id] = _Place(self._free.pop())
        return place

    def _add_rows(self) -> None:
        have, width = self._tokens.shape
        more = self._tokens.new_zeros(max(8, have), width)
        self._tokens = torch.cat((self._tokens, more))
        self._free += range(have, have + len(more))

    def _widen(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, max(width, 2 * have) - have))
