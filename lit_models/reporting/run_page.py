"""The page of one run."""

import json
from typing import Any

from lit_models.reporting.chart import Interruption, chart
from lit_models.reporting.curves import TREND_FROM, Series
from lit_models.reporting.markup import Html, facts, joined, table, tag
from lit_models.reporting.outcome import attempts, ending, events, interruptions, total_seconds
from lit_models.reporting.page import page, section
from lit_models.reporting.reading import (
    Points,
    RunRecord,
    best_of,
    ledger_series,
    monitored,
    term_series,
)
from lit_models.reporting.samples import worst_samples
from lit_models.reporting.timing import plan_rows, throughput_facts, time_split
from lit_models.reporting.wording import counted, duration, gib, moment, share, shown
from lit_models.training.lineage import Proof, verify_run

MOST_METRICS = 6  # charts of metrics in sight; the others unfold
GLYPHS = {"good": "●", "warn": "▲", "bad": "■"}


def run_page(run: RunRecord, forecast: dict[str, Any] | None = None) -> str:
    """Return the page of a run.

    Args:
        run: what its folder holds.
        forecast: as `forecast_of` returns it.
    """
    marks = interruptions(run)
    proof = proof_of(run)
    header = _header(run, proof)  # its notes stand among the warnings
    sections = [
        section("Curves", *_curves(run, marks), wide=True),
        section("Where the time went", time_split(run), facts(throughput_facts(run))),
        section("Plan and measurement", *_plan(run, forecast)),
        section("Attempts", *_attempts(run)),
        section("Where it ran", topology_facts(run)),
        section("Metrics", *_metrics_table(run), wide=True),
        section("Samples", *_samples(run), wide=True),
        section("Proof", *_proof(proof)),
        section("Warnings", *_warnings(run)),
        section("Command and configuration", *_configuration(run), wide=True),
    ]
    return page(f"{run.name} · Unisono", header, sections)


def proof_of(run: RunRecord) -> Proof | str:
    """Return what `unisono verify` finds, or why it cannot look."""
    try:
        return verify_run(run.folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{error}"


def state(run: RunRecord) -> Html:
    """Return how a run stands: a sign and a sentence."""
    end = ending(run)
    sign = tag("span", GLYPHS[end.kind], class_=f"state {end.kind}", aria_hidden="true")
    return joined([sign, " ", end.sentence])


def _header(run: RunRecord, proof: Proof | str) -> Html:
    world = run.topology.get("world_size") or (run.starts[-1]["world_size"] if run.starts else 0)
    epochs = len({line["epoch"] for line in run.lineage.values()})
    samples = sum(line["samples"] for line in run.lineage.values())
    tries = len(run.starts)
    tiles: list[tuple[str, Html]] = [
        ("Steps", _tile(shown(len(run.lineage)), f"in {counted(epochs, 'epoch')}")),
        ("Samples used", _tile(shown(samples), "repeats of epochs counted")),
        ("Training time", _tile(duration(total_seconds(run)), counted(tries, "attempt"))),
        ("Devices", _tile(shown(world), run.topology.get("strategy", ""))),
    ]
    watched = monitored(run)
    if watched and (best := best_of(run.metrics[watched[0]], watched[1])):
        tiles.insert(0, (f"Best {watched[0]}", _tile(shown(best[1]), f"at step {shown(best[0])}")))
    tiles[:0] = _results(run, watched[0].removeprefix("val/") if watched else "loss")
    word = "not checked"
    if isinstance(proof, Proof):
        word = "holds" if not proof.faults else counted(len(proof.faults), "fault")
    tiles.append(("Exactly-once proof", _tile(word, "of unisono verify")))
    return joined([
        tag("p", "Unisono · report of a run", class_="eyebrow"),
        tag("h1", run.name),
        tag("p", state(run), class_="lead"),
        _clock(run),
        tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in tiles), class_="tiles"),
    ])  # fmt: skip


def _results(run: RunRecord, name: str) -> list[tuple[str, Html]]:
    """Return the tile of the test's result, with that of a baseline; nothing without a test.

    Args:
        run: of the page.
        name: of the metric to show where no baseline says which.
    """
    last = {n: points[-1][1] for n, points in run.metrics.items() if points}
    prefix = "test/baseline_"
    compared = [n.removeprefix(prefix) for n in last if n.startswith(prefix)]
    if compared and name not in compared:
        name = compared[0]
    for path in (run.folder / "ranking.json", run.folder / "retrieval-test.json"):
        try:
            own, *others = json.loads(path.read_text(encoding="utf-8"))["systems"].items()
            name = next(iter(own[1]))
            last |= {f"test/{name}": own[1][name]}
            last |= {f"{prefix}{name}": metrics[name] for n, metrics in others if n == "bm25"}
        except FileNotFoundError:
            continue
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            run.notes.append(f"{path.name} is not what it should be ({error!r}); not shown.")
    if f"test/{name}" not in last:
        return []
    known = last.get(f"{prefix}{name}")
    below = "no baseline" if known is None else f"baseline {shown(known)}"
    return [(f"Test {name}", _tile(shown(last[f"test/{name}"]), below))]


