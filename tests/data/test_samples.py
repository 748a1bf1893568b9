from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_sat.data.batch import make_batch
from agent_sat.data.samples import active, cut, samples_of
from agent_sat.types import (
    Completion,
    Ending,
    Group,
    Nucleus,
    Routes,
    Sample,
    Task,
    Trajectory,
    Turn,
    route_dtype,
)

TASK = Task(id="t", seed=0)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def completion(*tokens: int, version: int = 0, routes: Routes | None = None, nucleus: Nucleus | None = None):
    return Completion(
        token_ids=ids(*tokens),
        behavior_logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions=np.full(len(tokens), version, np.int32),
        stop_reason="stop",
        routes=routes,
        nucleus=nucleus,
    )


def trajectory(*turns: tuple[np.ndarray, Completion], ending: Ending = Ending.ANSWERED) -> Trajectory:
    return Trajectory(
        group=3,
        member=1,
        task=TASK,
        turns=tuple(Turn(prompt_ids=prompt, completion=sampled, text="") for prompt, sampled in turns),
        reward=1.0,
        ending=ending,
    )


def rows(*values: int) -> np.ndarray:
    """[len(values), 1 layer, top-1] recorded experts."""
    return np.array(values, np.uint8).reshape(-1, 1, 1)


def test_turns_join_to_one_sample_with_context_marked():
    turns = ((ids(1, 2), completion(10, 11)), (ids(1, 2, 10, 11, 5), completion(12, version=4)))
    (sample,) = cut(trajectory(*turns), np.array([0.5, -1.0], np.float32), temperature=0.7)
    assert sample.token_ids.tolist() == [1, 2, 10, 11, 5, 12]
    assert sample.turn.tolist() == [-1, -1, 0, 0, -1, 1]
    assert sample.versions.tolist() == [-1, -1, 0, 0, -1, 4]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0, -1]
    np.testing.assert_array_equal(sample.behavior_logprobs, [np.nan, np.nan, -1, -2, np.nan, -1])
    assert active(sample).tolist() == [False, False, True, True, False, True]


def test_rewritten_history_forks_a_sample_that_trains_only_the_new_turn():
    turns = ((ids(1, 2), completion(10, 11)), (ids(1, 2, 99), completion(12)))
    first, second = cut(trajectory(*turns), np.ones(2, np.float32), temperature=1.0)
    assert first.token_ids.tolist() == [1, 2, 10, 11]
    assert second.token_ids.tolist() == [1, 2, 99, 12]
    assert second.turn.tolist() == [-1, -1, -1, 1]


def test_delta_rows_of_routes_land_on_their_positions():
    turns = (
        (ids(1, 2), completion(10, 11, routes=Routes(start=0, experts=rows(4, 5, 6)))),
        (ids(1, 2, 10, 11, 5), completion(12, 13, routes=Routes(start=3, experts=rows(7, 1, 2)))),
    )
    (sample,) = cut(trajectory(*turns), np.ones(2, np.float32), temperature=1.0)
    assert sample.experts is not None
    missing = np.iinfo(np.uint8).max
    assert sample.experts[:, 0, 0].tolist() == [4, 5, 6, 7, 1, 2, missing]


def test_fork_keeps_the_routes_of_the_common_prefix_only():
    turns = (
        (ids(1, 2), completion(10, 11, routes=Routes(start=0, experts=rows(4, 5, 6)))),
        (ids(1, 2, 99), completion(12, routes=Routes(start=2, experts=rows(3)))),
    )
    first, second = cut(trajectory(*turns), np.ones(2, np.float32), temperature=1.0)
    assert first.experts is not None and second.experts is not None
    assert first.experts[:, 0, 0].tolist() == [4, 5, 6, 255]
    assert second.experts[:, 0, 0].tolist() == [4, 5, 3, 255]


