"""The directions of imports, one door per heavy dependency, and no work or state at import."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agent_sat"

# lower layers first; a module imports its own layer's package or lower layers
LAYERS = (
    ("types", "errors", "protocols"),
    ("algo", "log", "config"),
    ("data",),
    ("rollout",),
    ("train",),
    ("loop", "evaluate"),
    ("cluster", "analyze"),
    ("commands", "grid", "doctor"),
    ("cli",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PLUGINS = ("envs", "sandboxes")
DOORS = {
    "ray": ("cluster/launch.py", "cluster/remote.py"),
    "docker": ("sandboxes/docker.py",),
    "wandb": ("log/metrics.py",),
    "sglang": (),
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: Path) -> set[str]:
    """The parts of agent_sat that a module imports, by their first name."""
    return {
        name.split(".")[1]
        for name in imports(path)
        if name.startswith("agent_sat.") and (name.split(".")[1] in RANK or name.split(".")[1] in PLUGINS)
    }


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_module_belongs_to_a_layer():
    assert {part(path) for path in modules()} - {"__init__"} <= RANK.keys() | set(PLUGINS)


def test_no_module_imports_a_higher_layer():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        if part(path) in RANK
        for name in own(path) & RANK.keys()
        if RANK[name] > RANK[part(path)] or (RANK[name] == RANK[part(path)] and not same_layer(path, name))
    ]
    assert wrong == []


def same_layer(path: Path, name: str) -> bool:
    """Within a layer a part imports itself; the base layer is one part, and config reads the method table."""
    return part(path) == name or RANK[name] == 0 or (part(path), name) == ("config", "algo")


def test_plugins_import_the_base_layer_and_nothing_imports_them_statically():
    wrong = []
    for path in modules():
        if part(path) in PLUGINS:
            wrong += [f"{path.name} imports {name}" for name in own(path) & RANK.keys() if RANK[name] > 0]
        else:
            static = {name for name in imports(path, top_level_only=True) if name.startswith("agent_sat.")}
            wrong += [f"{path.name} imports {name}" for name in static if name.split(".")[1] in PLUGINS]
    assert wrong == []


def test_heavy_dependencies_have_one_door():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        for name in imports(path)
        if (door := DOORS.get(name.split(".")[0])) is not None
        and path.relative_to(PACKAGE).as_posix() not in door
    ]
    assert wrong == []


def test_environment_variables_are_read_in_config_alone():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        if part(path) not in (*PLUGINS, "config")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert set(wrong) <= {
        "cluster/launch.py",
        "log/metrics.py",
    }  # set what Ray and wandb read: report to nobody


def test_analyze_and_the_records_never_import_torch():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        if part(path) in ("analyze", "types", "errors", "protocols", "log")
        for name in imports(path, top_level_only=True)
        if name.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_no_literal_device_names():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")
    ]
    assert wrong == []