def _clock(run: RunRecord) -> Html | None:
    """Return when the first attempt began and the newest was last seen."""
    tries = attempts(run)
    if not tries or tries[0].began is None or tries[-1].last_seen is None:
        return None
    words = f"Began {moment(tries[0].began)}, last step {moment(tries[-1].last_seen)} (UTC)."
    return tag("p", words, class_="note")


def _tile(value: str, below: str) -> Html:
    return joined([value, tag("small", below) if below else None])


def _curves(run: RunRecord, marks: list[Interruption]) -> list[Html]:
    """Return the charts, and below them, folded, those of the less important metrics."""
    charts = [
        chart("Loss", loss_series(run), marks, may_be_log=True),
        chart("Learning rate", [Series("Learning rate", ledger_series(run, "learning_rate"))],
              marks),
        chart("Gradient norm", [Series("before clipping", ledger_series(run, "grad_norm"))],
              marks, may_be_log=True),
        chart("Seconds per step", [Series("Seconds per step", ledger_series(run, "seconds"))],
              marks, "Evaluations and checkpoints between two steps stand out.", True),
    ]  # fmt: skip
    terms = term_series(run)
    if len(terms) > 1:
        lines = [Series(n, points, colour=i % 4 + 1) for i, (n, points) in enumerate(terms.items())]
        charts.insert(1, chart("Terms of the loss", lines, marks, may_be_log=True))
    rates = [(float(ln["step"]), ln.get("samples_per_s")) for ln in run.throughput
             if not ln["is_discarded"]]  # fmt: skip
    if rates:
        points: Points = sorted((x, float(y)) for x, y in rates if y is not None)
        charts.append(chart("Samples per second", [Series("Samples per second", points)], marks))
    metrics = [chart(name, [Series(name, run.metrics[name], True)], marks)
               for name in drawn_metrics(run)]  # fmt: skip
    words = "The thin line shows single steps, the thick one the mean of a fortieth of them. "
    words += "Where not all points are drawn, the first, last, lowest and highest of each short "
    words += "stretch of steps are: no extreme is lost."
    is_long = len(run.lineage) >= TREND_FROM
    out = [tag("p", words, class_="note lede") if is_long else Html("")]
    out += [tag("div", *charts[:1], *metrics[:1], *charts[1:], *metrics[1:MOST_METRICS],
               class_="charts")]  # fmt: skip
    if metrics[MOST_METRICS:]:
        words = tag("summary", f"{len(metrics) - MOST_METRICS} more metrics")
        rest = tag("div", *metrics[MOST_METRICS:], class_="charts")
        out.append(tag("details", words, rest))
    return out


def loss_series(run: RunRecord) -> list[Series]:
    """Return the loss of each step and of each validation."""
    validation = run.metrics.get("val/loss", [])
    found = [Series("train/loss", ledger_series(run, "loss"))]
    return [*found, Series("val/loss", validation, True, 2)] if validation else found


def drawn_metrics(run: RunRecord) -> list[str]:
    """Return the metrics that make a curve, the monitored one first: two values that differ."""
    watched = monitored(run)
    names = [n for n, points in run.metrics.items() if not n.startswith(("train/", "throughput/"))
             and n != "val/loss" and len({value for _, value in points}) > 1]  # fmt: skip
    return sorted(names, key=lambda n: (not watched or n != watched[0], names.index(n)))


def _metrics_table(run: RunRecord) -> list[Html]:
    skipped = ("train/", "throughput/")
    rows = []
    for name, points in sorted(run.metrics.items()):
        if name.startswith(skipped):
            continue
        low, high = best_of(points, "min"), best_of(points, "max")
        at = (f"{shown(p[1])} ({shown(p[0])})" if p else "–" for p in (low, high))
        rows.append([name, shown(points[-1][1]), *at, len(points)])
    if not rows:
        return [tag("p", "No evaluation wrote a metric.", class_="note")]
    heads = ["metric", "last", "lowest (step)", "highest (step)", "values"]
    found = table(heads, rows, "metrics of evaluations")
    if len(rows) <= 12:
        return [found]
    return [tag("details", tag("summary", f"All {len(rows)} metrics of evaluations"), found)]


