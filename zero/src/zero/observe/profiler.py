"""Some steps under torch's profiler, as an observer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from zero.observe.observer import Observer, Run
from zero.observe.profile_summary import Span, Summary, summarise
from zero.ranges import PREFIX

if TYPE_CHECKING:
    from torch.profiler import profile

TRACE, PAGE = "trace.json", "summary.txt"


class Profiler(Observer):
    """Profiles the next `steps` steps that begin, each from its first forward to that of the next, and writes
    to `folder`: trace.json for chrome://tracing or Perfetto, with the engine's ranges, and summary.txt.
    summary: once there is one."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.summary: Summary | None = None
        self._folder, self._steps = folder, steps
        self._begun = 0
        self._profile: profile | None = None

    def begin(self, run: Run) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=self._folder):
            pass  # a folder that cannot be written to is told now

    def begin_step(self, number: int) -> None:
        from torch.profiler import profile

        if self._profile is None:
            self._profile = profile()
            self._profile.__enter__()
        elif self._begun == self._steps:
            self._end()
        self._begun += 1

    def close(self) -> None:
        if self._profile is not None and self.summary is None:
            self._end()

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.__exit__(None, None, None)
        self.summary = _summary(self._profile, self._begun)
        self._profile.export_chrome_trace(str(self._folder / TRACE))
        (self._folder / PAGE).write_text(str(self.summary), encoding="utf-8")
        self._profile, self.over = None, True


def _summary(profile: profile, steps: int) -> Summary:
    from torch.autograd import DeviceType

    host: list[Span] = []
    device: list[Span] = []
    for event in profile.events() or ():
        span = Span(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        (host if event.device_type == DeviceType.CPU else device).append(span)
    ranges = [span for span in host if span.name.startswith(PREFIX)]
    kernels = [span for span in device if not span.name.startswith(PREFIX)]
    return summarise(ranges, (span for span in host if not span.name.startswith(PREFIX)), kernels, steps)
