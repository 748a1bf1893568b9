import json
import logging
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from agent_sat.log.metrics import Fanout, JsonlSink, read_metrics


class Broken:
    """A sink that raises at every call, as a logger does whose network is gone."""

    def log(self, step, metrics):
        raise ConnectionError("no route to host")

    def close(self):
        raise ConnectionError("no route to host")


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"reward/mean": 0.5})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["reward/mean"]) == (1, 0.5) and line["unix_time"] > 1.6e9


def test_values_that_json_has_not_come_back_as_they_were(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    odd = {"a": math.nan, "b": -math.inf, "c": np.float32(0.25), "d": np.int64(7), "e": math.inf, "f": 10**20}
    sink.log(3, odd)
    text = (tmp_path / "m.jsonl").read_text()
    json.loads(text, parse_constant=pytest.fail)  # strict: no bare NaN or Infinity
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(row["a"])
    assert [row[k] for k in "bcdef"] == [-math.inf, 0.25, 7, math.inf, 10**20]


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "re')
    assert [row["step"] for row in read_metrics(path)] == [1]
    path.write_text('{"step": 1, "re\n{"step": 2}\n')
    with pytest.raises(ValueError):
        read_metrics(path)


def test_a_sink_that_always_raises_costs_no_line_and_is_told_once(tmp_path, caplog):
    """Case R-f."""
    path = tmp_path / "m.jsonl"
    sinks = Fanout([Broken(), JsonlSink(path)])
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            sinks.log(step, {"reward/mean": float(step)})
        sinks.close()
    assert [row["reward/mean"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert sinks.failures == {"Broken": 6}
    (record,) = caplog.records
    assert "Broken at step 1: ConnectionError: no route to host" in record.getMessage()


def test_disabled_wandb_is_not_even_imported(tmp_path):
    code = f"""
import sys
from pathlib import Path
from agent_sat.log.metrics import WandbRun, WandbSink
sink = WandbSink(WandbRun(project="p", name="n", id="i", folder=Path({str(tmp_path)!r})))
sink.log(1, {{"a": 1.0}})
sink.close()
assert "wandb" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not list(tmp_path.iterdir())


def test_offline_wandb_leaves_the_run_under_its_folder_and_calls_no_host(tmp_path):
    code = f"""
import os, sys
from pathlib import Path
from agent_sat.log.metrics import WandbRun, WandbSink

def forbid(event, arguments):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and arguments[0].family == 2):
        os.write(2, f"{{event}} {{arguments}}".encode())
        os._exit(3)

sys.addaudithook(forbid)
folder = Path({str(tmp_path)!r})
sink = WandbSink(WandbRun(project="p", name="n", id="run1", folder=folder, mode="offline", config={{"a": 2}}))
sink.log(1, {{"reward/mean": 0.5}})
sink.log(2, {{"reward/mean": 0.75}})
sink.close()
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.rglob("*.wandb")
    assert "run1" in record.name and record.stat().st_size > 100
