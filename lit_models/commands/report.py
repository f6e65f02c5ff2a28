"""HTML report on one run, or on two side by side."""

import csv
import json
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from datamodules.core.store import write_whole
from lit_models.config_files import changes, newest_config, read_config
from lit_models.errors import UsageError

GENERATOR = '<meta name="generator" content="unisono report">'
TEMPLATES = Path(__file__).parent / "templates"
MOST_STRETCHES = 240  # of a curve; at most four points of each are drawn
LOG_FROM = 50.0  # ratio of the largest to the smallest value

Line = dict[str, Any]
Points = list[tuple[float, float]]  # step and value; a value may be NaN or infinite


@dataclass
class RunRecord:
    """Content of a run folder; a missing or damaged file is left empty and noted."""

    folder: Path
    ledger: list[Line]  # all lines, in the order of writing
    lineage: dict[int, Line]  # step -> line, of what led to the newest weights
    age_s: float = 0.0  # since the last write to the ledger
    topology: dict[str, Any] = field(default_factory=dict)  # content of topology.json
    plan: dict[str, Any] = field(default_factory=dict)  # of plan.json
    failure: dict[str, Any] = field(default_factory=dict)  # of failure.json
    config: dict[str, Any] = field(default_factory=dict)  # of the newest training
    config_text: str = ""  # text of its file
    metrics: dict[str, Points] = field(default_factory=dict)  # name -> values by step
    throughput: list[Line] = field(default_factory=list)  # lines of throughput.jsonl
    notes: list[str] = field(default_factory=list)  # sentences on missing or damaged files

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def steps(self) -> list[Line]:
        """All lines of optimizer steps, including steps that were repeated later."""
        return [ln for ln in self.ledger if "event" not in ln and "resumed_from_step" not in ln]

    def series(self, key: str) -> Points:
        """Return step and value of each surviving step that has the key."""
        pairs = ((float(step), line.get(key)) for step, line in sorted(self.lineage.items()))
        return [(step, float(value)) for step, value in pairs if value is not None]

    @property
    def seconds(self) -> float:
        """Duration of all steps, repeated ones included, and of what lies between them."""
        return sum(line.get("seconds", 0.0) for line in self.steps)

    @property
    def median_seconds(self) -> float:
        """Median duration of a surviving step; 0 without steps."""
        durations = [seconds for _, seconds in self.series("seconds")]
        return statistics.median(durations) if durations else 0.0

    @property
    def evaluated(self) -> dict[str, Points]:
        """The metrics of evaluations."""
        others = ("train/", "throughput/")
        return {n: points for n, points in self.metrics.items() if not n.startswith(others)}

    @property
    def monitor(self) -> tuple[str, str]:
        """Name and mode of the metric that chose the best checkpoint, else of val/loss."""
        facts = self.topology.get("monitor") or {}
        known = facts.get("name") in self.metrics
        return (facts["name"], facts["mode"]) if known else ("val/loss", "min")


def report(run: Path, other: Path | None = None, *, to: Path | None = None) -> int:
    """Write an HTML page on one run or on two; it needs no network.

    Args:
        run: a run folder, such as runs/demo.
        other: a second run folder: the page lists the differences, then shows both.
        to: the file to write; by default RUN/report.html, or compare-RUN-OTHER.html in the working
            folder. An earlier report is replaced, never another file.

    Raises:
        FileNotFoundError: a folder holds no run.
        UsageError: the file exists and is no report.
    """
    from jinja2 import Environment, FileSystemLoader

    runs = [read_run(Path(folder), time.time()) for folder in (run, other) if folder is not None]
    of_one, of_both = runs[0].folder / "report.html", f"compare-{runs[0].name}-{runs[-1].name}.html"
    path = Path(to or (of_both if other else of_one))
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if GENERATOR not in file.read(1000):
                raise UsageError(
                    f"{path} exists and is no report of this command, so it is not replaced; move "
                    "it away, or name another file with --to."
                )
    facts = run_facts(runs[0]) if len(runs) == 1 else comparison(*runs)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    template = environment.get_template("report.html")
    vendored = {
        name: (TEMPLATES / f"uplot.min.{name}").read_text("utf-8") for name in ("js", "css")
    }
    write_whole(path, template.render(generator=GENERATOR, uplot=vendored, **facts))
    print(f"written to {path}")
    return 0