def test_kept_sets_stand_at_sampled_tokens():
    nucleus = Nucleus(ids=ids(10, 3, 11), counts=ids(2, 1))
    (sample,) = cut(
        trajectory((ids(1, 2), completion(10, 11, nucleus=nucleus))), np.ones(1, np.float32), temperature=1.0
    )
    assert sample.nucleus is not None
    assert sample.nucleus.counts.tolist() == [0, 0, 2, 1]
    assert sample.nucleus.ids.tolist() == [10, 3, 11]


def test_missing_logprob_is_not_trained_and_does_not_move_others():
    sampled = replace(completion(10, 11), behavior_logprobs=np.array([np.nan, -2], np.float32))
    (sample,) = cut(trajectory((ids(1), sampled)), np.ones(1, np.float32), temperature=1.0)
    assert active(sample).tolist() == [False, False, True]
    assert sample.behavior_logprobs[2] == -2


def test_completion_with_arrays_of_different_length_is_refused():
    with pytest.raises(ValueError, match="token_ids 3, behavior_logprobs 2"):
        Completion(
            token_ids=ids(1, 2, 3),
            behavior_logprobs=np.zeros(2, np.float32),
            versions=np.zeros(3, np.int32),
            stop_reason="stop",
        )


def test_invalid_members_train_nothing():
    good = trajectory((ids(1), completion(10)))
    bad = trajectory((ids(1), completion(10)), ending=Ending.TOOL_FAILURE)
    one = np.ones(1, np.float32)
    group = Group(number=0, task=TASK, members=(good, bad), advantages=(one, one), temperature=1.0)
    assert len(samples_of(group)) == 1


def test_truncated_sample_has_one_length_everywhere():
    # T5: prompt 4, response 6, mask 110011; routes of 9 rows are padded to the 10 tokens by the missing row
    sample = Sample(
        group=0,
        member=0,
        token_ids=np.arange(10, dtype=np.int32),
        turn=ids(-1, -1, -1, -1, 0, 0, -1, -1, 1, 1),
        behavior_logprobs=np.zeros(10, np.float32),
        versions=np.zeros(10, np.int32),
        advantages=np.zeros(10, np.float32),
        temperature=1.0,
        experts=rows(0, 1, 2, 3, 4, 5, 6, 7, 8, 255),
        nucleus=Nucleus(ids=ids(1, 2, 3, 4, 5, 9, 7, 8), counts=ids(0, 0, 0, 0, 2, 3, 0, 0, 1, 2)),
    )
    short = sample.truncate(8)
    assert short.turn[4:].tolist() == [0, 0, -1, -1]
    assert len(short.behavior_logprobs) == 8
    assert short.experts is not None and short.nucleus is not None
    assert short.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert short.nucleus.counts[4:].tolist() == [2, 3, 0, 0]
    assert short.nucleus.ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(255, np.uint8), (256, np.uint16), (257, np.uint16), (65_535, np.uint16)]
)
def test_the_last_expert_is_no_missing_row_and_does_not_wrap(num_experts: int, dtype: type):
    # from the engine's record to the trainer's batch, with a row that nobody recorded in between
    assert route_dtype(num_experts) is dtype
    last = num_experts - 1
    first = Routes(start=0, experts=np.array([[[0, last]], [[last, 1]]], dtype))
    later = Routes(start=3, experts=np.array([[[last, 2]]], dtype))
    said = trajectory(
        (ids(1, 2), completion(10, routes=first)), (ids(1, 2, 10, 3), completion(11, routes=later))
    )
    (sample,) = cut(said, np.ones(2, np.float32), temperature=1.0)
    assert sample.experts is not None and sample.experts.dtype == dtype
    batch = make_batch(
        [sample], aggregation="token_mean", constant=None, step_advantage=None, device=torch.device("cpu")
    )
    assert batch.experts is not None
    rows = batch.experts[:, 0].tolist()
    assert rows == [[0, last], [last, 1], [-1, -1], [last, 2], [-1, -1]]
