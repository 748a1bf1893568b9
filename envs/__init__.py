"""Environments: gymnasium ones with text actions and observations; importing this registers them."""

if __name__ != "agent_sat.envs":
    raise ImportError(
        f"this package is agent_sat.envs and was imported as {__name__!r}: write "
        "`from agent_sat.envs import ...` and keep the folder above it off sys.path"
    )

import gymnasium

if "agent_sat/Lookup-v0" not in gymnasium.registry:
    gymnasium.register(
        id="agent_sat/Lookup-v0",
        entry_point="agent_sat.envs.lookup:Lookup",
        disable_env_checker=True,  # it would check the spaces of every text of every step
    )
