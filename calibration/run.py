"""Calibrate a PASK policy for a model on BFCL: Algorithm 1 from splits to the packed policy, in a folder that resumes.

    python calibration/run.py runs/smollm2 --name smollm2-135m-bfcl

Every stage reads what earlier ones left in the folder and writes its own file; what is there is not computed again. A
run that is killed goes on where it stopped and ends with the same bytes. Exit code 2 for a bad input.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import tyro

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.figures import run_record, run_script, write_atomically

NON_LIVE: Final = ("simple_python", "multiple", "parallel", "parallel_multiple")
STEPS: Final = ("split", "reference", "interventions", "distortion", "controllers", "combined", "pack")
TARGETS: Final = (Fraction(1, 4), Fraction(33, 100), Fraction(2, 5), Fraction(1, 2))
NOMINAL: Final = (
    Fraction(1, 8),
    Fraction(1, 6),
    Fraction(1, 5),
    Fraction(1, 4),
    Fraction(3, 10),
    Fraction(7, 20),
    Fraction(1, 2),
)
"""Nominal budgets to which the default pair's paths are thinned."""
NOMINAL_OTHERS: Final = (Fraction(1, 4),)
"""The same for the other threshold pairs."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What to calibrate, and how. What decides the result is kept in config.json: all but name, target and through."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run."""
    name: str = "calibrated"
    """Name of the packed policy."""
    model: str = "smollm2-135m"
    """Model name, Hugging Face folder or hub id."""
    categories: tuple[str, ...] = NON_LIVE
    """BFCL categories to calibrate on."""
    limit: int | None = None
    """Cases of each category, for a trial."""
    seed: int = 0
    """Of the split."""
    window: int = 16
    """Recent window W."""
    sinks: int = 4
    """First tokens that always stay."""
    rows: int = 32
    """Requests decoded together."""
    max_new_tokens: int = 160
    """Longest answer in tokens."""
    variant: Literal["canonical", "no-class", "no-role", "no-state-and-lookahead"] = "canonical"
    """Fields of the tags that make a key (C.5)."""
    floors: bool = True
    """Protect what V finds; without it the floors are R everywhere (4.3)."""
    allocation: Literal["distortion", "round-robin"] = "distortion"
    """Order of upgrades: by distortion saved per bit, or in turn over the layer groups (4.3)."""
    tau: tuple[str, str] = ("1/200", "1/100")
    """Default thresholds tau_low and tau_high."""
    alpha_decode: str = "1/20"
    """Tolerance of the decode stage's selection."""
    alpha_prompt: str = "1/50"
    """Tolerance of the prompt stage's selection."""
    horizon: int = 8
    """K, tokens that the reserve looks ahead."""
    quantile: str = "4/5"
    """beta, the reserve's quantile."""
    target: str = "1/4"
    """Total budget of the packed policy: best on development among the combined rows within it."""
    through: Annotated[str, tyro.conf.arg(metavar="|".join(STEPS))] = "pack"
    """Last step to do."""

    def config(self) -> dict[str, Any]:
        """What decides the result, as JSON."""
        left_out = ("folder", "through", "name", "target")
        fields = {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}
        return json.loads(json.dumps(fields))


