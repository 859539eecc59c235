"""The command line: `zero plan`, `consolidate`, `convert`, `inspect`, `verify`, `explain-hang`, `report`,
`check`.

What a command needs is imported inside it, so that `zero --help` needs typer alone.
"""

from __future__ import annotations

import functools
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from zero.config.output import DEFAULT_MEMORY, Format, OutputDtype
from zero.config.sizes import human, size
from zero.errors import UsageError, ZeroError, printable, some
from zero.version import __version__

if TYPE_CHECKING:
    from zero.consolidate.run import OnProgress, Options, Written
    from zero.sources.source import Source

app = typer.Typer(
    rich_markup_mode="markdown",  # which joins the lines of a docstring
    help="Plan the memory of a training job; inspect, verify, consolidate and convert checkpoints; explain a "
    "job that hangs; draw a run; test the engine on a device.",
    no_args_is_help=True,
    add_completion=False,
)
errors = Console(stderr=True)
_WIDEST = 60  # characters of a column


CheckpointPath = Annotated[
    Path, typer.Argument(help="A checkpoint, or a directory of checkpoints, of which the latest is used.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of threads; by default two per core.")]
MemoryLimit = Annotated[
    str, typer.Option(help="Memory for all buffers together; Python needs about 60 MB more.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Include only tensors whose names match, e.g. 'model.*'; may be repeated."),
]
Exclude = Annotated[
    list[str] | None, typer.Option(help="Exclude tensors whose names match; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]


def clean(command: Callable[..., None]) -> Callable[..., None]:
    """Print an error of zero, of accelz or of the system as one message, and exit with code 2."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        from accelz import AccelzError
        from zero.files.storage import allow_more_files

        allow_more_files()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # whatever names are in files, in any locale
                stream.reconfigure(errors="backslashreplace")
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # nobody reads the output any more, and nobody would read a message
        except (ZeroError, AccelzError, OSError) as error:
            errors.print(Text(f"error: {printable(error)}"), style="red", soft_wrap=True)
            raise typer.Exit(2) from None

    return wrapper


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"zero {__version__}")
        raise typer.Exit


@app.command()
@clean
def plan(
    target: Annotated[
        str,
        typer.Argument(
            help="A function or expression that returns the model: package.module:function, file.py:function "
            "or 'transformers:LlamaForCausalLM(LlamaConfig())'; or a checkpoint or weights in any format."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Number of ranks in the job.")],
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage, 0 to 3; 3 by default.")] = None,
    shard_ranks: Annotated[
        int | None, typer.Option(min=2, help="Ranks that share a copy of the model; all by default.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, or model (each parameter's own).")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="A name in torch.optim, or Lion; muon steps matrices, AdamW the rest.")
    ] = "AdamW",
    optimizer_options: Annotated[
        str, typer.Option(help="The optimizer's arguments as JSON, e.g. '{\"momentum\": 0.9}'.")
    ] = "{}",
    offload: Annotated[
        list[str] | None,
        typer.Option(help="optimizer=host, params=host, path=/local, ... (may be repeated); or auto."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file with further settings: fields of zero.Config, or a DeepSpeed configuration."
        ),
    ] = None,
    autocast: Annotated[
        Literal["bf16", "fp16"] | None,
        typer.Option(help="Assume that the forward runs under torch.autocast."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of one device, e.g. 80GB: exit code 1 if nothing fits.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a rank's batch of tokens, to count activations.")
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens in a row of the batch.")] = None,
    peak_flops: Annotated[
        float | None,
        typer.Option(help="Operations that a device does in a second, by its data sheet, e.g. 989e12."),
    ] = None,
    link_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes in a second that a rank sends to the others (bus bandwidth), e.g. 450GB."),
    ] = None,
    host_bandwidth: Annotated[
        str | None, typer.Option(help="Bytes in a second between device and host, each way, e.g. 50GB.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare stages and offload settings side by side.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the memory, traffic and least time of a training step, before anything is allocated.

    Memory is that of model state and, with --batch and --sequence, of activations; modules' buffers, and what
    libraries take, come on top. The time is there with --peak-flops, --link-bandwidth or --host-bandwidth.
    """
    from zero.config.training import DTYPES  # torch takes a second to import
    from zero.planning import command
    from zero.planning import target as targets

    placed = targets.offload_of(offload) if offload else None
    named = {"stage": stage, "shard_ranks": shard_ranks, "precision": precision, "offload": placed}
    changes = {name: value for name, value in named.items() if value is not None}
    settings = targets.settings(config, changes, ranks)
    options = targets.options_of(optimizer_options)
    dtype = None if autocast is None else DTYPES[autocast]
    room = None if memory is None else size(memory)
    if (batch is None) is not (sequence is None):
        raise UsageError("--batch and --sequence go together: the rows of a batch, and the tokens in each")
    sizes = None if batch is None or sequence is None else (batch, sequence)
    rates = {
        "peak_flops": peak_flops,
        "link_bandwidth": None if link_bandwidth is None else size(link_bandwidth),
        "host_bandwidth": None if host_bandwidth is None else size(host_bandwidth),
    }
    planned = command.planner_for(target, optimizer, options, ranks, dtype, sizes, rates)
    plans = command.plans_for(planned, settings, compare)
    print(command.as_json(plans, compare) if as_json else command.as_text(plans, compare, room))
    if room is not None and not any(command.fits(made, room) for made in plans.values()):
        raise typer.Exit(1)


@app.command()
@clean
def consolidate(
    checkpoint: CheckpointPath,
    out: Annotated[Path, typer.Argument(help="The directory to write; its parent must exist.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "keep"],
        typer.Option(help="Dtype of floating-point weights; keep: the one each had in training."),
    ] = "fp32",
    format: Annotated[
        Format, typer.Option(help="Format of the files; torch: as torch.save writes them.")
    ] = "safetensors",
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one file, e.g. 5GB, 500MiB.")] = "5GB",
    include: Include = None,
    exclude: Exclude = None,
    workers: Workers = None,
    memory: MemoryLimit = f"{DEFAULT_MEMORY >> 20}MiB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace weights in OUT; other files there are kept.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read OUT back and compare it with the checkpoint.")
    ] = False,
) -> None:
    """Write whole weights from a sharded checkpoint, in the layout of transformers.

    Reads checkpoints of zero, of DeepSpeed (ZeRO 1 to 3, universal) and of torch.distributed.checkpoint,
    safetensors, and files of torch.save, without running code from them. OUT appears once all of it is on
    disk. A run that was killed continues when it is called again.
    """
    from zero.consolidate import run
    from zero.sources.opening import open_source

    common = _options(dtype, workers, memory, include, exclude)
    largest = size(max_shard_size)
    options = replace(common, format=format, max_shard_size=largest, overwrite=overwrite, verify=verify)
    begun = time.monotonic()
    with open_source(checkpoint) as source, progress_bar() as progress:
        result = run.consolidate(source, out, options, progress)
    seconds = time.monotonic() - begun
    files = f"{len(result.files)} file{'s' if len(result.files) > 1 else ''}"
    where = printable(result.out)
    print(f"{where}: {result.tensors} tensors, {human(result.nbytes)} in {files}, {seconds:.1f} s")
    _warn("infinite in fp16, although finite in the checkpoint", result.overflowed)
    _warn_of(result)


@app.command()
@clean
def convert(
    weights: Annotated[
        Path, typer.Argument(help="A checkpoint or weights, in any format that `zero consolidate` reads.")
    ],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write; its parent must exist.")],
    to: Annotated[
        Literal["zero", "universal"],
        typer.Option(
            help="universal: convert a zero checkpoint to a DeepSpeed universal one, including optimizer "
            "state."
        ),
    ] = "zero",
    include: Include = None,
    exclude: Exclude = None,
    workers: Workers = None,
    memory: MemoryLimit = f"{DEFAULT_MEMORY >> 20}MiB",
) -> None:
    """Convert weights to a checkpoint of zero's to begin a job with, or one of zero's to a universal one.

    A checkpoint of zero's made here has no optimizer state: `engine.load_checkpoint(OUT, weights_only=True)`
    loads it, each rank its part. DeepSpeed loads a universal checkpoint at any stage and number of ranks,
    with {"checkpoint": {"load_universal": true}}.
    """
    from zero.consolidate import convert as to_zero
    from zero.sources.opening import open_source
    from zero.sources.zero_checkpoint import ZeroSource

    options = _options("stored", workers, memory, include, exclude)
    with progress_bar() as progress:
        if to == "universal":
            from zero.consolidate.universal import export_universal  # torch takes a second to import

            with ZeroSource(weights, optimizer=True) as checkpoint:
                result = export_universal(checkpoint, out, options, progress)
        else:
            with open_source(weights) as source:
                result = to_zero(source, out, options, progress)
    print(f"{printable(result.out)}: {result.tensors} tensors, {human(result.nbytes)}")
    _warn_of(result)


@app.command()
@clean
def inspect(checkpoint: CheckpointPath, as_json: AsJson = False) -> None:
    """Show what is in a checkpoint: names, shapes, dtypes, sizes, and the job that wrote it."""
    from zero.sources.opening import open_source

    with open_source(checkpoint) as source:
        if as_json:
            print(json.dumps(_described(source), indent=2))
            return
        for label, value in _facts(source).items():
            print(f"{label:<12}{printable(value)}")
        for line in _table(source):
            print(line)


@app.command()
@clean
def verify(checkpoint: CheckpointPath, workers: Workers = None) -> None:
    """Read every byte of a checkpoint and compare it with its checksum; exit code 1 if one differs."""
    from zero.consolidate import run
    from zero.sources.opening import open_source

    with open_source(checkpoint) as source, progress_bar() as progress:
        problems = run.verify(source, workers, progress=progress)
        path, summed = printable(source.path), source.facts.get("checksums") != "none"
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"{path}: intact" if summed else f"{path}: complete; it has no checksums to verify")