def read_run(folder: Path, now_s: float) -> RunRecord:
    """Return the content of a run folder; files other than the ledger may be missing. `now_s` is
    the current time, for the age of the ledger.

    Raises:
        FileNotFoundError: the folder or its ledger is missing.
        ValueError: a line other than the last of its file is damaged, or the config is.
    """
    from lit_models.commands.verify import read_ledger, surviving
    from lit_models.run_files import LEDGER, json_lines

    ledger = read_ledger(folder)
    age_s = now_s - (folder / LEDGER).stat().st_mtime
    run = RunRecord(folder, ledger, surviving(ledger).steps, age_s)
    notes = run.notes
    for name, content in (("topology", run.topology), ("plan", run.plan), ("failure", run.failure)):
        try:
            content.update(**json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            if name != "failure":
                notes.append(f"There is no {name}.json: its facts are left out.")
        except (ValueError, TypeError) as error:
            notes.append(f"{name}.json is damaged ({error}): its facts are left out.")
    run.metrics = _read_metrics(folder / "metrics.csv", max(run.lineage, default=0), notes)
    run.throughput = json_lines(folder / "throughput.jsonl")
    try:
        config = newest_config(folder)
    except FileNotFoundError:
        notes.append("There is no config.yaml: a run of a script has none.")
        return run
    run.config_text, run.config = config.read_text("utf-8"), read_config(config)
    return run


def _read_metrics(path: Path, last_step: int, notes: list[str]) -> dict[str, Points]:
    """Return metric -> (completed steps, value) points; empty cells are skipped.

    Lightning numbers a validation during training by the last step, counted from 0, and all other
    rows by completed steps. One after training starts at 0; it counts if there is no other.
    """
    if not path.exists():
        notes.append("There is no metrics.csv: metrics of evaluations are not shown.")
        return {}
    series: dict[str, dict[float, float]] = {}
    alone: dict[str, Points] = {}  # of evaluations after training: the newest
    damaged, newest = 0, 0.0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file, restval=""):
            try:
                step = float(row.pop("step", ""))
                row.pop("epoch", None)
                values = {name: float(text) for name, text in row.items() if text}
            except (TypeError, ValueError):
                damaged += 1
                continue
            for name, value in values.items():
                inside = "train/loss" not in values and name.startswith("val/")
                done = min(step + 1, last_step) if inside else step
                if name.startswith("test/") or (inside and done < newest):
                    alone[name] = [(float(last_step), value)]
                    continue
                newest = max(newest, done)
                series.setdefault(name, {})[done] = value
    if damaged:
        notes.append(f"metrics.csv: {damaged} damaged rows are left out, as a kill leaves them.")
    return alone | {name: sorted(points.items()) for name, points in series.items()}


