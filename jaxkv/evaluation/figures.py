"""What every measuring script shares: flat figures, `--json`, `--check`, `run.json`, one-line errors.

A script computes a flat dictionary of figures (`full.accuracy`, `structural-prior.ratio_total`), hands it to
`finish`, and returns what that returns as its exit code: 0, or 1 when a check does not hold. Bad input is
exit code 2 with one line on standard error (`run_script`).
"""

import json
import math
import operator
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from jaxkv.cache import cache_folder
from jaxkv.errors import EvaluationError, JaxkvError
from jaxkv.versions import versions

Figure = bool | int | float | str | None
"""A value of a figures dictionary; None stands for "not measured" and fails every check."""

_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_EXPRESSION: Final = re.compile(r"\s*([A-Za-z][\w.\-]*)\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Check:
    """One `figure operator value`; `bound` is a number, a truth value, or the name of another figure."""

    figure: str
    comparison: str
    bound: bool | float | str

    def names(self) -> tuple[str, ...]:
        """The figures that the check reads."""
        return (self.figure, self.bound) if isinstance(self.bound, str) else (self.figure,)

    def holds(self, figures: Mapping[str, Figure]) -> bool:
        """Whether the check holds. NaN, None and text are never within a bound.

        Raises:
            EvaluationError: a figure that the check names is not among `figures`.
        """
        for name in self.names():
            _require_known(name, figures)
        bound = figures[self.bound] if isinstance(self.bound, str) else self.bound
        value = figures[self.figure]
        if not all(isinstance(side, bool | int | float) and not math.isnan(side) for side in (value, bound)):
            return False
        return _OPERATORS[self.comparison](value, bound)

    def __str__(self) -> str:
        bound = f"{self.bound:g}" if isinstance(self.bound, float) else str(self.bound)
        return f"{self.figure} {self.comparison} {bound}"


def parse_checks(expressions: Iterable[str], known: Iterable[str] | None = None) -> tuple[Check, ...]:
    """Read `--check` arguments, before any work starts.

    Args:
        expressions: texts such as `full.correct >= 19` or `pask.accuracy >= full.accuracy`.
        known: names of the figures that the script will produce, where it knows them beforehand.

    Raises:
        EvaluationError: an expression is malformed, or names a figure that is not in `known`.
    """
    checks = []
    names = None if known is None else set(known)
    for expression in expressions:
        match = _EXPRESSION.fullmatch(expression)
        if match is None:
            raise EvaluationError(
                f"check {expression!r} is not of the form 'figure operator value' with one of "
                f"{' '.join(_OPERATORS)}; write for example 'full.accuracy >= 0.5'"
            )
        figure, comparison, bound = match.groups()
        check = Check(figure, comparison, _parse_bound(bound, expression))
        if names is not None:
            for name in check.names():
                _require_known(name, names)
        checks.append(check)
    return tuple(checks)


def _parse_bound(text: str, expression: str) -> bool | float | str:
    if text in ("true", "false"):
        return text == "true"
    try:
        value = float(text)
    except ValueError:
        if re.fullmatch(r"[A-Za-z][\w.\-]*", text):
            return text
        raise EvaluationError(
            f"check {expression!r}: {text!r} is neither a number nor the name of a figure; "
            "write for example 'full.accuracy >= 0.5'"
        ) from None
    if math.isnan(value):
        raise EvaluationError(f"check {expression!r} compares with NaN, which never holds; give a number")
    return value


def _require_known(name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name not in names:
        raise EvaluationError(f"no figure is named {name!r}; this run has {', '.join(names) or 'none'}")


def check(figures: Mapping[str, Figure], expressions: Iterable[str | Check]) -> list[str]:
    """The checks that do not hold, each as `figure = value (check: ...)`; empty when all hold.

    Raises:
        EvaluationError: an expression is malformed or names an unknown figure.
    """
    failures = []
    for expression in expressions:
        one = expression if isinstance(expression, Check) else parse_checks([expression], figures)[0]
        if not one.holds(figures):
            values = ", ".join(f"{name} = {_text(figures[name])}" for name in one.names())
            failures.append(f"{values} (check: {one})")
    return failures


def _text(value: Figure) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def output_console(json_path: str | None) -> Console:
    """Where a script prints what is not its figures: standard error when `--json -` claims standard output."""
    return Console(stderr=json_path == "-", highlight=False)


def emit(figures: Mapping[str, Figure], json_path: str | None) -> None:
    """Write figures as JSON to a file (atomically) or, for `-`, alone to standard output; else print one a line.

    Values that JSON lacks (NaN, infinities) are written as null.
    """
    if json_path is None:
        console = output_console(None)
        for name, value in figures.items():
            console.print(f"{name} = {_text(value)}", soft_wrap=True, markup=False)
        return
    text = json.dumps({name: _finite(value) for name, value in figures.items()}, indent=2) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_atomically(json_path, text)


def _finite(value: Any) -> Any:
    """`value` with every non-finite float in it replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def finish(figures: Mapping[str, Figure], json_path: str | None, checks: Sequence[Check] = ()) -> int:
    """Emit the figures, test the checks, and give the script's exit code.

    A failing check is on the last line of standard output, or of standard error under `--json -`.
    """
    emit(figures, json_path)
    failures = check(figures, checks)
    for failure in failures:
        print(f"check failed: {failure}", file=sys.stderr if json_path == "-" else sys.stdout, flush=True)
    return 1 if failures else 0


def run_record(path: str | Path, config: Any, figures: Mapping[str, Figure], seeds: Sequence[int] = (0,)) -> None:
    """Write `run.json`: versions, platform, configuration, seeds and figures of a run, in one atomic rename.

    Args:
        path: the file; its folder is made.
        config: a dataclass or a mapping of plain values and paths.
        figures: the flat figures.
        seeds: seeds of everything random in the run.
    """
    record = {
        "versions": versions(),
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "devices": _devices(),
        },
        "config": dict(config) if isinstance(config, Mapping) else asdict(config),
        "seeds": list(seeds),
        "figures": dict(figures),
    }
    write_atomically(path, json.dumps(_finite(record), indent=2, default=str, ensure_ascii=False) + "\n")


def _devices() -> list[str]:
    # A script that never touched JAX must not start a backend only to name it.
    jax = sys.modules.get("jax")
    return [] if jax is None else [device.device_kind for device in jax.devices()]


def write_atomically(path: str | Path, text: str) -> None:
    """Write `text` so that a reader, or a kill, sees the old file or the new one and nothing between.

    Raises:
        EvaluationError: the folder or the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            # mkstemp's 0600 would surprise whoever shares the results folder.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror}; choose another path") from error


def run_script(main: Callable[[], int | None]) -> int:
    """Run a script's body: a user's error is one line on standard error and exit code 2, an interrupt is 130.

    Compiled programs are kept in the cache folder, unless JAX_COMPILATION_CACHE_DIR says where: a script that is run
    again hardly compiles.
    """
    # JAX reads these when it is imported, which scripts put off until their arguments are checked.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    try:
        return main() or 0
    except JaxkvError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130