class Calibration:
    """One run. Its properties are the steps' results, read from the folder or computed."""

    def __init__(self, arguments: Run):
        self.arguments = arguments
        self.folder = arguments.folder
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._check_config()

    def _check_config(self) -> None:
        path, config = self.folder / "config.json", self.arguments.config()
        if not path.exists():
            write_atomically(path, json.dumps(config, indent=1) + "\n")
            return
        there = _read_json(path)
        if there != config:
            different = [key for key in config if there.get(key) != config[key]]
            raise EvaluationError(
                f"{self.folder} holds a run with another {', '.join(different)}: "
                f"{[there.get(key) for key in different]} there, {[config[key] for key in different]} here; "
                "choose another folder"
            )

    # --- what every step needs

    @cached_property
    def cases(self) -> dict[str, list[Any]]:
        """Cases by part; the split is in split.json."""
        from calibration.splits import Split, split_cases
        from jaxkv.evaluation.bfcl import load

        every = [case for name in self.arguments.categories for case in load(name)]
        path = self.folder / "split.json"
        if not path.exists():
            split_cases(every, self.arguments.seed).save(path)
        split = Split.read(path)
        limit = self.arguments.limit
        parts = {}
        for part in ("calibration", "development"):
            ids = split.ids(part)
            inside = [case for case in every if case.id in ids]
            parts[part] = [
                case
                for name in self.arguments.categories
                for case in [one for one in inside if one.category == name][:limit]
            ]
        return parts

    @cached_property
    def bench(self) -> Any:
        from calibration.bench import Bench
        from jaxkv.models.loading import load_model
        from jaxkv.policies.pask.all_high import all_high
        from jaxkv.policies.pask.policy import Pask

        arguments = self.arguments
        like = dataclasses.replace(all_high(), window=arguments.window, sinks=arguments.sinks)
        return Bench(
            load_model(arguments.model),
            Pask(like),
            [case for part in self.cases.values() for case in part],
            self.folder,
            rows=arguments.rows,
            max_new_tokens=arguments.max_new_tokens,
        )

    def outcomes(self, part: str) -> dict[str, Any]:
        """Reference outcomes of a part by case."""
        from calibration.reference import run_reference

        if part not in self._outcomes:
            cases = self.cases[part]
            with self._progress(f"reference, {part}", len(cases)) as on_case:
                self._outcomes[part] = run_reference(self.bench, part, cases, on_case)
        return self._outcomes[part]

    @cached_property
    def keys(self) -> Any:
        """The decode keys that the calibration trajectories show."""
        from calibration.buckets import keys_of
        from calibration.reference import trajectory

        vocabulary = self.bench.like.vocabulary
        every, outcomes = keys_of(self.arguments.variant, vocabulary), self.outcomes("calibration")
        seen = {
            every.names[key]
            for case in self.cases["calibration"]
            for keys in trajectory(self.bench, case, outcomes[case.id], every).keys
            for key in keys
        }
        return dataclasses.replace(every, chosen=frozenset(seen))

    @cached_property
    def trajectories(self) -> list[Any]:
        """Calibration reference runs."""
        from calibration.reference import trajectory

        outcomes = self.outcomes("calibration")
        return [trajectory(self.bench, case, outcomes[case.id], self.keys) for case in self.cases["calibration"]]

    @property
    def groups(self) -> int:
        return len(self.bench.like.groups)

    def names(self, stage: str) -> tuple[str, ...]:
        """Keys of a stage."""
        from jaxkv.grammar.prompt_labels import PROMPT_LABELS

        return self.keys.names if stage == "decode" else PROMPT_LABELS

    def reference(self, stage: str) -> Any:
        """The trajectories, or the prompts, in Algorithm 1's form."""
        from calibration.reference import prompt_reference, reference_of

        if stage == "decode":
            return reference_of(self.trajectories)
        return prompt_reference(self.trajectories, self.arguments.window, self.arguments.sinks)

    # --- steps

    def extra_failures(self, stage: Any) -> np.ndarray:
        """Runtime-V: failures beyond the reference's, [Q, C, 2]."""
        from calibration.interventions import extra_failures, interventions

        bench, arguments = self.bench, self.arguments
        by_id = {case.id: case for case in self.cases["calibration"]}
        chosen = interventions(stage, range(len(self.names(stage))), self.groups)
        candidates = {one: one.candidate(self.keys, bench.like) for one in chosen}
        jobs = []
        for one in chosen:
            affected = [
                by_id[t.id] for t in self.trajectories if t.affected(stage, one.key, arguments.window, arguments.sinks)
            ]
            if affected:
                jobs.append((candidates[one], affected))
        with self._progress(f"interventions, {stage}", sum(len(cases) for _, cases in jobs)) as on_case:
            found = bench.run(f"{stage}/interventions", jobs, give_up=True, on_case=on_case)
        names = {one: candidate.name for one, candidate in candidates.items()}
        return extra_failures(found, names, self.trajectories, (len(self.names(stage)), self.groups))

    @cached_property
    def distortion(self) -> dict[str, np.ndarray]:
        """Runtime-D: D(q, a) of both stages."""
        from calibration.distortion import measure

        config = {"keys": list(self.keys.names), **self.arguments.config()}
        with self._progress("distortion", len(self.trajectories)) as on_case:
            found = measure(
                self.bench,
                self.trajectories,
                len(self.keys.names),
                self.folder / "distortion.jsonl",
                config,
                on_case,
            )
        return {str(stage): value for stage, value in found.items()}

    def measurements(self, stage: str) -> dict[str, Any]:
        """measurements.json of a stage: V and D of every bucket."""
        path = self.folder / stage / "measurements.json"
        if not path.exists():
            failures, distortion = self.extra_failures(stage), self.distortion[stage]
            reference = self.reference(stage)
            write_json(
                path,
                {
                    "keys": list(self.names(stage)),
                    "groups": list(self.bench.like.groups),
                    "requests": len(self.trajectories),
                    "reference_failures": sum(not one.correct for one in self.trajectories),
                    "counts": reference.counts(len(self.names(stage))).tolist(),
                    "failures": failures.tolist(),
                    "distortion": distortion.tolist(),
                },
            )
        return _read_json(path)

    def controllers(self, stage: Any) -> tuple[list[Any], np.ndarray]:
        """The controllers to evaluate, and the scores that they share, [Q, C, 2]."""
        from calibration.algorithm import THRESHOLDS, envelope, floors, greedy_path, priorities
        from calibration.algorithm import round_robin as in_turn
        from calibration.controllers import distinct, path_controllers

        arguments, found = self.arguments, self.measurements(stage)
        requests, counts = found["requests"], np.array(found["counts"])
        sensitivity = envelope(np.array(found["failures"], np.int64))
        costs = self.bench.like.costs
        if arguments.allocation == "distortion":
            scores = priorities(np.array(found["distortion"], np.float64), counts, requests, costs)
        else:
            scores = in_turn(len(counts), self.groups)
        reference = self.reference(stage)
        default = (Fraction(arguments.tau[0]), Fraction(arguments.tau[1]))
        pairs = [default, *(pair for pair in THRESHOLDS if pair != default)] if arguments.floors else [default]
        every = []
        for pair in pairs:
            floor = (
                floors(sensitivity, requests, pair) if arguments.floors else np.zeros(sensitivity.shape[:2], np.int8)
            )
            every += path_controllers(
                stage,
                floor,
                greedy_path(floor, scores),
                pair,
                reference,
                costs,
                horizon=arguments.horizon,
                quantile=Fraction(arguments.quantile),
                targets=NOMINAL if pair == default else NOMINAL_OTHERS,
            )
        return distinct(every), scores

    def evaluated(self, stage: Any) -> dict[str, Any]:
        """controllers.json of a stage: every controller on the development split, and the selection of Eq. 9."""
        path = self.folder / stage / "controllers.json"
        if path.exists():
            return _read_json(path)
        from calibration.algorithm import Outcome, select

        controllers, _ = self.controllers(stage)
        candidates = [self._candidate(**{stage: one}) for one in controllers]
        rows = self._on_development(f"{stage}/controllers", candidates, f"controllers, {stage}")
        which = "decode" if stage == "decode" else "prefill"
        outcomes = [Outcome(row["failures"], Fraction(row[f"ratio_{which}"])) for row in rows]
        control = Outcome(self._control_failures, Fraction(1))
        tolerance = Fraction(self.arguments.alpha_decode if stage == "decode" else self.arguments.alpha_prompt)
        requests = len(self.cases["development"])
        result = {
            "requests": requests,
            "control": {"failures": control.failures, "ratio": "1"},
            "tolerance": str(tolerance),
            "selected": select(outcomes, control, requests, tolerance),
            "controllers": [
                {
                    "thresholds": [str(value) for value in one.thresholds],
                    "upgrades": one.upgrades,
                    "path_length": one.path_length,
                    "nominal": str(one.nominal),
                    "failures": outcome.failures,
                    "ratio": str(outcome.ratio),
                    "tokens": row["tokens"],
                    "actions": one.actions.tolist(),
                    "floors": one.floors.tolist(),
                }
                for one, outcome, row in zip(controllers, outcomes, rows, strict=True)
            ],
        }
        write_json(path, result)
        return _read_json(path)

    def combined(self) -> dict[str, Any]:
        """combined.json: pairs of a decode and a prompt controller on the development split.

        For each target, the pairs that the stages' own figures predict to fit it, those of the fewest predicted
        failures first; and the two that Eq. 9 selected.
        """
        path = self.folder / "combined.json"
        if path.exists():
            return _read_json(path)
        from calibration.selection import pairs_to_run

        stages = {stage: self.evaluated(stage) for stage in ("decode", "prompt")}
        weights = self._weights
        pairs = pairs_to_run(stages["decode"], stages["prompt"], weights, TARGETS)
        made = {stage: self.controllers(stage)[0] for stage in stages}
        candidates = [self._candidate(decode=_at(made["decode"], d), prompt=_at(made["prompt"], p)) for d, p in pairs]
        rows = self._on_development("combined", candidates, "both stages")
        result = {
            "requests": len(self.cases["development"]),
            "control": {"failures": self._control_failures, "ratio": "1"},
            "rows": [{"decode": d, "prompt": p, **row} for (d, p), row in zip(pairs, rows, strict=True)],
        }
        write_json(path, result)
        return _read_json(path)

    def pack(self) -> Path:
        """policy.json: the combined row with the fewest development failures within the target."""
        from calibration.algorithm import Outcome, select_within
        from jaxkv.policies.pask.policy_file import save_policy

        arguments = self.arguments
        found = self.combined()
        outcomes = [Outcome(row["failures"], Fraction(row["ratio_total"])) for row in found["rows"]]
        budget = Fraction(arguments.target)
        best = select_within(outcomes, budget)
        if best is None:
            cheapest = min(outcome.ratio for outcome in outcomes)
            raise EvaluationError(
                f"no combined row costs at most {float(budget):g} of Full KV on development, the cheapest "
                f"{float(cheapest):g}; give a larger --target"
            )
        row = found["rows"][best]
        made = {stage: _at(self.controllers(stage)[0], row[stage]) for stage in ("decode", "prompt")}
        note = (
            f"Calibrated on BFCL ({', '.join(arguments.categories)}), seed {arguments.seed}: "
            f"{len(self.cases['calibration'])} calibration and {found['requests']} development cases. Best on "
            f"development within a total budget of {budget}: {row['failures']} failures against "
            f"{found['control']['failures']} of Full KV, ratio_total {float(Fraction(row['ratio_total'])):.4f}."
        )
        frozen = self._frozen(arguments.name, note, made["decode"], made["prompt"])
        return save_policy(frozen, self.folder / "policy.json")

    # --- helpers

    @property
    def _control_failures(self) -> int:
        return sum(not one.correct for one in self.outcomes("development").values())

    @cached_property
    def _weights(self) -> tuple[int, int]:
        """Prompt and answer tokens of the development split under Full KV."""
        outcomes = self.outcomes("development").values()
        prompts = self.bench.prompt_ids
        return sum(len(prompts[one.id]) for one in outcomes), sum(one.tokens for one in outcomes)

    def _frozen(self, name: str, note: str, decode: Any, prompt: Any) -> Any:
        from calibration.controllers import frozen_policy

        chosen = {
            stage: None if one is None else (one, self.controllers(stage)[1])
            for stage, one in (("decode", decode), ("prompt", prompt))
        }
        bench = self.bench
        return frozen_policy(name, note, self.keys, bench.model, bench.like.frozen, chosen["decode"], chosen["prompt"])

    def _candidate(self, decode: Any = None, prompt: Any = None) -> Any:
        from calibration.bench import Candidate
        from jaxkv.policies.pask.policy import Pask

        bench = self.bench
        name = "+".join("high" if one is None else one.name for one in (prompt, decode))
        policy = Pask(self._frozen(name, "", decode, prompt))
        bound = policy.bind(bench.spec, bench.model.config.context, bench.model.fingerprint)
        low = (True,) * self.groups
        none = (False,) * self.groups
        return Candidate(name, bound, none if prompt is None else low, none if decode is None else low)

    def _on_development(self, stage: str, candidates: Sequence[Any], title: str) -> list[dict[str, Any]]:
        """Failures, exact ratios and tokens of each candidate on the development split."""
        from jaxkv.state.payload import Cost

        cases = self.cases["development"]
        with self._progress(title, len(candidates) * len(cases)) as on_case:
            found = self.bench.run(stage, [(one, cases) for one in candidates], give_up=True, on_case=on_case)
        rows = []
        for candidate in candidates:
            outcomes = found[candidate.name].values()
            cost = sum((Cost(**one.cost) for one in outcomes), Cost())
            rows.append(
                {
                    "failures": sum(not one.correct for one in outcomes),
                    "ratio_prefill": str(Fraction(cost.prefill, cost.prefill_full)),
                    "ratio_decode": str(Fraction(cost.decode, cost.decode_full)),
                    "ratio_total": str(Fraction(cost.prefill + cost.decode, cost.prefill_full + cost.decode_full)),
                    "tokens": sum(one.tokens for one in outcomes),
                }
            )
        return rows

    @contextmanager
    def _progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar with the time left; seconds and generated tokens are added to times.json when the block ends."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        started, count = time.perf_counter(), {"tokens": 0, "cases": 0}
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)

            def on_case(tokens: int) -> None:
                count["tokens"] += tokens
                count["cases"] += bool(tokens)
                bar.advance(task)

            try:
                yield on_case
            finally:
                self._add_time(title, time.perf_counter() - started, count)

    def _add_time(self, title: str, seconds: float, count: Mapping[str, int]) -> None:
        path = self.folder / "times.json"
        times = _read_json(path) if path.exists() else {}
        entry = times.setdefault(title, {"seconds": 0.0, "tokens": 0, "cases": 0})
        entry["seconds"] = round(entry["seconds"] + seconds, 1)
        for key, value in count.items():
            entry[key] += value
        write_json(path, times)