def attempts_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return for each start of a run its `number`, `devices`, steps `begin` and `last`, `seconds`
    of training, `end` in words and the time when it `began`."""
    attempts: list[dict[str, Any]] = []
    for line in run.ledger:
        event = line.get("event")
        if "resumed_from_step" in line:
            begin = line["resumed_from_step"]
            began = datetime.fromisoformat(line["started_at"]).astimezone(UTC)
            one = {"number": line["attempt"], "devices": line["world_size"], "began": began}
            one |= {"begin": begin, "last": begin, "seconds": 0.0, "end": "broke off"}
            attempts.append(one)
        elif attempts and event in ("ended", "stopped"):
            attempts[-1]["end"] = "ended" if event == "ended" else f"stopped by {line['reason']}"
        elif attempts and event is None:
            attempts[-1]["last"] = line["step"]
            attempts[-1]["seconds"] += line.get("seconds", 0.0)
    if attempts and run.ledger[-1].get("event") != "stopped":
        attempts[-1]["end"] = re.split(":| after", ending(run)[1])[0].lower()
    return attempts


def ending(run: RunRecord) -> tuple[str, str]:
    """Return the state of a run: good, warn or bad, and a sentence."""
    last, newest = max(run.lineage, default=0), run.ledger[-1] if run.ledger else {}
    at = f"after {counted(last, 'step')}"
    if newest.get("event") == "stopped":
        return "warn", f"Stopped by {newest['reason']} {at}; --ckpt_path auto goes on."
    if run.failure:
        where = f"rank {run.failure.get('rank')}, step {run.failure.get('step')}"
        return "bad", f"Failed {at} ({where}): {run.failure.get('error')}"
    trainer, per_epoch = run.config.get("trainer") or {}, run.plan.get("steps_per_epoch") or 0
    limits = [trainer.get("max_steps") or -1, (trainer.get("max_epochs") or -1) * per_epoch]
    planned = min((int(limit) for limit in limits if limit > 0), default=None)
    if run.topology.get("is_over"):
        return "good", f"Finished {at}."
    of = f" of {planned:,}" if planned else ""
    ago = f"the newest line is {duration(run.age_s)} old"
    return "warn", f"Not finished: {last:,}{of} steps, {ago}: it runs, was killed, or hangs."


def best_of(run: RunRecord) -> tuple[float, float] | None:
    """Return step and value of the best evaluation; `None` before the first."""
    name, mode = run.monitor
    finite = [(step, v) for step, v in run.metrics.get(name, []) if math.isfinite(v)]
    return (max if mode == "max" else min)(finite, key=lambda point: point[1], default=None)


def run_facts(run: RunRecord) -> dict[str, Any]:
    """Return the variables of the template for one run."""
    from lit_models.commands.verify import verify_run

    attempts = attempts_of(run)
    proof, state = None, "not checked"
    try:
        proof = verify_run(run.folder)
        state = counted(len(proof.faults), "fault") if proof.faults else "holds"
    except (OSError, ValueError, KeyError, TypeError) as error:
        run.notes.append(f"The proof is not checked: {error}")
    tests = list(tests_of(run))
    tiles = [(f"Test {n}", v, f"baseline {b}" if b else "no baseline") for n, v, b in tests[:1]]
    if best := best_of(run):
        tiles.append((f"Best {run.monitor[0]}", shown(best[1]), f"at step {best[0]:,.0f}"))
    num_epochs = len({line["epoch"] for line in run.lineage.values()})
    num_samples = sum(line["samples"] for line in run.lineage.values())
    world = attempts[-1]["devices"] if attempts else run.topology.get("world_size", 0)
    tiles += [
        ("Steps", f"{len(run.lineage):,}", f"in {counted(num_epochs, 'epoch')}"),
        ("Samples used", f"{num_samples:,}", "repeats of epochs counted"),
        ("Training time", duration(run.seconds), counted(len(attempts), "attempt")),
        ("Devices", f"{world:,}", run.topology.get("strategy", "")),
        ("Exactly-once proof", state, "of unisono verify"),
    ]
    losses = {"train/loss": run.series("loss"), "val/loss": run.metrics.get("val/loss", [])}
    terms: dict[str, Points] = {}
    for step, line in sorted(run.lineage.items()):
        for term, value in line.get("terms", {}).items():
            terms.setdefault(term, []).append((float(step), float(value)))
    drawn = [chart(n, {n: run.metrics[n]}) for n in drawn_metrics(run)]
    charts = [
        chart("Loss", {name: points for name, points in losses.items() if points}, True),
        *([chart("Terms of the loss", terms, True)] if len(terms) > 1 else []),
        *drawn[:1],
        chart("Learning rate", {"learning rate": run.series("learning_rate")}),
        chart("Gradient norm", {"before clipping": run.series("grad_norm")}, True),
        chart("Seconds per step", {"seconds": run.series("seconds")}, True),
        *drawn[1:],
    ]
    return {
        "title": run.name,
        "states": [(None, *ending(run))],
        "tiles": tiles,
        "tests": tests,
        "has_errors": (run.folder / "errors-test.csv").exists(),
        "marks": [attempt["begin"] for attempt in attempts[1:]],
        "charts": charts,
        "attempts": attempts,
        "duration": duration,
        "events": [ln for ln in run.ledger if ln.get("event") == "not_applied"],
        "metrics": [(n, shown(p[-1][1])) for n, p in sorted(run.evaluated.items())],
        "facts": facts_of(run),
        "proof": proof,
        "warnings": [*run.topology.get("warnings", []), *run.notes],
        "sources": [("Command and configuration", run)],
    }


def tests_of(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield each test metric with its value and its baseline, or "": first those with a baseline,
    the monitored metric ahead of the others.

    Rankers and retrievers write theirs to ranking-test.json, with those of other systems.
    """
    last = {name: points[-1][1] for name, points in run.metrics.items()}
    first = run.monitor[0].removeprefix("val/")
    path = run.folder / "ranking-test.json"
    if path.exists():
        systems = json.loads(path.read_text(encoding="utf-8"))["systems"]
        own = next(iter(systems.values()))
        last |= {f"test/{name}": value for name, value in own.items()}
        last |= {f"test/baseline_{n}": v for n, v in systems.get("bm25", {}).items()}
        first = next(iter(own))
    known = {n.removeprefix("test/baseline_"): v for n, v in last.items() if "/baseline_" in n}
    names = [n.removeprefix("test/") for n in last if re.match("test/(?!baseline_)", n)]
    names.sort(key=lambda n: (n != first or n not in known, n not in known, n != first))
    for name in names:
        value, baseline = last[f"test/{name}"], shown(known[name]) if name in known else ""
        yield name, shown(value), baseline


