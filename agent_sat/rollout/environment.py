"""From the config to an environment: ours by its id, yours as `my_package.module:Id-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium

from agent_sat.errors import ConfigError
from agent_sat.protocols import Sandbox

OURS = "agent_sat/"


def make_environment(env_id: str, kwargs: dict[str, Any], sandbox: Sandbox | None) -> gymnasium.Env[str, str]:
    """A fresh environment with text actions and observations, holding `sandbox` for its tool.

    Raises ConfigError when no such environment is registered or it does not take `kwargs`.
    """
    resolved = f"agent_sat.envs:{env_id}" if env_id.startswith(OURS) else env_id
    try:
        return gymnasium.make(resolved, disable_env_checker=True, sandbox=sandbox, **kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(
            f"env.id {env_id!r}: {error}; give a registered id, or your own as my_package.module:Id-v0"
        ) from error
    except TypeError as error:
        raise ConfigError(f"env.kwargs {kwargs!r} do not fit {env_id!r}: {error}") from error
