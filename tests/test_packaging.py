"""The wheel, installed in a fresh environment, works from a folder that holds a decoy `envs/`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

IMPORTS = """
import agent_sat.envs, agent_sat.sandboxes, gymnasium, sys
assert agent_sat.__file__.startswith(sys.prefix), agent_sat.__file__
environment = gymnasium.make("agent_sat.envs:agent_sat/Lookup-v0", disable_env_checker=True)
print(environment.reset(seed=1, options={"level": 1})[0])
"""
IN_A_RAY_WORKER = """
import os, ray
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)

@ray.remote
def where():
    import agent_sat.envs, agent_sat.sandboxes
    return agent_sat.envs.__file__

print(ray.get(where.remote()))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, tracked):
        source, target = ROOT / name.decode(), folder / "source" / name.decode()
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(source.readlink())
            else:
                target.write_bytes(source.read_bytes())
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source")]
    subprocess.run([sys.executable, "-m", "pip", "-q", *build], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; the dependencies are read from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-deps", str(wheel)],
        check=True,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    # a path file inside a folder that a path file names is not read: an editable agent_sat stays unseen
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, folder: Path, *arguments: str) -> str:
    decoy = folder / "envs"
    decoy.mkdir(exist_ok=True)
    (decoy / "__init__.py").write_text("raise RuntimeError('the decoy was imported')\n")
    finished = subprocess.run(
        [str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_wheel_holds_both_linked_packages_and_the_pages(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("envs/lookup.py", "sandboxes/local.py", "sandboxes/inside/zygote.py", "py.typed", "cli.py"):
        assert f"agent_sat/{name}" in names
    tracked = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "agent_sat").rglob("*")
        if p.suffix in (".js", ".css", ".html")
    }
    assert tracked <= names
    assert "agent_sat/sandboxes/images/python/Dockerfile" in names
    assert not any(name.startswith(("envs/", "sandboxes/", "tests/")) for name in names)


@pytest.mark.slow
def test_installed_package_imports_beside_a_decoy(fresh_python: Path, tmp_path: Path):
    assert run(fresh_python, tmp_path, "-c", IMPORTS).startswith("Compute ")


@pytest.mark.slow
def test_installed_package_imports_in_a_ray_worker(fresh_python: Path, tmp_path: Path):
    assert "site-packages/agent_sat/envs" in run(fresh_python, tmp_path, "-c", IN_A_RAY_WORKER)


@pytest.mark.slow
def test_installed_command_answers(fresh_python: Path, tmp_path: Path):
    shown = run(
        fresh_python,
        tmp_path,
        "-m",
        "agent_sat.cli",
        "train",
        str(ROOT / "configs/quickstart.toml"),
        "--print",
    )
    assert 'method = "sat-grpo-turn"' in shown
