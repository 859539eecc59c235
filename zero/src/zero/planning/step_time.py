"""How long a step takes at least, by what devices and links can do in a second."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import accelz
from zero.errors import UsageError
from zero.planning.activations import Flops
from zero.planning.traffic import TrafficPlan


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What is done in a second, at most; 0 for not known.

    peak_flops: operations of a device. link_bandwidth: bytes that a rank sends to the others: the bus
    bandwidth of collectives. host_bandwidth: bytes that a device sends to host memory, and as many that it
    gets from it meanwhile.
    """

    peak_flops: float
    link_bandwidth: float
    host_bandwidth: float

    @classmethod
    def given(
        cls, peak_flops: float | None, link_bandwidth: float | None, host_bandwidth: float | None
    ) -> Rates:
        """Those given; in place of None, what the accelerator declares that this process has chosen, if it
        has chosen one. Raises UsageError for numbers that are no rates."""
        rates = {"peak_flops": peak_flops, "link_bandwidth": link_bandwidth, "host_bandwidth": host_bandwidth}
        for name, rate in rates.items():
            if rate is not None and not _is_rate(rate):
                raise UsageError(f"{name}={rate!r}: what is done in a second must be a number above 0")
        chosen = accelz.selected()
        declared = chosen and chosen.capabilities
        return cls(
            **{name: getattr(declared, name, 0.0) if rate is None else rate for name, rate in rates.items()}
        )


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """Seconds of an optimizer step, at least; None where not known, or where no rate is.

    compute: of the matrix products of forwards and backwards at the device's peak. link: of what a rank sends
    to the others. host: of what moves between device and host, in the direction that has more. The
    optimizer's kernels, the disk and what waits for something else come on top.
    """

    compute: float | None
    link: float | None
    host: float | None

    @property
    def parts(self) -> dict[str, float]:
        """Those that are known, by name."""
        return {name: seconds for name, seconds in asdict(self).items() if seconds is not None}

    @property
    def overlapped(self) -> float:
        """If all parts run at the same time: no step is faster."""
        return max(self.parts.values())

    @property
    def in_turn(self) -> float:
        """If one part begins when the other is over."""
        return sum(self.parts.values())

    @property
    def bound_by(self) -> str:
        """The name of the part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def balanced_batch(self) -> float | None:
        """How many times as large a batch takes as long to compute as the longest part, which does not grow
        with it; None where computing is the longest part, or its time is not known."""
        return self.overlapped / self.compute if self.compute and self.compute < self.overlapped else None


def plan_time(flops: Flops | None, traffic: TrafficPlan, rates: Rates) -> TimePlan | None:
    """Plan the time of a step; None if nothing is known of it, or what is known takes none."""
    host = max(traffic.to_host, traffic.to_device)
    made = TimePlan(
        compute=None if flops is None else _seconds(flops.all, rates.peak_flops),
        link=_seconds(traffic.link, rates.link_bandwidth),
        host=_seconds(host, rates.host_bandwidth),
    )
    return made if any(made.parts.values()) else None


def _seconds(amount: int, rate: float) -> float | None:
    return amount / rate if rate else None


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
