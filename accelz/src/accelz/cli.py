"""The command line: `accelz list`, `info`, `check`, `bench`, `new`. Listing imports no torch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accelz import discovery
from accelz.conformance import TEST_SECONDS, comparison, grouping
from accelz.discovery import BackendRow, Status, list_backends
from accelz.errors import AccelzError
from accelz.hooks import API_VERSION
from accelz.patience import patience
from accelz.version import __version__

app = typer.Typer(
    rich_markup_mode="markdown",  # which joins the lines of a docstring
    help="List accelerator backends; inspect, measure and check one; create a new one.",
    no_args_is_help=True,
    add_completion=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]
WIDTH = 110
UNLIMITED = 10_000
"""Columns when stdout is not a terminal: piped output is never cut."""
MOST_SECONDS = 1e6
STDOUT, STDERR = 1, 2
STYLES = {
    "available": "green",
    "unavailable": "yellow",
    "broken": "red",
    "disabled": "dim",
    "proved": "green",
    "failed": "bold red",
    "works undeclared": "yellow",
}


def clean(command: Callable[..., None]) -> Callable[..., None]:
    """Print an AccelzError as one message and exit with code 2."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AccelzError as error:
            Console(stderr=True).print(Text(f"error: {error}"), style="red", soft_wrap=True)
            raise typer.Exit(2) from None

    return wrapper


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send to stderr what backends print while they are asked, also from C: stdout is for the answer."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    try:
        os.dup2(STDERR, STDOUT)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, STDOUT)
        os.close(kept)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"accelz {__version__}, interface {API_VERSION}")
        raise typer.Exit


@app.command("list")
@clean
def list_(as_json: AsJson = False) -> None:
    """Installed backends, which one would be chosen, and why not the others.

    Exits with 1 if none would be.
    """
    with quiet_stdout():
        rows = list_backends()
    choice, why = choose(rows)
    if as_json:
        _print_json({"selected": choice, "why": why, "environment": _environment(),
                     "backends": [_row_dict(r, choice) for r in rows]})  # fmt: skip
        raise typer.Exit(0 if choice else 1)
    console = Console(width=None if sys.stdout.isatty() else UNLIMITED)
    console.print(_backend_table(rows, choice))
    for name, value in _environment().items():
        console.print(f"{name}={value}", style="cyan", highlight=False)
    console.print(f"selected: {choice or 'none'} ({why})", highlight=False, markup=False)
    raise typer.Exit(0 if choice else 1)


def choose(rows: list[BackendRow]) -> tuple[str | None, str]:
    """Return the backend that a process started now would run on, or None, and the reason."""
    wanted = os.environ.get("ACCELZ_DEVICE", "").strip()
    if not wanted:
        if row := discovery.unheard(rows):
            return None, discovery.what_to_do_unheard(row)
        best = discovery.best(rows)
        reason = f"the highest priority of those available, {best.priority}" if best else "none is available"
        if tied := discovery.ties(rows):
            reason += f", as that of {', '.join(tied)}: ACCELZ_DEVICE decides between them"
        return (best.name if best else None), reason
    meant = [r for r in rows if r.name == wanted]
    if not meant:
        return None, f"ACCELZ_DEVICE={wanted} is not installed. {discovery.how_to_have(wanted)}"
    owners = [r.distribution for r in meant]
    owner = discovery.owner(wanted, owners)
    if owner is None:
        several = " and ".join(owners)
        return (
            None,
            f"ACCELZ_DEVICE={wanted} is the name of two backends, of {several}: uninstall one of them",
        )
    row = meant[owners.index(owner)]
    if row.status is not Status.AVAILABLE:
        return None, f"ACCELZ_DEVICE={wanted} is {row.status.value}: {row.reason}"
    return wanted, f"ACCELZ_DEVICE={wanted}"


