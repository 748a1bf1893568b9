import json

import pytest

from agent_sat.envs.tool_calls import InvalidCall, PythonCall, parse


def hermes(arguments: object, name: str = "python") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_both_forms_give_the_code() -> None:
    assert parse("let me see <python>print(1)</python>") == PythonCall(code="print(1)")
    assert parse("so " + hermes({"code": "print(1)"})) == PythonCall(code="print(1)")
    assert parse(hermes('{"code": "print(1)"}')) == PythonCall(code="print(1)")


def test_a_turn_without_a_call_gives_none() -> None:
    assert parse("the answer is \\boxed{4}") is None
    assert parse("</python> python <pythonic>") is None


def test_the_first_of_several_calls_counts() -> None:
    assert parse("<python>a</python><python>b</python>") == PythonCall(code="a")
    assert parse(hermes({"code": "a"}) + "<python>b</python>") == PythonCall(code="a")
    assert parse("<python>s = '<tool_call>{}</tool_call>'</python>") == PythonCall(
        code="s = '<tool_call>{}</tool_call>'"
    )


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (hermes('{"x":'), "not valid JSON"),  # case T2 (b)
        (hermes([1]), "arguments must be a JSON object"),  # case T2 (c)
        (hermes("[1]"), "arguments must be a JSON object"),
        ('<tool_call>{"name": "python", "arguments": {"x":</tool_call>', "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "must be a JSON object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        (hermes({"code": "1"}, name="shell"), "no tool 'shell'"),
        (hermes({"code": 1}), "string 'code'"),
        (hermes({}), "string 'code'"),
        (hermes({"code": " \n"}), "code is empty"),
        ("<python></python>", "code is empty"),
        ("<python>print(1)", "not closed"),
        ("<tool_call>{", "not closed"),
    ],
)
def test_what_nobody_can_execute_is_an_invalid_call_with_its_reason(turn: str, reason: str) -> None:
    call = parse(turn)
    assert isinstance(call, InvalidCall)
    assert reason in call.reason
