"""Finds the tool call in an assistant turn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

CALL = re.compile(r"<(python|tool_call)>(.*?)(</\1>|\Z)", re.DOTALL)
TOOL_NAME = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
    """Code to execute."""

    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidCall:
    """A call that nobody can execute: what was written, and a reason that the model can read."""

    text: str
    reason: str


def parse(turn: str) -> PythonCall | InvalidCall | None:
    """The first tool call of an assistant turn, in either form, or None if it has none.

    The forms are `<python>code</python>` and, as Qwen and Hermes models write it,
    `<tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>`; the arguments may also be
    a JSON string of that object. Never raises.
    """
    found = CALL.search(turn)
    if found is None:
        return None
    kind, body, closing = found.groups()
    if not closing:
        return InvalidCall(text=body, reason=f"the tag <{kind}> is not closed")
    return require_code(body) if kind == "python" else parse_json(body)


def parse_json(text: str) -> PythonCall | InvalidCall:
    try:
        call = json.loads(text)
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return InvalidCall(text=text, reason=f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict):
        return InvalidCall(text=text, reason="the tool call must be a JSON object")
    if call.get("name") != TOOL_NAME:
        return InvalidCall(text=text, reason=f"no tool {call.get('name')!r}, there is {TOOL_NAME!r}")
    if not isinstance(arguments, dict):
        return InvalidCall(text=text, reason="the arguments must be a JSON object")
    code = arguments.get("code")
    if not isinstance(code, str):
        return InvalidCall(text=text, reason="the arguments must hold a string 'code'")
    return require_code(code)


def require_code(code: str) -> PythonCall | InvalidCall:
    if not code.strip():
        return InvalidCall(text=code, reason="the code is empty")
    return PythonCall(code=code)
