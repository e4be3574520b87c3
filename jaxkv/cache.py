"""Where jaxkv keeps what it fetched and compiled."""

import os
from pathlib import Path


def cache_folder(cache_dir: str | os.PathLike | None = None) -> Path:
    """The cache folder: the argument, else `$JAXKV_CACHE`, else `~/.cache/jaxkv`."""
    return Path(cache_dir or os.environ.get("JAXKV_CACHE") or Path.home() / ".cache" / "jaxkv").expanduser()