def facts_of(run: RunRecord) -> list[tuple[str, str]]:
    """Return name and value of what is known about machine, batch, speed and versions."""
    top, lines = run.topology, run.throughput
    plan, code = top.get("plan", {}), top.get("code") or {}

    def mean(key: str, form: str) -> str | None:
        pairs = [(ln[key], ln.get("seconds", 1)) for ln in lines if ln.get(key) is not None]
        weight = sum(seconds for _, seconds in pairs)
        average = sum(value * seconds for value, seconds in pairs) / weight if weight else None
        return None if average is None else format(average, form)

    samples = sum(line["samples"] for line in run.steps)
    rate = f"{samples / run.seconds:,.1f}" if run.seconds else None
    ranks = top.get("memory", [])
    memory = sorted(one.get("allocated_bytes") or one.get("resident_bytes") or 0 for one in ranks)
    sizes = [f"{size / (1 << 30):,.2f} GiB" for size in memory if size]
    batch = plan.get("global_batch_size")
    facts = {
        "host:rank:device": ", ".join(top.get("host_rank_device", [])),
        "strategy": top.get("strategy"),
        "backend": top.get("backend"),
        "precision": top.get("precision"),
        "exactness": (top.get("exactness") or {}).get("level"),
        "global batch": batch
        and f"{batch:,} = {plan.get('num_replicas')} × "
        f"{plan.get('micro_batch_size')} × {plan.get('accumulate_grad_batches')} accumulated",
        "samples per second": mean("samples_per_s", ",.1f") or rate,
        "tokens per second": mean("tokens_per_s", ",.0f"),
        "padding": mean("padding_share", ".1%"),
        "of the device's peak": mean("mfu", ".1%"),
        "seconds per step": f"{run.median_seconds:.4g} (median)" if run.lineage else None,
        "memory of a rank": " to ".join(dict.fromkeys((sizes[0], sizes[-1]))) if sizes else None,
        "versions": ", ".join(f"{n} {v}" for n, v in (top.get("versions") or {}).items()),
        "code": code and f"unisono {code.get('version')}, digest {code.get('digest')}",
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def drawn_metrics(run: RunRecord) -> list[str]:
    """Return metrics with two different values or more, the monitored one first; no val/loss."""
    moving = [n for n, points in run.evaluated.items() if len({v for _, v in points}) > 1]
    names = [name for name in moving if not name.startswith("val/loss")]
    return sorted(names, key=lambda name: name != run.monitor[0])


def comparison(first: RunRecord, second: RunRecord) -> dict[str, Any]:
    """Return the variables of the template for two runs."""
    runs = (first, second)
    names = [run.name if first.name != second.name else str(run.folder) for run in runs]
    by_aspect = differences(first, second)
    rows: list[tuple[str, ...]] = []
    for aspect, changed in by_aspect.items():
        rows += [("" if place else aspect, *row, "") for place, row in enumerate(changed or ())]
    common = sorted(first.evaluated.keys() & second.evaluated.keys())
    values: dict[str, list[float]] = {
        "steps": [len(run.lineage) for run in runs],
        "median seconds per step": [run.median_seconds for run in runs],
        "train/loss": [p[-1][1] if (p := run.series("loss")) else math.nan for run in runs],
        **{name: [run.metrics[name][-1][1] for run in runs] for name in common},
    }
    rows.append(("last value", "training time", *(duration(run.seconds) for run in runs), ""))
    for name, (one, two) in values.items():
        change = "" if math.isnan(two - one) else f"{two - one:+,.4g}"
        rows.append(("", name, shown(one), shown(two), change))
    by_name = dict(zip(names, runs, strict=True))
    drawn = {n for run in runs for n in [*drawn_metrics(run), "val/loss"]} & set(common)
    watched = [run.monitor[0] for run in runs]
    return {
        "title": f"{names[0]} and {names[1]}",
        "states": [(n, *ending(run)) for n, run in by_name.items()],
        "differs": [aspect for aspect, rows_ in by_aspect.items() if rows_],
        "same": [aspect for aspect, rows_ in by_aspect.items() if rows_ == []],
        "unknown": [aspect for aspect, rows_ in by_aspect.items() if rows_ is None],
        "gap": loss_gap(first, second),
        "names": names,
        "rows": rows,
        "charts": curves(by_name, sorted(drawn, key=lambda n: (n not in watched, n))),
        "warnings": [f"{n}: {note}" for n, run in by_name.items() for note in run.notes],
        "sources": list(by_name.items()),
    }


def differences(
    first: RunRecord, second: RunRecord
) -> dict[str, list[tuple[str, str, str]] | None]:
    """Return aspect -> name and both values of each difference; `None` if a run lacks it."""

    def aspects(run: RunRecord) -> dict[str, dict[str, Any]]:
        plan, top = run.plan, run.topology
        request = {**plan.get("request", {})}
        batch = top.get("plan", {})
        config = {n: v for n, v in run.config.items() if n != "seed_everything"}
        trainer = run.config.get("trainer") or {}  # the page names the folders
        config["trainer"] = {n: v for n, v in trainer.items() if n != "default_root_dir"}
        kinds = sorted({place.split(":")[2] for place in top.get("host_rank_device", [])})
        devices: dict[str, Any] = {"kind": ", ".join(kinds)}
        devices |= {n: top.get(n) for n in ("world_size", "num_nodes", "strategy", "precision")}
        devices |= {n: batch.get(n) for n in ("micro_batch_size", "accumulate_grad_batches")}
        data = {n: request.pop(n, None) for n in ("fingerprint", "num_samples")}
        order = {"steps_per_epoch": plan.get("steps_per_epoch"), **request}
        return {
            "data": plan and data,
            "plan": plan and order,
            "seed": run.config and {"seed": run.config.get("seed_everything")},
            "configuration": run.config and config,
            "code": top.get("code") or {},
            "devices": top and devices,
            "versions": top.get("versions") or {},
        }

    def words(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    one, two = aspects(first), aspects(second)
    by_aspect: dict[str, list[tuple[str, str, str]] | None] = dict.fromkeys(one)
    for aspect in one:
        if one[aspect] and two[aspect]:
            pairs = changes(one[aspect], two[aspect])
            by_aspect[aspect] = [(name, words(old), words(new)) for name, old, new in pairs]
    return by_aspect


def loss_gap(first: RunRecord, second: RunRecord) -> tuple[float, int] | None:
    """Return the largest relative difference between the losses of common steps, and the number of
    these steps; `None` if the plans differ, so that steps have different samples."""
    requests = [run.plan.get("request") for run in (first, second)]
    if requests[0] is None or requests[0] != requests[1]:
        return None
    steps = sorted(first.lineage.keys() & second.lineage.keys())
    pairs = [(first.lineage[step]["loss"], second.lineage[step]["loss"]) for step in steps]
    gaps = [abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in pairs if math.isfinite(a + b)]
    return (max(gaps), len(gaps)) if gaps else None


def curves(runs: dict[str, RunRecord], metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Return charts that each draw all runs, name -> record: values of the ledgers, then metrics of
    evaluations."""
    charts = [
        chart(title, {n: run.series(key) for n, run in runs.items()}, key != "learning_rate")
        for title, key in (
            ("Training loss", "loss"),
            ("Learning rate", "learning_rate"),
            ("Gradient norm", "grad_norm"),
            ("Seconds per step", "seconds"),
        )
    ]
    of_all = {metric: {n: r.metrics.get(metric, []) for n, r in runs.items()} for metric in metrics}
    return charts + [chart(metric, series) for metric, series in of_all.items()]


def chart(title: str, series: dict[str, Points], may_be_log: bool = False) -> dict[str, Any]:
    """Return the data of a chart: steps and values of each series, `None` for non-finite values.

    With `may_be_log`, positive values that differ by a factor of 50 get a logarithmic scale.
    """
    finite = [v for points in series.values() for _, v in points if math.isfinite(v)]
    is_log = may_be_log and bool(finite) and 0 < LOG_FROM * min(finite) <= max(finite)
    gaps = [f"{step:,.0f}" for p in series.values() for step, v in p if not math.isfinite(v)]
    notes = ["Logarithmic scale."] if is_log else []
    if gaps:
        where = ", ".join(gaps[:8]) + ", …" * (len(gaps) > 8)
        notes.append(f"Not finite at {counted(len(gaps), 'step')} ({where}).")
    if not finite:
        notes.append("No value was written.")
    lines = []
    for name, points in series.items():
        drawn = thinned(points)
        if len(drawn) < len(points):
            notes.append(
                f"{len(drawn):,} of {len(points):,} points of {name} are drawn: no extreme is lost."
            )
        values = [value if math.isfinite(value) else None for _, value in drawn]
        lines.append({"name": name, "steps": [step for step, _ in drawn], "values": values})
    return {"title": title, "series": lines, "is_log": is_log, "note": " ".join(notes)}


def thinned(points: Points) -> Points:
    """Return few enough points to draw: the first, last, lowest and highest of each stretch, so
    that no extreme is lost (M4: Jugel et al., VLDB 2014), and all non-finite points."""
    if len(points) <= 4 * MOST_STRETCHES:
        return points
    drawn = {point for point in points if not math.isfinite(point[1])}
    width = math.ceil(len(points) / MOST_STRETCHES)
    for begin in range(0, len(points), width):
        finite = [point for point in points[begin : begin + width] if math.isfinite(point[1])]
        if finite:
            drawn |= {finite[0], finite[-1]}
            drawn |= {f(finite, key=lambda point: point[1]) for f in (min, max)}
    return sorted(drawn)


def shown(value: float | None) -> str:
    """Return a number with four significant digits, whole numbers in full; a dash for `None` and
    NaN, a mean over nothing."""
    if value is None or math.isnan(value):
        return "–"
    is_whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
    return f"{int(value):,}" if is_whole else f"{value:,.4g}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun in singular or plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration such as `1 day, 2:03:04`."""
    return str(timedelta(seconds=round(seconds)))
