from collections import Counter

from agent_sat.data.tasks import TaskStream

CHOICES = {"level": [1, 2, 3, 4, 5]}


def stream(seed: int = 0, name: str = "train") -> TaskStream:
    return TaskStream(seed=seed, stream=name, choices=CHOICES)  # type: ignore[arg-type]


def test_task_is_a_function_of_seed_and_index():
    assert stream().task(17) == stream().task(17)
    assert stream().task(17) != stream().task(18)
    assert stream(seed=1).task(17).seed != stream(seed=0).task(17).seed


def test_held_out_tasks_are_other_tasks():
    train = {stream().task(i).seed for i in range(500)}
    held_out = {stream(name="eval").task(i).seed for i in range(500)}
    assert not train & held_out


def test_every_round_has_each_choice_once_in_changing_order():
    levels = [stream().task(i).options["level"] for i in range(50)]
    rounds = [tuple(levels[i : i + 5]) for i in range(0, 50, 5)]
    assert all(Counter(r) == Counter(CHOICES["level"]) for r in rounds)
    assert len(set(rounds)) > 1
