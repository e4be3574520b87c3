"""Run the tests of ops and kernels on every release of JAX that is supported, one small environment for each.

    python scripts/test_matrix.py [pytest arguments]

JAX 0.10 is the last series for Python 3.11; Python 3.12 runs 0.11 and 0.12. Interpreters are looked for on PATH and in
pyenv; environments are kept in `.venv-matrix` and have no torch, transformers or xgrammar. Exit code 0; 1 when tests
fail somewhere; 2 when no interpreter is found, or an environment cannot be made.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
ENVIRONMENTS: Final = ROOT / ".venv-matrix"
RELEASES: Final = (("3.11", "0.10.2"), ("3.12", "0.11.*"), ("3.12", "0.12.*"))
PACKAGES: Final = ("numpy", "jaxtyping", "beartype", "pytest", "hypothesis", "rich", "tyro")
# What imports neither torch, transformers nor xgrammar.
TESTS: Final = ("tests/ops", "tests/kernels", "tests/state")


def candidates(version: str) -> Iterable[str]:
    """Where an interpreter of a version may be: PYTHON, PATH, then pyenv, newest first."""
    if given := os.environ.get("PYTHON"):
        yield given
    yield f"python{version}"
    if shutil.which("pyenv"):
        done = subprocess.run(["pyenv", "root"], capture_output=True, text=True)
        folders = Path(done.stdout.strip() or "/nonexistent", "versions").glob(f"{version}*")
        yield from (str(folder / "bin" / "python") for folder in sorted(folders, reverse=True))


def interpreter(version: str) -> str | None:
    """An executable that really is this version; pyenv's shims exist for versions that are not switched on."""
    for candidate in candidates(version):
        command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            continue
        found, _, path = done.stdout.strip().partition(" ")
        if done.returncode == 0 and found == version:
            return path
    return None


def environment(python: str, version: str, jax: str) -> Path:
    """The interpreter of an environment with this JAX, made or brought up to date if need be."""
    folder = ENVIRONMENTS / f"{version}-{jax.removesuffix('.*')}"
    executable = folder / "bin" / "python"
    stamp = folder / ".installed"
    constraints = ROOT / "constraints.txt"
    wanted = json.dumps([python, jax, PACKAGES, constraints.read_text()])
    if stamp.exists() and stamp.read_text() == wanted:
        return executable
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(executable), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [python, "-m", "venv", str(folder)],
        [*pip, "-c", str(constraints), f"jax=={jax}", *PACKAGES],
        [*pip, "--no-deps", "-e", str(ROOT)],
    ):
        subprocess.run(command, check=True)
    stamp.write_text(wanted)
    return executable


def main(arguments: Sequence[str]) -> int:
    outcomes: list[tuple[str, str]] = []
    failed = ran = False
    for version, jax in RELEASES:
        title = f"Python {version}, jax {jax}"
        python = interpreter(version)
        if python is None:
            outcomes.append((title, f"not run: no Python {version} on PATH or in pyenv"))
            continue
        print(f"== {title}: {python}", flush=True)
        try:
            executable = environment(python, version, jax)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"error: the environment of {title} cannot be made: {error}; see above", file=sys.stderr)
            return 2
        code = subprocess.run([str(executable), "-m", "pytest", "-q", *TESTS, *arguments], cwd=ROOT).returncode
        outcomes.append((title, "passed" if code == 0 else f"FAILED (pytest's exit code {code})"))
        ran, failed = True, failed or code != 0
    for title, outcome in outcomes:
        print(f"{title}: {outcome}")
    if not ran:
        versions = " or ".join(dict.fromkeys(version for version, _ in RELEASES))
        print(f"error: no Python {versions} was found; install one, or give it as PYTHON", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