@app.command()
@clean
def explain_hang(
    folder: Annotated[
        Path,
        typer.Argument(
            help="What ZERO_FLIGHT_RECORDER or engine.record_flight named, with a file of each rank."
        ),
    ],
) -> None:
    """Say in one sentence why a job hangs or has failed, and where each rank is."""
    from zero.observe import hang
    from zero.observe.flight_file import read as read_flights

    flights = read_flights(folder)
    print(printable(hang.explain(flights)))
    for line in hang.table(flights):
        print(f"  {printable(line)}")


@app.command()
@clean
def report(
    run: Annotated[
        Path,
        typer.Argument(help="What zero.observe.JsonLines has written: a file of JSON lines, or its folder."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page to write; by default report.html beside it."),
    ] = None,
) -> None:
    """Draw a run as one HTML page, which needs no network: losses, speed, memory, traffic and events."""
    from zero.report.records import read
    from zero.report.run_report import run_page

    records = read(run)
    page = output or records.path.with_name("report.html")
    page.write_text(run_page(records).render(), encoding="utf-8")
    print(page)


@app.command()
@clean
def check(
    device: Annotated[str, typer.Option(help="The accelz backend to test the engine on.")],
    only: Annotated[
        str | None, typer.Option("-k", help="Run only the tests that match, as with pytest -k.")
    ] = None,
    loop: Annotated[
        Literal["engine", "plain"],
        typer.Option(help="The loop that most tests train in; plain: loss.backward(), optimizer.step()."),
    ] = "engine",
    max_ranks: Annotated[
        int, typer.Option(min=1, help="Skip tests with more ranks, such as where each needs a device.")
    ] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that share the tests.")] = 1,
) -> None:
    """Run the engine's own tests on a device; exit code 1 if one fails. Needs accelz-zero[conformance].

    `accelz check` tests the backend by itself: begin with it.
    """
    from zero import conformance

    counts = conformance.run(device, loop, only, max_ranks, workers)
    print(f"zero on {device} {'fails' if counts.failed else 'passes'}: {counts}")
    if counts.failed:
        raise typer.Exit(1)


def _options(
    dtype: OutputDtype, workers: int | None, memory: str, include: list[str] | None, exclude: list[str] | None
) -> Options:
    from zero.consolidate.run import Options
    from zero.consolidate.workers import default_workers

    return Options(
        dtype=dtype,
        workers=workers or default_workers(),
        memory=size(memory),
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
    )


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Show bytes done, bytes per second and time left on stderr, if that is a terminal."""
    from rich import progress

    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn()
    times = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
    bar = progress.Progress(*columns, *times, console=errors, transient=True)
    tasks: dict[str, progress.TaskID] = {}

    def told(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    with bar:
        yield told


def _warn_of(result: Written) -> None:
    _warn("skipped (not a tensor)", result.left_out)
    _warn("left out by --include and --exclude", result.excluded)
    _warn("part of a model: the checkpoint was saved without", result.missing)


def _warn(what: str, names: tuple[str, ...]) -> None:
    if names:
        errors.print(Text(f"{what}: {some(names)}"), style="yellow", soft_wrap=True)


def _facts(source: Source) -> dict[str, Any]:
    rows: dict[str, Any] = {"path": source.path, "format": source.format, **source.facts}
    if "created" in rows:
        rows["created"] = datetime.fromtimestamp(rows["created"]).astimezone().isoformat(" ", "seconds")
    rows["tensors"] = f"{len(source.tensors)}, {human(sum(t.nbytes for t in source.tensors))}"
    rows["elements"] = f"{sum(t.numel for t in source.tensors):,}"
    if source.missing:
        rows["without"] = some(source.missing)
    return {label: human(value) if label == "bytes" else value for label, value in rows.items()}


def _table(source: Source) -> Iterator[str]:
    """The tensors, one or more lines for each. Nothing is cut off; a name that is too long moves the rest."""
    rows = [("name", "shape", "dtype", "in training", "kind", "bytes")]
    for tensor in source.tensors:
        facts = (str(list(tensor.shape)), tensor.dtype, tensor.training_dtype, tensor.kind)
        rows.append((printable(tensor.name), *facts, human(tensor.nbytes)))
        rows.extend((f"= {printable(alias)}", "", "", "", "", "") for alias in tensor.aliases)
    widths = [min(_WIDEST, max(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _described(source: Source) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "format": source.format,
        **source.facts,
        "tensors": [{**asdict(tensor), "bytes": tensor.nbytes} for tensor in source.tensors],
        "left_out": source.left_out,
        "saved_without": source.missing,
    }
