"""What a snippet printed, cut to what a model is shown."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .limits import MIB, Limits

UTF8_CONTINUATION, UTF8_LEAD, UTF8_INVALID, UTF8_MARK = 0x80, 0xC0, 0xF8, 0xC0
UTF8_MAX_BYTES = 4
KEPT_OUTPUT_BYTES = 1 << 16  # a longer output file is emptied after the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    text: str
    cut: bool
    full: bool  # the file reached its size limit


NOTHING_SHOWN = Shown(text="", cut=False, full=False)


class Output:
    """A file in memory that an episode appends to and that outlives it."""

    def __init__(self, descriptor: int, limits: Limits) -> None:
        self.descriptor = descriptor
        self._position = 0
        self._shown_bytes = limits.output_bytes
        self._max_bytes = limits.file_mib * MIB

    def take(self) -> Shown:
        """What was written since the last call, head and tail where it is too long."""
        size = os.fstat(self.descriptor).st_size
        length = max(0, size - self._position)
        if not length:
            self._position = size
            return NOTHING_SHOWN
        half = self._shown_bytes // 2
        if length <= self._shown_bytes:
            text = os.pread(self.descriptor, length, self._position).decode("utf-8", "replace")
        else:
            head = os.pread(self.descriptor, half, self._position)
            tail = os.pread(self.descriptor, half, size - half)
            text = head_and_tail(head, tail, length - 2 * half)
        if size > KEPT_OUTPUT_BYTES:
            os.ftruncate(self.descriptor, 0)
            size = 0
        full = self._position + length >= self._max_bytes
        self._position = size
        return Shown(text=text, cut=length > self._shown_bytes, full=full)


def head_and_tail(head: bytes, tail: bytes, num_cut: int) -> str:
    """`head`, a line that tells how many bytes are missing, and `tail`, both cut on a character.

    Invalid UTF-8 becomes U+FFFD, but not for a character that only the cut has torn.
    """
    head, lost_head = drop_torn_end(head)
    tail, lost_tail = drop_torn_start(tail)
    told = f"\n... {num_cut + lost_head + lost_tail} bytes cut ...\n"
    return head.decode("utf-8", "replace") + told + tail.decode("utf-8", "replace")


def drop_torn_end(text: bytes) -> tuple[bytes, int]:
    """Without a last character that is not all there; and the number of bytes dropped."""
    for back in range(1, min(UTF8_MAX_BYTES, len(text)) + 1):
        byte = text[-back]
        if UTF8_LEAD <= byte < UTF8_INVALID:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (text[:-back], back) if length > back else (text, 0)
        if byte & UTF8_MARK != UTF8_CONTINUATION:
            break
    return text, 0


def drop_torn_start(text: bytes) -> tuple[bytes, int]:
    """Without the rest of a character whose start is not there; and the number of bytes dropped."""
    torn = 0
    while torn < min(UTF8_MAX_BYTES - 1, len(text)) and text[torn] & UTF8_MARK == UTF8_CONTINUATION:
        torn += 1
    return text[torn:], torn
