import json
import threading
import urllib.error
import urllib.request

import pytest

from agent_sat.analyze.viewer import make_server
from agent_sat.errors import ConfigError
from tests.analyze.planted_runs import Plan, write


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("runs") / "run", Plan(steps=4, groups=16, members=4, hostile=True))
    with make_server(path) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def get(address: str, host: str | None = None) -> bytes:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return answer.read()


def status(address: str, host: str | None = None) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(address, host)
    return caught.value.code


def test_lists_come_in_pages_and_filtered(address):
    first = json.loads(get(f"{address}/api/list"))
    rest = json.loads(get(f"{address}/api/list?offset=200"))
    assert len(first["entries"]) == 200 and first["more"]
    assert len(rest["entries"]) == 56 and not rest["more"]
    found = json.loads(get(f"{address}/api/list?from=2&to=3&member=1&ending=turn_limit&option=level%3D1"))
    assert {entry["step"] for entry in found["entries"]} == {2, 3} and len(found["entries"]) == 12
    assert "path" not in found["entries"][0]


def test_an_episode_is_given_whole(address):
    episode = json.loads(get(f"{address}/api/episode?step=2&group=201&member=3"))
    assert len(episode["turns"]) == 4 and episode["turns"][3]["tokens"]["offset"] == list(range(10))


def test_bad_requests_are_refused_with_a_reason_and_the_server_lives_on(address):
    assert status(f"{address}/api/list?from=x") == 400
    assert status(f"{address}/api/list?offset=%C3%A9") == 400
    assert status(f"{address}/api/episode?step=2&group=9&member=0") == 404
    assert status(f"{address}/api/episode") == 404
    assert status(f"{address}/../../etc/passwd") == 404
    assert b"episodes" in get(f"{address}/")


def test_a_page_under_another_name_cannot_reach_it(address):
    assert status(f"{address}/api/list", host="evil.example:80") == 403
    assert status(f"{address}/api/list", host="127.0.0.1.evil.example") == 403


def test_a_port_in_use_is_a_clear_error(address, tmp_path):
    path = write(tmp_path / "run", Plan(steps=1, groups=1))
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"port {port} cannot be used.*--port"):
        make_server(path, port)