def write_json(path: Path, value: Any) -> None:
    """JSON of a run's folder, whole or not at all."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} cannot be read ({error}); remove it to compute it anew") from error


def _at(controllers: Sequence[Any], index: int | None) -> Any:
    return None if index is None else controllers[index]


def calibrate(arguments: Run) -> int:
    """Do the steps in order, up to `through`."""
    if arguments.through not in STEPS:
        raise EvaluationError(f"--through {arguments.through}: choose one of {', '.join(STEPS)}")
    run = Calibration(arguments)
    steps: dict[str, Callable[[], Any]] = {
        "split": lambda: run.cases,
        "reference": lambda: run.outcomes("calibration"),
        "interventions": lambda: [run.extra_failures(stage) for stage in ("prompt", "decode")],
        "distortion": lambda: run.distortion,
        "controllers": lambda: [run.evaluated(stage) for stage in ("prompt", "decode")],
        "combined": run.combined,
        "pack": run.pack,
    }
    for step in STEPS[: STEPS.index(arguments.through) + 1]:
        steps[step]()
    figures: dict[str, Any] = {}
    for title, entry in (_read_json(arguments.folder / "times.json")).items():
        figures |= {f"{title.replace(', ', '.')}.{key}": value for key, value in entry.items()}
    run_record(arguments.folder / "run.json", arguments, figures, [arguments.seed])
    print(arguments.folder / ("policy.json" if arguments.through == "pack" else "run.json"))
    return 0


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.cli(Run, description=__doc__, args=arguments)
    return run_script(lambda: calibrate(parsed))


if __name__ == "__main__":
    sys.exit(cli())
