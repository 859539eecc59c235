"""`python -m benchmarks [PART]`, where PART is one of the commands below; `all` if it is left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from benchmarks import (
    bandwidth,
    bits,
    chart,
    collectives,
    compiled,
    compiled_peers,
    consolidate,
    host_peers,
    kernels,
    loop_peers,
    machine,
    mesh_peers,
    offload,
    offload_peers,
    peers,
    qlora,
    report,
    saving,
    step,
)
from benchmarks.bits_rank import Mode
from benchmarks.hosts import COUNT
from benchmarks.job import JobError
from benchmarks.link import LinkError
from benchmarks.result import Result

RESULTS = Path(__file__).parent / "results"
SCALING = (("medium", 2), ("medium", 1), ("medium", 4), ("small", 2), ("large", 2))
"""The sizes and ranks for which `all` runs `step`."""

app = typer.Typer(
    help="zero compared with its peers on this machine: medians of interleaved runs.", add_completion=False
)


class Size(str, Enum):
    tiny = "tiny"
    small = "small"
    medium = "medium"
    large = "large"
    huge = "huge"
    one_billion = "1b"
    three_billion = "3b"
    seven_billion = "7b"


class QloraSize(str, Enum):
    tiny = "tiny"
    small = "small"
    one_billion = "1b"


class Precision(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"


class StepOptimizer(str, Enum):
    adamw = "adamw"
    muon = "muon"


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the terminal. name: of the files under benchmarks/results/; "" for none."""

    json: Path | None
    markdown: Path | None
    name: str


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise typer.BadParameter(f"{name} is a path: --json and --markdown write to paths.")
    return name


Device = Annotated[str, typer.Option(help="The accelz backend to run on.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")]
Name = Annotated[
    str,
    typer.Option(callback=_plain_name, help="Store as benchmarks/results/<date>-<name>.{json,md,svg}."),
]
Ranks = Annotated[int, typer.Option(min=1, max=64, help="Processes.")]
Threads = Annotated[int, typer.Option(min=1, help="OMP threads per rank.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of everything that is compared.")]
Limit = Annotated[float, typer.Option(min=1, help="Seconds after which a call that hangs is a failure.")]
Within = Annotated[float | None, typer.Option(min=0, help="Seconds after which no further round begins.")]
Folder = Annotated[
    str | None, typer.Option(help="Folder on the disk to measure; by default that of temporary files.")
]


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        all_()