@app.command()
@clean
def info(
    name: Annotated[
        str | None, typer.Argument(help="A backend; by default the one that would be chosen.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What one device can do."""
    from accelz.device_info import describe

    with quiet_stdout():
        facts = describe(name)
    if as_json:
        _print_json(facts)
        return
    Console().print(_info_table(facts))


@app.command()
@clean
def check(
    name: Annotated[str, typer.Argument(help="The backend to test.")],
    as_json: AsJson = False,
    only: Annotated[
        str | None, typer.Option("-k", help="Run only the tests that match, as with pytest -k.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit for each test, in seconds.")] = TEST_SECONDS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out four ranks, failing ranks, leaks and generated code.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Compare with an earlier report, in this file.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write the report, as --json prints it, to this file too.", dir_okay=False, writable=True
        ),
    ] = None,
    allow_untested: Annotated[
        bool,
        typer.Option("--allow-untested", help="Exit with 0 also where this machine has too few devices."),
    ] = False,
) -> None:
    """Run the conformance kit: what the backend declares, proved.

    Exits with 0 if every test passed, with 1 if one failed or --against shows something worse, with 2 if the
    kit could not run, and with 3 if every test passed that could run here, but the whole kit was asked for
    and something was not tested: a declared capability, or collectives between ranks. If it is interrupted
    (Ctrl-C, SIGTERM), it reports what has run, and exits with 1.
    """
    from accelz.conformance.runner import run

    if not 1 <= timeout <= MOST_SECONDS:
        raise AccelzError(f"--timeout is {timeout:g}; it must be from 1 to {MOST_SECONDS:g} seconds")
    patience()  # raises here if invalid: the ranks' own error would be lost in a report
    earlier = comparison.read(against, name) if against else None
    if report and not report.parent.is_dir():  # which is better known before the kit has run
        raise AccelzError(f"--report {report}: there is no folder {report.parent}")
    summary = run(name, only, show=not as_json, timeout=timeout, quick=quick)
    if earlier:
        summary["against"] = comparison.compare(earlier, summary)
    chosen = f"the tests that match {only!r}" if only else "the quick tests" if quick else ""
    lacking = summary["not_tried"] and not chosen
    worse = bool(earlier and summary["against"]["worse"])
    code = 1 if worse or not summary["ok"] else 3 if lacking and not allow_untested else 0
    told = {**summary, "selection": chosen, "ok": not code, "exit_code": code}
    if report:
        report.write_text(json.dumps(told, indent=2))
    if as_json:
        _print_json(told)
    else:
        _print_check(Console(width=None if sys.stdout.isatty() else UNLIMITED), summary, chosen)
    raise typer.Exit(code)


@app.command()
@clean
def bench(
    name: Annotated[
        str | None, typer.Argument(help="A backend; by default the one that would be chosen.")
    ] = None,
    elements: Annotated[
        int, typer.Option(min=1024, help="Elements in each buffer; choose several times the device's cache.")
    ] = 1 << 24,
    ranks: Annotated[
        int, typer.Option(min=1, help="With 2 or more, also time collectives between that many ranks.")
    ] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; results are medians over them.")] = 9,
    as_json: AsJson = False,
) -> None:
    """How fast a backend is: kernels and copies, and collectives, beside a copy on the device."""
    from accelz.bench import between_ranks, measure
    from accelz.device_info import named

    console = Console(width=max(Console().width, WIDTH))  # names are not cut off
    with quiet_stdout():
        accelerator = named(name)
        facts = {"name": accelerator.name, "elements": elements, "ranks": ranks}
        kernels = (
            measure.measure(accelerator, elements, rounds)
            if ranks == 1
            else between_ranks.alone(accelerator.name, elements, rounds)
        )
    if not as_json:  # before the collectives, whose ranks may still fail
        console.print(_bandwidth_table(kernels))
    with quiet_stdout():
        collectives = between_ranks.measure(accelerator.name, ranks, rounds) if ranks > 1 else []
    if as_json:
        _print_json({**facts, "kernels": kernels, "collectives": collectives})
    elif collectives:
        console.print(_collectives_table(collectives))


@app.command()
@clean
def new(
    name: Annotated[str, typer.Argument(help="The backend's name, as in ACCELZ_DEVICE=NAME.")],
    out: Annotated[Path, typer.Option(help="The folder in which to create accelz_NAME.")] = Path(),
    torch_device: Annotated[
        bool,
        typer.Option(
            "--torch-device", help="The device works with torch.get_device_module: derive the roles from it."
        ),
    ] = False,
    device_type: Annotated[
        str | None,
        typer.Option(
            help="torch's name for the device; by default NAME, or a stand-in without --torch-device."
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(help="The module that registers the device with torch; torch_NAME by default."),
    ] = None,
    collectives: Annotated[
        str | None,
        typer.Option(
            help="Its backend in torch.distributed; by default collectives are staged through the host."
        ),
    ] = None,
) -> None:
    """Write a backend package: it installs, is discovered, and the kit says what to implement next."""
    from accelz import scaffold

    target = scaffold.write(scaffold.Package(name, torch_device, device_type, library, collectives), out)
    for path in sorted(p for p in target.rglob("*") if p.is_file()):
        print(path)
    place = target if target.is_absolute() else f"./{target}"
    print(f"\nnext: pip install -e {place} && accelz check {name}")


def _environment() -> dict[str, str]:
    names = ("ACCELZ_DEVICE", "ACCELZ_DISABLE")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _row_dict(row: BackendRow, choice: str | None) -> dict[str, Any]:
    selected = row.name == choice and row.status is Status.AVAILABLE
    return {
        "name": row.name,
        "distribution": row.distribution,
        "version": row.version,
        "status": row.status.value,
        "priority": row.priority,
        "reason": row.reason,
        "selected": selected,
    }


def _backend_table(rows: list[BackendRow], choice: str | None) -> Table:
    table = Table("", "name", "distribution", "version", "status", "priority", box=None)
    table.add_column("reason", overflow="fold")  # it may end in a command to type
    for row in rows:
        facts = _row_dict(row, choice)
        status = Text(facts["status"], style=STYLES[facts["status"]])
        priority = "" if row.priority is None else str(row.priority)
        mark = "→" if facts["selected"] else ""
        broken = row.status is Status.BROKEN  # it keeps to one line; the whole is in --json
        reason = Text(row.reason, no_wrap=broken, overflow="ellipsis" if broken else None)
        table.add_row(mark, row.name, row.distribution, row.version, status, priority, reason)
    return table


def _info_table(facts: dict[str, Any]) -> Table:
    table = Table("", "", box=None, show_header=False)
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), Text(_shown(key, value)))
    return table


