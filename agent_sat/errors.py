"""Errors by boundary: what a user can mend, what a part of the system did, and what ends a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AgentSatError(Exception):
    """Everything this library raises on purpose."""


class ConfigError(AgentSatError, ValueError):
    """The user's input is wrong; the message holds the value, what is allowed and the next step."""


class EngineError(AgentSatError):
    """The inference engine failed or returned a record that does not fit together."""


class SandboxError(AgentSatError):
    """The sandbox could not be set up or reached; never the fault of the code it was given."""


class EnvironmentFailure(AgentSatError):
    """The environment's own code failed; the episode ends and does not count against the model."""


class WorkerError(AgentSatError):
    """A process or actor of the run died or raised; the message holds its cause."""


class TrainingDiverged(AgentSatError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


class SinkError(AgentSatError):
    """A metric sink failed; it is told once and counted, and the run goes on."""


@contextmanager
def boundary(kind: type[AgentSatError], what: str) -> Iterator[None]:
    """Turn whatever foreign code raises into `kind`, keeping the cause; our own errors pass unchanged.

    This is the one broad `except` of the library: it stands where code that is not ours (a user's
    environment, a subprocess protocol) is called, because that code may raise anything.
    """
    try:
        yield
    except AgentSatError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