@app.command("step")
def step_(
    device: Device = "cpu",
    size: Annotated[Size, typer.Option(help="Model.")] = Size.medium,
    precision: Annotated[Precision, typer.Option()] = Precision.bf16,
    ranks: Ranks = 2,
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    rounds: Rounds = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn.")] = 4,
    peer: Annotated[str, typer.Option("--peers", help="Comma-separated.")] = ",".join(peers.PEERS),
    memory: Annotated[
        bool, typer.Option(help="Also measure memory where no device counts it, in separate launches.")
    ] = True,
    limit: Limit = 120.0,
    optimizer: Annotated[StepOptimizer, typer.Option(help="muon: in addition to AdamW; no DeepSpeed.")] = (
        StepOptimizer.adamw
    ),
    link: Annotated[
        float | None,
        typer.Option(min=0.01, help="Gbit/s between two hosts that share the ranks (needs root)."),
    ] = None,
    within: Within = None,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """A training step of a small Llama-like decoder, by zero and by its peers."""
    if link is not None and ranks % COUNT:
        raise typer.BadParameter(f"--link is between two hosts: {ranks} ranks cannot be divided evenly")
    of_muon = optimizer is StepOptimizer.muon
    named = tuple(name for name in _peers(peer) if not (of_muon and name == "deepspeed3"))
    if set(named) & set(mesh_peers.PEERS) and ranks % mesh_peers.TENSOR:
        raise typer.BadParameter(
            f"{', '.join(mesh_peers.PEERS)} divide blocks over {mesh_peers.TENSOR} ranks"
        )
    if set(named) & set(host_peers.PEERS) and (link is None or ranks < 2 * COUNT):
        needed = f"--link, and --ranks {2 * COUNT} or more"
        raise typer.BadParameter(f"{', '.join(host_peers.PEERS)} need {needed}")
    options = step.StepOptions(
        device=device,
        size=size.value,
        precision=precision.value,
        ranks=ranks,
        threads=threads,
        batch=batch,
        length=length,
        rounds=rounds,
        steps=steps,
        peers=named,
        memory=memory,
        limit=limit,
        optimizer=optimizer.value,
        link=link,
        within=within,
    )
    _report([partial(step.run, options)], Outputs(json, markdown, name))


@app.command()
def optimizer(
    elements: Annotated[int, typer.Option(min=1, help="Of the shard.")] = 1 << 24,
    threads: Threads = 1,
    rounds: Rounds = 9,
    limit: Limit = 120.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """One AdamW step: the backend's kernel, torch's fused AdamW, a memory copy."""
    options = kernels.OptimizerOptions(elements, threads, rounds, limit=limit)
    _report([partial(kernels.run, options)], Outputs(json, markdown, name))


@app.command("bandwidth")
def bandwidth_(
    device: Device = "cpu",
    elements: Annotated[int, typer.Option(min=1, help="Of every buffer.")] = 1 << 24,
    threads: Threads = 1,
    rounds: Rounds = 9,
    limit: Limit = 120.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """Every flat-buffer kernel against a copy on the device."""
    options = bandwidth.BandwidthOptions(device, elements, threads, rounds, limit=limit)
    _report([partial(bandwidth.run, options)], Outputs(json, markdown, name))


@app.command("bits")
def bits_(
    device: Device = "cpu",
    size: Annotated[Size, typer.Option(help="Model.")] = Size.small,
    precision: Annotated[Precision, typer.Option()] = Precision.bf16,
    ranks: Ranks = 1,
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps of every run.")] = 12,
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(bits.BY_MODE),
    limit: Limit = 120.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """Whether training gives the same bits twice, and in every way of training that computes the same."""
    options = bits.BitsOptions(
        device, size.value, precision.value, ranks, threads, batch, length, steps, _modes(modes), limit
    )
    _report([partial(bits.run, options)], Outputs(json, markdown, name), bits.check)


@app.command("collectives")
def collectives_(
    megabytes: Annotated[
        str, typer.Option(help="Sizes of the whole buffer, comma-separated.")
    ] = "0.001,1,8,64",
    ranks: Ranks = 2,
    threads: Threads = 1,
    rounds: Rounds = 9,
    limit: Limit = 120.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """Collectives through accelz, with and without shared memory, and through plain gloo."""
    options = collectives.CollectivesOptions(_sizes(megabytes), ranks, threads, rounds, limit)
    _report([partial(collectives.run, options)], Outputs(json, markdown, name))


@app.command("compiled")
def compiled_(
    device: Device = "cpu",
    size: Annotated[Size, typer.Option(help="Model.")] = Size.medium,
    ranks: Ranks = 2,
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    rounds: Rounds = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn.")] = 3,
    peer: Annotated[str, typer.Option("--peers", help="Separated by semicolons. [default: all]")] = "",
    memory: Annotated[bool, typer.Option(help="Also measure memory, on the simulated device.")] = True,
    link: Annotated[
        float | None,
        typer.Option(min=0.01, help="Gbit/s between the ranks (needs root). [default: no limit]"),
    ] = None,
    limit: Limit = 300.0,
    within: Within = None,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """Stage 3 through torch.compile, with and without the fused downcast, beside eager zero and FSDP2."""
    options = compiled.CompiledOptions(
        device=device,
        size=size.value,
        ranks=ranks,
        threads=threads,
        batch=batch,
        length=length,
        rounds=rounds,
        steps=steps,
        peers=_compiled_peers(peer),
        memory=memory,
        link=link,
        limit=limit,
        within=within,
    )
    _report([partial(compiled.run, options)], Outputs(json, markdown, name))


@app.command("offload")
def offload_(
    parameters: Annotated[int, typer.Option(min=offload.GRAIN, help="Of the model.")] = 1 << 27,
    ranks: Ranks = 2,
    rounds: Rounds = 7,
    folder: Folder = None,
    limit: Limit = 120.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """Optimizer steps from the disk and on the host, beside the raw disk and DeepSpeed's CPU offload."""
    options = offload.OffloadOptions(parameters, ranks, rounds=rounds, folder=folder, limit=limit)
    _report([partial(offload.run, options)], Outputs(json, markdown, name))


@app.command("saving")
def saving_(
    size: Annotated[Size, typer.Option(help="Model.")] = Size.medium,
    precision: Annotated[Precision, typer.Option()] = Precision.bf16,
    ranks: Ranks = 2,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="Of a turn of training.")] = 20,
    every: Annotated[int, typer.Option(min=1, help="Steps from one save to the next.")] = 10,
    folder: Folder = None,
    limit: Limit = 120.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """A save beside a raw write, and what saving in the background costs training."""
    options = saving.SavingOptions(
        size.value,
        precision.value,
        ranks,
        rounds=rounds,
        steps=steps,
        every=every,
        folder=folder,
        limit=limit,
    )
    _report([partial(saving.run, options)], Outputs(json, markdown, name))


@app.command("qlora")
def qlora_(
    size: Annotated[QloraSize, typer.Option(help="Llama from its configuration.")] = QloraSize.small,
    ranks: Ranks = 2,
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn.")] = 2,
    limit: Limit = 300.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """QLoRA sharded, beside LoRA in bf16 sharded and QLoRA unsharded; needs constraints-frameworks.txt."""
    options = qlora.QloraOptions(size.value, ranks, threads, batch, length, rounds, steps, limit)
    _report([partial(qlora.run, options)], Outputs(json, markdown, name))


@app.command("consolidate")
def consolidate_(
    parameters: Annotated[int, typer.Option(min=1 << 20, help="Of the model.")] = 250_000_000,
    ranks: Annotated[int, typer.Option(min=1, help="Of the job that saved.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Threads.")] = 4,
    rounds: Rounds = 3,
    folder: Folder = None,
    limit: Limit = 600.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "",
) -> None:
    """Whole weights from a sharded checkpoint: zero, DeepSpeed's zero_to_fp32, a copy of the bytes."""
    options = consolidate.ConsolidateOptions(parameters, ranks, workers, rounds, folder, limit)
    _report([partial(consolidate.run, options)], Outputs(json, markdown, name))


@app.command("all")
def all_(
    rounds: Rounds = 7,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    name: Name = "all",
) -> None:
    """Everything: 1, 2 and 4 ranks, three sizes, the optimizer at one and two threads, the collectives,
    state on disk, checkpoints."""
    runs: list[Callable[[], Result]] = []
    for size, ranks in SCALING:
        runs.append(partial(step.run, step.StepOptions(size=size, ranks=ranks, rounds=rounds)))
    for threads in (1, 2):
        runs.append(partial(kernels.run, kernels.OptimizerOptions(threads=threads, rounds=rounds)))
    runs.append(partial(collectives.run, collectives.CollectivesOptions(rounds=rounds)))
    runs.append(partial(offload.run, offload.OffloadOptions(rounds=rounds)))
    runs.append(partial(saving.run, saving.SavingOptions(rounds=rounds)))
    runs.append(partial(consolidate.run, consolidate.ConsolidateOptions()))
    _report(runs, Outputs(json, markdown, name))


def _report(
    runs: Sequence[Callable[[], Result]],
    outputs: Outputs,
    check: Callable[[Result], None] = lambda _: None,
) -> None:
    """Run all, printing each result as it comes, and write the files asked for.

    check: raises JobError for a result that must not be. After a failure, the results until then are written.
    """
    console = Console(width=None if os.isatty(1) else 160)
    context = machine.describe()
    results: list[Result] = []
    failure: JobError | LinkError | None = None
    try:
        for run in runs:
            results.append(run())
            report.show(console, results[-1:])
            check(results[-1])
    except (JobError, LinkError) as error:
        failure = error
    context["machine"]["accelerators"] = machine.accelerators()
    if results:
        _write(context, results, outputs)
    if failure is not None:
        Console(stderr=True).print(Text(f"error: {failure}"), style="red", soft_wrap=True)
        raise typer.Exit(1)


def _write(context: dict[str, Any], results: Sequence[Result], outputs: Outputs) -> None:
    stem = RESULTS / f"{context['date'][:10]}-{outputs.name}" if outputs.name else None
    for path in (outputs.json, stem and stem.with_suffix(".json")):
        if path:
            report.write(path, report.as_json(context, results))
    for path in (outputs.markdown, stem and stem.with_suffix(".md")):
        if path:
            report.write(path, report.as_markdown(context, results))
    if stem and chart.is_possible(results):
        chart.draw(stem.with_suffix(".svg"), results)


def _peers(names: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    known = (*peers.PEERS, *loop_peers.PEERS, *mesh_peers.PEERS, *offload_peers.PEERS, *host_peers.PEERS)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; the peers are {', '.join(known)}")
    return chosen


def _compiled_peers(names: str) -> tuple[str, ...]:
    chosen = [name.strip() for name in names.split(";") if name.strip()] or list(compiled_peers.PEERS)
    every = compiled_peers.PEERS | compiled_peers.ON_REQUEST
    unknown = [name for name in chosen if name not in every]
    if unknown:
        known = "; ".join(every)
        raise typer.BadParameter(f"unknown: {'; '.join(unknown)}; the peers are {known}")
    return tuple(chosen)


def _modes(names: str) -> tuple[Mode, ...]:
    unknown = [name for name in names.split(",") if name not in bits.BY_MODE]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; the modes are {', '.join(bits.BY_MODE)}")
    return tuple(mode for mode in bits.BY_MODE if mode in names.split(","))


def _sizes(megabytes: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(size) for size in megabytes.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not 0.001 <= min(sizes) <= max(sizes) < 1e6:
        raise typer.BadParameter(
            f"--megabytes takes numbers from 0.001 up, such as 0.001,1,64; got {megabytes!r}"
        )
    return sizes


if __name__ == "__main__":
    app()