def _bandwidth_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for heading in ("", "", "by"):
        table.add_column(heading)
    for heading in ("GB/s", "of a copy", "host µs"):
        table.add_column(heading, justify="right")
    for row in rows:
        rate, launch = f"{row['bytes_per_second'] / 1e9:.1f}", f"{row['launch'] * 1e6:.1f}"
        names = Text(row["kernel"]), Text(row["dtypes"]), Text(row["origin"])
        table.add_row(*names, rate, f"{row['of_copy']:.2f}", launch)
    return table


def _collectives_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("", box=None)
    for heading in ("MB", "ms", "GB/s", "of a copy's time"):
        table.add_column(heading, justify="right")
    for row in rows:
        size, rate = f"{row['bytes'] / 1e6:.0f}", f"{row['bytes_per_second'] / 1e9:.2f}"
        milliseconds = f"{row['median'] * 1e3:.2f}"
        table.add_row(Text(row["operation"]), size, milliseconds, rate, f"{row['of_copy']:.2f}")
    return table


def _shown(key: str, value: Any) -> str:
    if key == "memory" and value is None:
        return "unknown until a process is bound to the device"
    if key == "memory":
        return ", ".join(f"{k} {v / 2**30:.2f} GiB" for k, v in value.items())
    if key == "capabilities":
        return ", ".join(name for name, declared in value.items() if declared) or "none"
    if isinstance(value, dict):
        return "\n".join(f"{k}: {v}" for k, v in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _print_check(console: Console, summary: dict[str, Any], chosen: str) -> None:
    """chosen: what was run, if not the whole kit."""
    if summary["unwritten"]:
        text = "\n  ".join(["To be written, in this order:", *summary["unwritten"]])
        console.print(Text(f"{text}\n"), style="yellow", soft_wrap=True)
    for failure in grouping.texts(summary["failures"]):
        console.print(Text(failure), style="red", soft_wrap=True)
    for what, version in summary["versions"].items():
        console.print(Text(f"{what}: {version}"), style="dim", soft_wrap=True)
    console.print(_capability_table(summary))
    for tier, counts in summary["operators"].items():
        console.print(Text(f"operators, {tier}: {counts['passed']} right, {counts['failed']} wrong"))
    if any(row["state"] == "works undeclared" for row in summary["capabilities"]):
        console.print("What is not declared is not used: declare what works.", style="yellow", soft_wrap=True)
    untested = [] if chosen else summary["not_tried"]
    for row in untested:
        text = f"NOT TESTED: {row['what']}; needs {row['needs']}"
        console.print(Text(text), style="bold yellow", soft_wrap=True)
    counts = ", ".join(f"{summary[k]} {k}" for k in ("passed", "failed", "skipped"))
    why = "because it was interrupted" if summary["interrupted"] else "after what is told above"
    counts += f", {summary['not_run']} NOT RUN {why}" if summary["not_run"] else ""
    for line in comparison.lines(summary["against"]) if "against" in summary else ():
        console.print(Text(line), style="bold red" if line.startswith("worse") else "", soft_wrap=True)
    if summary["interrupted"] and not summary["failed"]:
        verdict, style = "has not failed so far", "bold yellow"
    elif not summary["ok"]:
        verdict, style = "does not conform", "bold red"
    elif "against" in summary and summary["against"]["worse"]:
        verdict, style = "passes, but less than before", "bold red"
    elif untested:
        verdict, style = "is NOT FULLY TESTED, and passes what could be tested here", "bold yellow"
    else:
        verdict, style = f"passes{f' {chosen}' if chosen else ''}", "green"
    ranks = f", with up to {summary['ranks_tested']} ranks" if summary["ranks_tested"] > 1 else ""
    text = f"{summary['device']} {verdict}: {counts}{ranks} in {summary['seconds']} s"
    console.print(Text(text), style=style, soft_wrap=True)


def _capability_table(summary: dict[str, Any]) -> Table:
    table = Table("capability", "declared", "result", box=None)
    table.add_column("", overflow="fold")  # names of tests, to type after -k
    for row in summary["capabilities"]:
        state = Text(row["state"], style=STYLES.get(row["state"], "dim"))
        declared = "yes" if row["declared"] else ""
        table.add_row(row["name"], declared, state, Text(_remark(row, summary["failures"])))
    return table


def _remark(row: dict[str, Any], failures: list[dict[str, Any]]) -> str:
    """The tests in which a capability failed."""
    if row["state"] != "failed":
        return ""
    failed = (grouping.name(f) for f in failures if row["name"] in (*f["proves"], *f["needs"]))
    tests = list(dict.fromkeys(failed))
    return f"{tests[0]}{f' and {len(tests) - 1} more' if len(tests) > 1 else ''}"


def _print_json(value: Any) -> None:
    """Print the answer. What backends print after it, when the process ends, goes to stderr."""
    print(json.dumps(value, indent=2), flush=True)
    if sys.stdout is sys.__stdout__:
        os.dup2(STDERR, STDOUT)


if __name__ == "__main__":
    app()
