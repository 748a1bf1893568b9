import json

import pytest

from agent_sat.analyze.episodes import EpisodeIndex, Query
from agent_sat.analyze.runs import Window, open_run
from tests.analyze.planted_runs import Plan, write


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> EpisodeIndex:
    plan = Plan(steps=3, groups=2, members=4, hostile=True)
    return EpisodeIndex(open_run(write(tmp_path_factory.mktemp("runs") / "run", plan)))


def test_all_episodes_are_listed_in_order(index):
    entries, more = index.search(Query())
    places = [(e.step, e.group, e.member) for e in entries]
    assert len(entries) == 3 * 2 * 4 and not more and places == sorted(places)
    assert index.steps() == [1, 2, 3]


def test_pages_of_a_list_join_to_the_whole(index):
    whole = [e.start for e in index.search(Query())[0]]
    first, more = index.search(Query(), limit=10)
    rest, last = index.search(Query(), offset=10, limit=100)
    assert more and not last and [e.start for e in first + rest] == whole


def test_filters_take_what_they_name(index):
    def count(**wanted):
        return len(index.search(Query(**wanted))[0])

    assert count(window=Window(2, 3)) == 8 and count(group=201) == 4 and count(member=1) == 6
    assert count(ending="answered") == 12 and count(ending="nonsense") == 0
    assert count(option="level=1") == 12 and count(option="level=2") == 12
    changed, untouched = count(changed=True), count(changed=False)
    assert changed and untouched and changed + untouched == 24


def test_the_largest_mismatch_of_an_entry_is_that_of_its_tokens(index):
    entries, _ = index.search(Query())
    largest = max(entries, key=lambda e: e.max_abs or 0)
    turns = index.open(largest)["turns"]
    sizes = [
        abs(pi - mu)
        for turn in turns
        for pi, mu in zip(turn["tokens"]["logprob"], turn["tokens"]["behavior_logprob"], strict=True)
    ]
    assert largest.max_abs == pytest.approx(max(sizes), rel=1e-4)
    assert [e.group for e in index.search(Query(least_abs=largest.max_abs))[0]] == [largest.group]
    changed = sum(sum(turn["tokens"]["changed"]) for turn in turns)
    assert changed == largest.changed


def test_an_opened_episode_is_the_one_that_was_written_with_its_tokens(index):
    entry = index.find(2, 201, 3)
    assert entry is not None and entry.num_turns == 4
    episode = index.open(entry)
    assert (episode["step"], episode["group"], episode["member"]) == (2, 201, 3)
    assert [turn["tokens"]["offset"] for turn in episode["turns"]] == [list(range(10))] * 4
    assert all(len(turn["pieces"]) == 10 for turn in episode["turns"])
    assert index.find(2, 999, 0) is None


def test_short_fields_are_cut_right_whatever_the_texts_hold(tmp_path):
    """A task whose id and options look like the cut, and a torn last line."""
    run = open_run(write(tmp_path / "run", Plan(steps=1, groups=1, members=1)))
    (path,) = run.episode_files()
    episode = json.loads(path.read_text())
    episode["task"] = 'x, "prompt": '
    episode["options"] = {"a": 1, "prompt": "y", "level": 1}
    path.write_text(json.dumps(episode) + "\n" + json.dumps(episode)[:300])
    (entry,), _ = EpisodeIndex(run).search(Query())
    assert entry.task == 'x, "prompt": ' and entry.options["prompt"] == "y"
    assert EpisodeIndex(run).open(entry)["prompt"] == episode["prompt"]


def test_an_episode_without_token_records_opens_without_them(tmp_path):
    run = open_run(write(tmp_path / "run", Plan(steps=1, groups=1, members=2)))
    for file in run.token_files():
        file.unlink()
    index = EpisodeIndex(run)
    entry = index.search(Query())[0][0]
    assert entry.max_abs is None and index.open(entry)["turns"][0]["tokens"] is None
