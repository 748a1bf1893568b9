"""Cuts what a snippet printed to what a model is shown."""

from __future__ import annotations

UTF8_CONTINUATION, UTF8_LEAD, UTF8_INVALID, UTF8_MARK = 0x80, 0xC0, 0xF8, 0xC0
UTF8_MAX_BYTES = 4


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
