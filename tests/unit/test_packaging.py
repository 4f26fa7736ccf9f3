"""The package is installed whole, and setup.cfg says of it what is true."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pml

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"p2pml": "p2pml", "p2pml.transports": "transports", "p2pml.protocols": "protocols"}


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser(delimiters=["="])
    config.read(ROOT / "setup.cfg")
    return config


def lines(section: str, option: str) -> list[str]:
    return setup_cfg()[section][option].split("\n")[1:]


def names(requirements: list[str]) -> set[str]:
    """The names of the projects that a list of requirements is about."""
    return {re.match(r"[\w.-]+", line)[0].lower() for line in requirements}  # type: ignore[index]


def packages_in(root: Path, name: str) -> Iterator[str]:
    """The dotted names of `root`, known as `name`, and of all folders below it that have Python files."""
    for path in sorted({file.parent for file in root.rglob("*.py")}):
        yield ".".join([name, *path.relative_to(root).parts])


def missing_extras() -> Iterator[tuple[str, list[ast.expr]]]:
    """Where `MissingExtra.of` is called, and with what."""
    for folder in FOLDERS.values():
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingExtra.of":
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node.args


def test_every_package_is_listed() -> None:
    tree = [package for name, folder in FOLDERS.items() for package in packages_in(ROOT / folder, name)]
    assert sorted(lines("options", "packages")) == sorted(tree)


def test_every_folder_of_python_files_is_a_package() -> None:
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.parent} has no __init__.py"


def test_folders_are_mapped_as_the_tests_believe() -> None:
    mapped = dict(line.split(" = ") for line in lines("options", "package_dir"))
    assert mapped == FOLDERS


def test_errors_of_missing_packages_name_the_extra_that_brings_them() -> None:
    calls = list(missing_extras())
    assert calls
    for where, (package, extra, _) in calls:
        assert isinstance(extra, ast.Constant), f"{where}: the extra is to be written out"
        brought = names(lines("options.extras_require", str(extra.value)))
        if isinstance(package, ast.Constant):
            assert package.value in brought, f"{where}: the extra {extra.value!r} does not bring {package.value!r}"


def test_all_is_all_that_a_user_can_want() -> None:
    (everything,) = lines("options.extras_require", "all")
    extras = set(setup_cfg()["options.extras_require"]) - {"all", "dev"}
    assert set(re.findall(r"\w+", everything)) == {"p2pml", *extras}


def test_what_make_installs_is_pinned() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras is not None
    wanted = names(lines("options", "install_requires"))
    for extra in [*extras[1].split(","), "data"]:
        wanted |= names(lines("options.extras_require", extra))
    assert wanted <= pinned


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with a wheel of this tree in it, and beside it what is installed here.

    The path file names this environment's packages without running its own path files, so that an editable install here
    is not seen there.
    """
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(work), str(source)], check=True)
    venv.create(work / "venv", with_pip=False)
    python = work / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    (wheel,) = work.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(query, check=True, text=True, capture_output=True).stdout.strip())
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def run_installed(python: Path, code: str) -> str:
    """What `code` prints in the new environment, from a folder that has nothing to do with the sources."""
    done = subprocess.run([str(python), "-c", code], cwd=python.parent, check=True, text=True, capture_output=True)
    return done.stdout.strip()


def test_wheel_has_every_package(installed: Path) -> None:
    packages = lines("options", "packages")
    for package in packages:
        if not package.startswith("p2pml.protocols"):
            run_installed(installed, f"import {package}")
    code = f"import importlib.util as u; print([u.find_spec(name).origin for name in {packages}])"
    origins = ast.literal_eval(run_installed(installed, code))
    assert all(Path(origin).is_relative_to(installed.parents[1]) for origin in origins), origins


def test_wheel_is_typed_and_brings_nothing_else(installed: Path) -> None:
    code = "from importlib.metadata import files; print([str(file) for file in files('p2pml')])"
    shipped = ast.literal_eval(run_installed(installed, code))
    assert "p2pml/py.typed" in shipped
    tops = {Path(file).parts[0] for file in shipped if not file.startswith("..")}
    assert tops == {"p2pml", f"p2pml-{p2pml.__version__}.dist-info"}


def test_wheel_installs_the_command(installed: Path) -> None:
    command = shutil.which("p2pml", path=str(installed.parent))
    assert command is not None
    done = subprocess.run([command, "--version"], cwd=installed.parent, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["p2pml", p2pml.__version__]), done.stderr
