"""Whether the ranks came with different values, which rank 0's take the place of.

Models built with another seed on each rank differ in everything that is random, and nothing is lost with
that. If only some modules differ, the program may have meant it, as with experts of each rank's own, or have
lost a seed on the way; if experts differ, and the job's mesh has a dimension for them, it has meant it.
Values are compared by checksums of samples, in one exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.communication.communicator import Communicator
from zero.errors import some
from zero.warning import warn

SAMPLED = 1 << 12
"""About as many elements of a tensor are compared, evenly spread."""

Kind = tuple[type[nn.Module], str]
"""The class of the module that holds a parameter, and the parameter's name there."""


@dataclass(frozen=True)
class _Sample:
    """Of a tensor's values on this rank.

    kind: None for a buffer. varied: whether the values are not all the same.
    """

    name: str
    kind: Kind | None
    checksum: int
    varied: bool


class InitialValues:
    """The values of a model's parameters and buffers, as this rank has built them."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._kinds = {p: (type(m), name) for m in model.modules() for name, p in m._parameters.items()}
        self._samples: list[_Sample] = []

    def note(
        self, name: str, values: Tensor, apart: Collection[str], parameter: nn.Parameter | None = None
    ) -> None:
        """Note what this rank has before rank 0's values come.

        apart: dimensions of the mesh along which the values are to differ. parameter: the one that has the
        values; None for a buffer. A leaf inside a parameter counts as one.
        """
        if self._communicator.alike.size > 1 and values.numel() and not apart:
            kind = None if parameter is None else self._kinds.get(parameter)
            self._samples.append(_Sample(name, kind, *_sampled(values)))

    def warn_of_differences(self) -> None:
        """Collective. Warn if the ranks differ in some modules, while others that are random are equal, or in
        experts on a mesh that has a dimension for these."""
        samples = self._samples
        if not samples:
            return
        numbers = [(each.checksum, -each.checksum, each.varied) for each in samples]
        alike = self._communicator.alike if self._communicator.divided else None
        highest = self._communicator.highest("initial values", torch.tensor(numbers, device=HOST), alike)
        differing, same = list[_Sample](), list[_Sample]()
        for each, (high, low, varied) in zip(samples, highest.tolist(), strict=True):
            if high != -low:
                differing.append(each)
            elif varied and each.kind is not None:
                same.append(each)
        random, experts = _equal_in_spite_of_chance(differing, same), _experts(differing)
        if differing and (random or not any(each.kind for each in differing)):
            modules = list(dict.fromkeys(_parts(differing, random)))
            what = (
                f"these parts of the model with different values, and others with the same: {some(modules)}"
            )
            self._warn(what, _declaring(modules, experts))
        elif experts and self._communicator.grid.size(_EXPERT_DIMS) > 1:
            self._warn(f"experts with different values: {some(experts)}", _declaring(experts, experts))

    def _warn(self, what: str, advice: str) -> None:
        warn(_DIFFER.format(what, advice), rank=self._communicator.alike.rank)


def _sampled(values: Tensor) -> tuple[int, bool]:
    """Return a checksum of some elements, and whether these are not all the same."""
    elements = values.reshape(-1).view(torch.uint8).view(-1, values.element_size())
    step = elements.shape[0] // SAMPLED | 1  # odd, so that it meets every column of most matrices
    # A copy: numpy makes a storage that it looks at unfit for being released.
    sample = elements[::step].clone(memory_format=torch.contiguous_format).to(HOST)
    return crc32(sample.numpy().tobytes()), bool((sample != sample[0]).any())


def _equal_in_spite_of_chance(differing: Sequence[_Sample], same: Iterable[_Sample]) -> list[_Sample]:
    """Return what is the same although a seed of each rank's own would make it differ, as far as known.

    That is parameters of torch's own layers, and those of a kind of which others differ.
    """
    kinds = {each.kind for each in differing}
    return [each for each in same if each.kind in kinds or _is_random(each.kind)]


def _is_random(kind: Kind | None) -> bool:
    """Return whether parameters of this kind, unless constant, are drawn at random: torch's own are."""
    module = "" if kind is None else kind[0].__module__
    return module.startswith("torch.nn.modules.") and not module.endswith(".container")


def _parts(differing: Iterable[_Sample], same: Iterable[_Sample]) -> Iterator[str]:
    """Yield, for what differs, the largest module around it that has nothing which is the same."""
    mixed = {""}.union(*(_ancestors(each.name) for each in same))
    for each in differing:
        yield next((path for path in reversed(_ancestors(each.name)) if path not in mixed), each.name)


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules that a parameter is in, the nearest first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _experts(differing: Iterable[_Sample]) -> list[str]:
    """The modules among those that differ that are experts by a name, or by the class that has parameters."""
    found = dict[str, None]()
    for each in differing:
        parts = each.name.split(".")
        at = next((n for n, part in enumerate(parts) if _says_experts(part)), None)
        if at is None and each.kind is not None and _says_experts(each.kind[0].__name__) and len(parts) > 1:
            at = len(parts) - 2
        if at is not None:
            found[".".join(parts[: at + 1])] = None
    return list(found)


def _says_experts(word: str) -> bool:
    return "expert" in word.lower() and "shared" not in word.lower()  # every rank has the shared ones


def _declaring(modules: Sequence[str], experts: Sequence[str]) -> str:
    """How to say that modules are each rank's own."""
    parts = (*experts, *modules)[0].split(".")
    pattern = ".".join("*" if part.isdigit() else part for part in parts)
    what = "The experts of expert parallelism" if experts else "What each rank is to keep for itself"
    return (
        f"{what} must be declared, with the dimension of a mesh: "
        f"zero.Config(local_modules={{{pattern!r}: 'ep'}}) and zero.initialize(..., mesh=mesh, data_dims=...)"
    )


_EXPERT_DIMS = ("ep", "expert")
_DIFFER = (
    "the ranks built {}. All ranks now have rank 0's values. Seed every rank alike before the model is "
    "built, or load the same weights. {}"
)
