"""Settings of compiled training."""

from __future__ import annotations

from typing import Literal

from zero.config.validated import Bytes, Converted, Validated, held


class Compile(Validated):
    """Settings for running the model's forward and backward through `torch.compile`.

    inner: what compiles the graphs after gathers have been inserted. "inductor" generates code; "aot_eager"
        runs the operations one by one, with bitwise the results of training without compile.
    fuse_casts: a unit whose parameters are only used cast to one narrower dtype travels in that dtype (the
        shard is cast before it travels).
    prefetch_budget: bytes, or e.g. "64MiB", of gathers that may be under way ahead of their use; 0 gathers on
        demand. None: the size of a graph's largest unit, so that at least the next unit is always under way.
    persist_budget: bytes, or e.g. "1GiB", for units that stay gathered from one use to the next, until the
        weights change; "auto": the device memory that the first steps leave free, less a margin. The units
        whose gathers cost most time per byte are chosen, as measured in the first steps.
    graphs: on devices that capture graphs, record what lies between gathers and reductions of a compiled
        graph, once its operands stay where they are, and replay that, with less work of the host.
    dynamic: as in torch.compile: None makes a dimension dynamic when it changes, True at once, False never.
    """

    inner: Literal["inductor", "aot_eager"] = "inductor"
    fuse_casts: bool = True
    prefetch_budget: Converted[Bytes | None, int | str | None] = held(None)
    persist_budget: Converted[Literal["auto"] | Bytes, int | str] = held(0)
    graphs: bool = False
    dynamic: bool | None = None
