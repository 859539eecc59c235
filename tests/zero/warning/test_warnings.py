"""What concerns all ranks is said once per job, by rank 0, at the program's own line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from accelz.ranks import machine
from tests.zero.helpers.models import device_of
from zero.tiers import swap_file

AOT = zero.Compile(inner="aot_eager")


class Own(torch.optim.SGD):
    """An optimizer that may look at anything."""


class Unsavable(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise TypeError("as the test wants")


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Matrix(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def train(
    make: Callable[..., nn.Module] = nn.Linear,
    optimizer: type[torch.optim.SGD | torch.optim.AdamW] = torch.optim.SGD,
    autocast: torch.dtype | None = None,
    frozen: bool = False,
    **settings: Any,
) -> zero.Engine:
    model = nn.Sequential(make(8, 8))
    group = settings.pop("process_group", None)
    engine = zero.initialize(
        model, optimizer(model.parameters(), lr=0.1), zero.Config(timeout=20, **settings), group
    )
    x = torch.ones(2, 8, device=device_of(model), requires_grad=True)
    model.requires_grad_(not frozen)
    with torch.autocast(x.device.type, autocast) if autocast else nullcontext():
        loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return engine


@contextmanager
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def said_body(context: Context, folder: str) -> dict[str, list[tuple[str, str]]]:
    """What each of several programs is told on this rank, and of which file."""
    takes_pages = swap_file._takes_pages
    engine = train()
    engine.optimizer.param_groups[0]["owner"] = object()

    def uncached() -> None:
        swap_file._takes_pages = lambda _: False
        try:
            train(optimizer=torch.optim.AdamW, offload=zero.Offload(optimizer="disk", path=folder))
        finally:
            swap_file._takes_pages = takes_pages

    found = {}
    for what, program in {
        "will step whole parameters": lambda: train(optimizer=Own),
        "state_dict() raises": lambda: train(Unsavable),
        "this step changes nothing": lambda: train(frozen=True),
        "set zero.Config(loss_scale='dynamic')": lambda: train(autocast=torch.float16),
        "matrices of Matrix": lambda: train(Matrix, autocast=torch.bfloat16),
        "compiled unit by unit": lambda: train(Broken, compile=AOT),
        "goes through the page cache": uncached,
        "left out of the checkpoint": lambda: engine.save_checkpoint(f"{folder}/saved"),
    }.items():
        with caught() as messages:
            program()
        found[what] = [(str(m.message), m.filename) for m in messages if what in str(m.message)]
    return found


def test_what_concerns_all_ranks_is_said_by_rank_0(cluster: Clusters, tmp_path: Path) -> None:
    first, second = cluster(2).run(said_body, folder=str(tmp_path), limit=120)
    for what, messages in first.items():
        assert [filename for _, filename in messages] == [__file__], what
    assert not any(second.values()), second


def group_body(context: Context) -> list[str]:
    """What is told where the second rank is a job of its own, and so its rank 0."""
    group = torch.distributed.new_group([1])
    with caught() as messages:
        if context.rank == 1:
            train(optimizer=Own, process_group=group)
    return [str(m.message) for m in messages if "will step whole" in str(m.message)]


def test_rank_0_is_that_of_the_process_group(cluster: Clusters) -> None:
    assert [len(messages) for messages in cluster(2).run(group_body)] == [0, 1]


def test_the_engine_warns_in_one_way() -> None:
    sources = Path(zero.__file__).parent.rglob("*.py")
    assert [p.name for p in sources if "warnings.warn(" in p.read_text()] == ["warning.py"]


@pytest.mark.parametrize(("rank", "said"), [("", 1), ("0", 1), ("1", 0)])
def test_what_concerns_a_machine_is_said_by_its_first_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str, said: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    with caught() as messages:
        machine.warn("as the test wants", RuntimeWarning)
    assert [(m.category, m.filename) for m in messages] == [(RuntimeWarning, __file__)] * said
