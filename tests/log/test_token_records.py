import json

import numpy as np
import polars as pl
import pytest

from agent_sat.log.tokens import TOKEN_COLUMNS, TokenText, clean, write_episodes, write_tokens
from agent_sat.types import Completion, Ending, Group, Task, ToolCall, ToolResult, Trajectory, Turn

MINIMAL = {
    "step": 5,
    "group": np.array([7, 7, 7, 7, 7]),
    "member": np.array([0, 0, 0, 0, 1]),
    "turn": np.array([0, 0, 1, 1, 1]),
    "position": np.array([4, 5, 9, 10, 9]),
    "token_id": np.array([60, 61, 62, 63, 62]),
    "version": 4,
    "lag": 1,
    "behavior_logprob": np.array([-0.5, np.nan, -1.0, -2.0, -1.0]),
    "logprob": np.array([-0.25, -1.0, -1.0, -2.0, -1.0]),
    "advantage": np.array([1.0, 1, 1, 1, -1]),
}


def test_a_token_record_has_every_column_with_its_type_and_default(tmp_path):
    path = tmp_path / "step_000005.parquet"
    write_tokens(path, MINIMAL | {"gate": np.array([True, False, False, False, False])})
    frame = pl.read_parquet(path)
    assert frame.columns == list(TOKEN_COLUMNS)
    assert frame["step"].to_list() == [5] * 5 and frame["step"].dtype == pl.Int32
    assert frame["member"].dtype == pl.Int16 and frame["logprob"].dtype == pl.Float32
    assert frame["gate"].to_list() == [True, False, False, False, False]
    assert frame["kept"].all() and not frame["clipped"].any() and frame["q"].is_nan().all()
    assert frame["behavior_logprob"].is_nan().to_list() == [False, True, False, False, False]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_offsets_count_along_each_turn_of_each_member(tmp_path):
    write_tokens(tmp_path / "t.parquet", MINIMAL)
    assert pl.read_parquet(tmp_path / "t.parquet")["offset"].to_list() == [0, 1, 0, 1, 0]


def test_an_empty_step_is_a_file_without_rows(tmp_path):
    write_tokens(tmp_path / "t.parquet", {k: np.zeros(0, np.int32) for k in MINIMAL})
    assert pl.read_parquet(tmp_path / "t.parquet").shape == (0, len(TOKEN_COLUMNS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.zeros(5)}, "unknown columns ['logprobs']"),
        ({"logprob": np.zeros(4)}, "logprob [4]"),
        ({"logprob": np.zeros((5, 1))}, "logprob [5, 1]"),
        ({"turn": np.array([0.0, 0, 1, 1, 1])}, "turn holds float64, not integers"),
        ({"turn": np.full(5, 40_000)}, "turn does not fit int16: 40000"),
    ],
)
def test_a_column_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises(ValueError) as caught:
        write_tokens(tmp_path / "t.parquet", MINIMAL | change)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing columns \['advantage'\]"):
        write_tokens(tmp_path / "t.parquet", {k: v for k, v in MINIMAL.items() if k != "advantage"})


def turn(text, ids, versions, **more):
    completion = Completion(
        token_ids=np.array(ids, np.int32),
        behavior_logprobs=np.full(len(ids), -1, np.float32),
        versions=np.array(versions, np.int32),
        stop_reason="stop",
        seconds=0.5,
    )
    return Turn(prompt_ids=np.zeros(3, np.int32), completion=completion, text=text, **more)


def test_an_episode_is_one_line_with_its_calls_rewards_and_versions(tmp_path):
    result = ToolResult(status="error", stdout="", stderr="KeyError: 'q'\u2028", seconds=0.25)
    member = Trajectory(
        group=7,
        member=0,
        task=Task(id="t", seed=1, options={"level": 3}),
        turns=(
            turn("ab", [1, 2], [3, 4], tool=ToolCall(code="get('q')", result=result), observation="KeyError"),
            turn("\ud800c", [3], [4], reward=1.0),
        ),
        reward=1.0,
        ending=Ending.ANSWERED,
        prompt="<script>",
    )
    group = Group(
        number=7,
        task=member.task,
        members=(member,),
        advantages=(np.array([0.5, -0.5], np.float32),),
        temperature=1.0,
    )
    write_episodes(
        tmp_path / "e.jsonl", [group, group], step=5, text=TokenText(lambda ids: "abc"[ids[0] - 1])
    )
    lines = (tmp_path / "e.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 and lines[2] == ""
    episode = json.loads(lines[0])
    assert [episode[k] for k in ("step", "group", "member", "ending", "reward")] == [5, 7, 0, "answered", 1.0]
    assert episode["options"] == {"level": 3} and episode["advantages"] == [0.5, -0.5]
    assert episode["prompt"] == "<script>" and episode["num_tokens"] == 3
    first, second = episode["turns"]
    assert first["tool"]["status"] == "error" and first["tool"]["seconds"] == 0.25
    assert (first["version_min"], first["version_max"], first["pieces"]) == (3, 4, ["a", "b"])
    assert second["text"] == "\ufffdc" and second["tool"] is None and second["reward"] == 1.0


def test_pieces_of_a_turn_join_to_its_text():
    """Token ids are bytes here: a euro sign is three tokens, and the last one is cut off."""
    text = TokenText(lambda ids: bytes(ids).decode("utf-8", "replace"))
    ids = np.frombuffer("a€b".encode() + "€".encode()[:2], np.uint8).astype(np.int32)
    assert text(ids) == ["a", "", "", "€", "b", "", "\ufffd"]


def test_clean_mends_pairs_and_replaces_halves():
    assert clean("\ud83d\ude00 \ud800 plain é") == "😀 \ufffd plain é"
