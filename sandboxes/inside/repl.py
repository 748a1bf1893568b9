"""Runs the snippets of one episode one after the other in one namespace, as a notebook does.

It shares its process with the snippets, so nothing it says can be trusted.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  no stubs; see SIGINT
import _sitebuiltins
import ast
import builtins
import contextlib
import linecache
import os
import signal
import sys
import traceback
import types
from typing import Any, NoReturn

from . import wire

SIGINT, SIG_IGN = _signal.SIGINT, _signal.SIG_IGN  # the plain module's calls take a tenth of the time
STDOUT, STDERR, CHANNEL = 1, 2, 3
EXIT_CHANNEL_LOST = 3
MAX_FRAMES = 40  # of one traceback


def serve() -> None:
    """Answer requests (nonce, then code) on descriptor 3 until the host lets go of it."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    builtins.exit = _sitebuiltins.Quitter("exit", "")  # the site module is not loaded
    builtins.quit = builtins.exit
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    open_streams()
    own_pid = os.getpid()
    turn = 0
    if "numpy.random" in sys.modules:  # the module `random` does this after a fork by itself
        sys.modules["numpy.random"].seed()
    wire.write_frame(CHANNEL, wire.READY)
    failed: list[Any] = []  # a stream that failed keeps its buffer, and closing it would raise once more
    _signal.signal(SIGINT, SIG_IGN)  # a late interrupt of an earlier turn must not hit this loop
    while True:
        try:
            request = wire.read_frame(CHANNEL)
        except (EOFError, OSError):
            os._exit(EXIT_CHANNEL_LOST)
        nonce, code = request[: wire.NONCE_BYTES], request[wire.NONCE_BYTES :].decode()
        turn += 1
        status = run(code, f"<turn {turn}>", module.__dict__)
        if not flush_streams():
            failed = [*failed[-2:], sys.stdout, sys.stderr]
            open_streams()
        if os.getpid() != own_pid:  # a child that the snippet forked and that came back to here
            os._exit(0)
        try:
            wire.write_frame(CHANNEL, nonce + status.encode())
        except OSError:
            os._exit(EXIT_CHANNEL_LOST)


def run(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Execute one snippet, show its last expression or its error, and give the status."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        _signal.signal(SIGINT, _signal.default_int_handler)
        try:
            execute(code, name, namespace)
            return "ok"
        finally:
            _signal.signal(SIGINT, SIG_IGN)
    except SystemExit as error:
        leave(error)
    except KeyboardInterrupt as error:
        show_error(error)
        return "interrupted"
    except BaseException as error:
        show_error(error)
        return "memory" if isinstance(error, MemoryError) else "error"


def execute(code: str, name: str, namespace: dict[str, Any]) -> None:
    statements, expression = split(code, name)
    if statements is not None:
        exec(statements, namespace)
    if expression is not None:
        value = eval(expression, namespace)
        if value is not None:
            print(repr(value))


def split(code: str, name: str) -> tuple[types.CodeType | None, types.CodeType | None]:
    """What to execute, and the last expression where there is one. Raises SyntaxError."""
    if "\n" not in code:  # a single expression needs no syntax tree, which takes longer than to run it
        with contextlib.suppress(SyntaxError):
            return None, compile(code.strip(), name, "eval", dont_inherit=True)
    tree = ast.parse(code, name)
    expression = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
    statements = compile(tree, name, "exec", dont_inherit=True) if tree.body else None
    return statements, expression


def leave(error: SystemExit) -> NoReturn:
    """End the interpreter as python itself would, without its exit handlers: they may never return."""
    status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if status == 1 and error.code != 1:
        try:
            print(error.code, file=sys.stderr)
        except BaseException:
            status = 1
    flush_streams()
    os._exit(status & 0xFF)


def show_error(error: BaseException) -> None:
    """The traceback with the snippets' own lines only, neither this loop's nor a library's."""
    try:
        told = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES)
        keep_own_lines(told, set())
        sys.stderr.write("".join(told.format()))
    except BaseException as second:  # a hostile __str__ or __repr__, or no memory left
        os.write(
            STDERR,
            f"{type(error).__name__} (not shown: {type(second).__name__})\n".encode("utf-8", "replace"),
        )


def keep_own_lines(told: traceback.TracebackException, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    own = [frame for frame in told.stack if frame.filename.startswith("<turn ")]
    told.stack = traceback.StackSummary.from_list(own)
    group = getattr(told, "exceptions", None) or []
    for other in (told.__cause__, told.__context__, *group):
        if other is not None:
            keep_own_lines(other, seen)


def open_streams() -> None:
    """Line-buffered, so that a snippet which is killed has shown every line it finished."""
    sys.stdout = open(STDOUT, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(STDERR, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def flush_streams() -> bool:
    """Write what is buffered; False where a stream cannot (limit reached, closed, replaced)."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return False
    return True
