"""Where the code of a model runs: one real, confined interpreter an episode."""

if __name__ != "agent_sat.sandboxes":
    raise ImportError(
        f"this package is agent_sat.sandboxes and was imported as {__name__!r}: write "
        "`from agent_sat.sandboxes import ...` and keep the folder above it off sys.path"
    )

from agent_sat.sandboxes.doctor import probe
from agent_sat.sandboxes.local import local_pool
from agent_sat.sandboxes.pool import Pool, PooledSandbox

__all__ = ["Pool", "PooledSandbox", "local_pool", "probe"]
