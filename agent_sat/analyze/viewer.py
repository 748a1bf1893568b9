"""`agent-sat view`: a server on this machine that gives a page and, on request, lists and single episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agent_sat.analyze.episodes import EpisodeIndex, Query
from agent_sat.analyze.page import inert, page
from agent_sat.analyze.runs import Run, Window, open_run
from agent_sat.errors import ConfigError

PAGE_SIZE = 200
FACET_FILES = 5  # step files, spread over the run, whose endings and options fill the choices
LOCAL_NAMES = ("127.0.0.1", "localhost")  # a page of another name must not reach a server on this machine


class Viewer:
    """Answers the requests of the page; one reader at a time, because the index grows as it is read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._index = EpisodeIndex(run)
        self._lock = Lock()

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[int, str, str]:
        """(status, content type, body) of a GET request."""
        with self._lock:
            try:
                if path == "/":
                    return 200, "text/html", self.page()
                if path == "/api/list":
                    return 200, "application/json", inert(self.list(query))
                if path == "/api/episode":
                    return self.episode(query)
            except ValueError as error:  # a number that is none
                return 400, "text/plain", f"bad request: {error}"
        return 404, "text/plain", f"nothing at {path}"

    def page(self) -> str:
        steps = self._index.steps()
        data = {
            "name": self._run.name,
            "method": self._run.method,
            "seed": self._run.seed,
            "steps": [min(steps, default=0), max(steps, default=0)],
            "facets": self._index.facets(FACET_FILES),
        }
        return page(f"{self._run.name}: episodes", "viewer.js", data, connect=True)

    def list(self, query: Mapping[str, str]) -> dict[str, Any]:
        entries, more = self._index.search(
            _query(query), offset=max(0, int(query.get("offset", 0))), limit=PAGE_SIZE
        )
        return {"entries": [entry.public() for entry in entries], "more": more}

    def episode(self, query: Mapping[str, str]) -> tuple[int, str, str]:
        place = [int(query.get(name, -1)) for name in ("step", "group", "member")]
        entry = self._index.find(*place)
        if entry is None:
            return 404, "text/plain", "no such episode: step {}, group {}, member {}".format(*place)
        return 200, "application/json", inert(self._index.open(entry))


def _query(query: Mapping[str, str]) -> Query:
    """The page's form as a Query. Raises ValueError for a number that is none."""

    def number(name: str) -> int | None:
        return int(query[name]) if query.get(name) else None

    last = number("to")
    return Query(
        window=Window(number("from"), None if last is None else last + 1),
        group=number("group"),
        member=number("member"),
        ending=query.get("ending") or None,
        option=query.get("option") or None,
        least_abs=float(query["least"]) if query.get("least") else None,
        changed=query["changed"] == "1" if query.get("changed") else None,
    )


def make_server(run_dir: str | Path, port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 (port 0: any free one), not started yet. Raises ConfigError for a port in use."""
    viewer = Viewer(open_run(run_dir))
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _handler(viewer.answer))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port} cannot be used: {error}; choose another with --port") from error


def serve(run_dir: str | Path, port: int = 8765, say: Callable[[str], None] = print) -> None:
    """Show the episodes of a run in the browser until Ctrl-C."""
    with make_server(run_dir, port) as server:
        say(f"episodes of {run_dir}: http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("closed")


def _handler(
    answer: Callable[[str, Mapping[str, str]], tuple[int, str, str]],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in LOCAL_NAMES:
                status, kind, text = 403, "text/plain", "this server answers to 127.0.0.1 only"
            else:
                parts = urlsplit(self.path)
                status, kind, text = answer(parts.path, dict(parse_qsl(parts.query)))
            body = text.encode("utf-8", "replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests of one's own browser are no news."""

    return Handler


__all__ = ["Viewer", "make_server", "serve"]
