"""Builds the image of the Docker backend: from its Dockerfile, or, without a registry, from this interpreter.

`python -m agent_sat.sandboxes.images.build [--dockerfile] [--tag TAG] [--packages numpy sympy]`
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.docker import CODE_LABEL, IMAGE, PYTHON_LABEL, code_digest, connect
from agent_sat.sandboxes.inside.limits import UID
from agent_sat.sandboxes.launch import interpreter

HERE = Path(__file__).parent
INSIDE = HERE.parent / "inside"
PACKAGES = ("numpy", "sympy")
COMPANIONS = {"numpy": ("numpy.libs",), "sympy": ("mpmath",)}
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "site-packages",
}
PROGRAMS = ("sh", "cat", "echo", "env", "false", "ls", "sleep", "true")
LINKS = ("/bin", "/lib", "/lib64")  # where the system has them as links
FOLDERS = ("tmp", "proc", "dev", "sys", "etc", "work")
LIBRARY = re.compile(r"(/\S+\.so\S*)")
USERS = f"root:x:0:0:root:/:/nologin\nsandbox:x:{UID}:{UID}:sandbox:/work:/nologin\n"


def from_dockerfile(tag: str, packages: Iterable[str]) -> None:
    """Build `python/Dockerfile` for this interpreter's version. Raises docker.errors.BuildError."""
    with tempfile.TemporaryDirectory() as context:
        shutil.copytree(INSIDE, Path(context, "inside"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HERE / "python" / "Dockerfile", context)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        arguments = {
            "PYTHON_VERSION": version,
            "PACKAGES": " ".join(packages),
            "CODE_DIGEST": code_digest(),
        }
        connect().images.build(path=context, tag=tag, buildargs=arguments, rm=True)


def from_interpreter(tag: str, packages: Iterable[str]) -> None:
    """Make an image of the running interpreter, its standard library, some packages and what they link to."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(file.name, "w") as archive:
            fill(archive, packages)
        repository, _, version = tag.partition(":")
        connect().api.import_image_from_file(
            file.name,
            repository=repository,
            tag=version or "latest",
            changes=[
                f"LABEL {PYTHON_LABEL}={interpreter()} {CODE_LABEL}={code_digest()}",
                f"USER {UID}:{UID}",
                "WORKDIR /work",
            ],
        )


def fill(archive: tarfile.TarFile, packages: Iterable[str]) -> None:
    base, binary = Path(sys.base_prefix).resolve(), interpreter()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    site, own_site = Path(sysconfig.get_path("purelib")), library / "site-packages"
    add_folders(archive, [*FOLDERS, str(own_site), str(binary.parent)])
    for link in (path for path in LINKS if os.path.islink(path)):
        archive.add(link, link, filter=owned_by_root)
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    for program in programs:
        archive.add(program.resolve(), in_place(program), filter=owned_by_root)
    added = [binary, *programs, *add_tree(archive, library, library)]
    archive.add(binary, binary, filter=owned_by_root)
    for shared in base.glob("lib/libpython*.so*"):
        archive.add(shared, shared, filter=owned_by_root)
    for name in (part for package in packages for part in (package, *COMPANIONS.get(package, ()))):
        if not (site / name).is_dir() and name in packages:
            raise SandboxError(f"the package {name!r} is not installed beside this interpreter ({site})")
        if (site / name).is_dir():
            added += add_tree(archive, site / name, own_site / name)
    for linked in sorted({in_place(path) for path in closure(added)}):
        if not any(
            Path(linked).is_relative_to(place) for place in (base, site.resolve())
        ):  # these are in already
            archive.add(os.path.realpath(linked), linked, filter=owned_by_root)
    add_tree(archive, INSIDE, Path("/opt/agent_sat/inside"))
    add_text(archive, "etc/passwd", USERS)
    add_text(archive, "etc/group", f"root:x:0:\nsandbox:x:{UID}:\n")


def add_tree(archive: tarfile.TarFile, source: Path, target: Path) -> list[Path]:
    """Add the files below `source`; gives the shared objects among them."""
    shared = []
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(
            name for name in folders if name not in LEFT_OUT and not name.startswith("config-")
        )
        for name in sorted(names):
            path = Path(folder, name)
            archive.add(path, str(target / path.relative_to(source)), filter=owned_by_root)
            if ".so" in name:
                shared.append(path)
    return shared


def closure(binaries: Iterable[Path]) -> set[Path]:
    """The shared libraries, the loader among them, that the dynamic linker finds for `binaries`."""
    # Not checked: one file that links to nothing makes ldd exit with 1.
    listed = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False)
    return {
        Path(found)
        for line in listed.stdout.splitlines()
        if not line.endswith(":")
        for found in LIBRARY.findall(line)
    }


def in_place(path: Path) -> str:
    """Where a path lies once the links of its folders are followed, under its own name."""
    return str(path.parent.resolve() / path.name)


def add_folders(archive: tarfile.TarFile, folders: Iterable[str]) -> None:
    for folder in folders:
        entry = tarfile.TarInfo(folder.lstrip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        archive.addfile(entry)


def add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(entry, io.BytesIO(text.encode()))


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same for everybody, readable by the sandbox's own user."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode |= 0o444 | (0o111 if entry.mode & 0o100 else 0)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m agent_sat.sandboxes.images.build", description=__doc__)
    parser.add_argument(
        "--dockerfile", action="store_true", help="pull a Python image instead of packing this one"
    )
    parser.add_argument("--tag", default=IMAGE)
    parser.add_argument("--packages", nargs="*", default=list(PACKAGES))
    arguments = parser.parse_args()
    build = from_dockerfile if arguments.dockerfile else from_interpreter
    build(arguments.tag, arguments.packages)
    print(f"{arguments.tag}: built")


if __name__ == "__main__":
    main()
