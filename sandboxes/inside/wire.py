"""Frames between the host and an episode: four bytes of length, then the body."""

from __future__ import annotations

import os
import struct

REPLY_BYTES = 65536  # no honest reply is longer
CODE_BYTES = 1 << 20
NONCE_BYTES = 16
READY = b"ready"  # the first frame of an episode, or why it cannot be; then a nonce and a status each

_LENGTH = struct.Struct(">I")


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def take_frame(buffer: bytearray, max_bytes: int = REPLY_BYTES) -> bytes | None:
    """Remove and give the first whole frame of `buffer`, or None while it is incomplete.

    Raises ValueError for a frame longer than `max_bytes`: what follows it cannot be trusted.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes, at most {max_bytes} are allowed")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return body


def read_frame(descriptor: int) -> bytes:
    """Wait for one frame. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return _read(descriptor, length)


def write_frame(descriptor: int, body: bytes) -> None:
    left = memoryview(frame(body))
    while left:
        left = left[os.write(descriptor, left) :]


def _read(descriptor: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(descriptor, count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