def _plan(run: RunRecord, forecast: dict[str, Any] | None) -> list[Html]:
    rows = plan_rows(run, forecast)
    if not rows:
        return [tag("p", "Nothing was foreseen: there is no plan.json.", class_="note")]
    words = (
        "Memory is what each process held at most, the programs themselves included where there "
        "is no GPU; seconds are the median of the steps."
        if forecast is not None
        else "unisono plan --config … --rehearse --json > FILE foresees memory and time "
        "too; --forecast FILE shows them here."
    )
    beside = [row for row in rows if row[2] != "–"]
    alone = [row[:2] for row in rows if row[2] == "–"]
    out = [
        table(["", "foreseen", "measured", "ratio"], beside, "plan and measurement"),
        tag("p", words, class_="note"),
    ]
    if alone:
        foreseen = table(["", "foreseen"], alone, "what was foreseen and is not measured")
        out.append(tag("details", tag("summary", "Foreseen and not measured"), foreseen))
    return out


def _attempts(run: RunRecord) -> list[Html]:
    rows = [
        [f"{a.number}", a.end, moment(a.began), a.world_size, shown(a.resumed_from),
         shown(a.last_step), shown(a.repeated) if a.repeated else "none", duration(a.seconds)]
        for a in attempts(run)
    ]  # fmt: skip
    if not rows:
        return [tag("p", "The ledger is empty: no attempt has begun to train.", class_="note")]
    heads = ["attempt", "end", "began (UTC)", "devices", "from", "to step", "repeated", "time"]
    happened = [tag("li", sentence) for sentence in events(run)]
    return [
        table(heads, rows, "attempts", 3),
        tag("p", "Repeated: steps that an earlier attempt had done after the checkpoint that this "
            "one went on from. Curves show the later ones.", class_="note")
        if any(a.repeated for a in attempts(run)) else Html(""),
        *([tag("ul", *happened, class_="list")] if happened else []),
    ]  # fmt: skip


def topology_facts(run: RunRecord) -> Html:
    """Return hosts, devices, strategy, precision, batch and versions."""
    top = run.topology
    if not top:
        return tag("p", "There is no topology.json.", class_="note")
    plan = top.get("plan", {})
    batch = plan.get("global_batch_size")
    made = (
        f"{shown(batch)} = {plan.get('num_replicas')} × {plan.get('micro_batch_size')} × "
        f"{plan.get('accumulate_grad_batches')} accumulated" if batch else None
    )  # fmt: skip
    padding = plan.get("padding_share")
    code = top.get("code") or {}
    return facts([
        ("host:rank:device", ", ".join(top.get("host_rank_device", []))),
        ("devices", f"{top.get('world_size')} on {counted(top.get('num_nodes', 1), 'node')}"),
        ("strategy", top.get("strategy")),
        ("backend", top.get("backend")),
        ("precision", top.get("precision")),
        ("global batch", made),
        ("padding", None if padding is None else share(padding)),
        ("learning rate", f"scaled by {top.get('lr_scale', 1.0):g}"),
        ("exactness", (top.get("exactness") or {}).get("level")),
        ("memory per rank", ", ".join(
            gib(one.get("allocated_bytes") or one.get("resident_bytes"))
            for one in top.get("memory", []))),
        ("versions", ", ".join(f"{n} {v}" for n, v in (top.get("versions") or {}).items())),
        ("code", f"unisono {code.get('version')}, digest {code.get('digest')}" if code else None),
    ])  # fmt: skip


def _samples(run: RunRecord) -> list[Html]:
    blocks = worst_samples(run)
    if not blocks:
        words = "The run folder holds no confusions, queries or texts; `unisono test` may add some."
        return [tag("p", words, class_="note")]
    return [tag("div", *blocks, class_="samples")]


def _proof(proof: Proof | str) -> list[Html]:
    if isinstance(proof, str):
        return [tag("p", f"Not checked: {proof}")]
    found = facts([
        *proof.epoch_lines(),
        ("in the weights", f"{shown(proof.num_steps)} steps, {shown(proof.num_samples)} samples"),
        ("discarded", "; ".join(proof.discarded) or "nothing"),
        ("checkpoints", ", ".join(proof.checkpoints) or "none"),
    ])  # fmt: skip
    if proof.faults:
        items = (tag("li", fault) for fault in proof.faults[:10])
        sign = tag("p", "■ The proof fails.", class_="state bad")
        return [sign, tag("ul", *items, class_="list"), found]
    words = "each sample of each epoch is in the weights once."
    if proof.findings:
        words = "what was used was used once; not all of it was."
    return [tag("p", tag("span", "● Holds:", class_="state good"), f" {words}"), found]


def _warnings(run: RunRecord) -> list[Html]:
    lines = [*run.topology.get("warnings", []), run.topology.get("fallback"), *run.notes]
    items = [tag("li", line) for line in lines if line]
    if not items:
        return [tag("p", "None.", class_="note")]
    return [tag("ul", *items, class_="list")]


def _configuration(run: RunRecord) -> list[Html]:
    command = run.topology.get("command")
    words = "The command line was not written down: an earlier version made this run."
    out = [tag("pre", command) if command else tag("p", words, class_="note")]
    if run.config_text:
        name = tag("summary", run.config_name, " as it was resolved")
        out.append(tag("details", name, tag("pre", run.config_text)))
    return out
