"""The descriptor and what it loads: cheap to read, safe to probe, complete when loaded."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from accelz.accelerator import Accelerator
from accelz.capabilities import COMPILATIONS, SCALINGS, Capabilities
from accelz.conformance.cluster import Cluster
from accelz.conformance.contract import ROLES, ContractBroken, expect, expect_close, unguarded
from accelz.conformance.marks import about, proves
from accelz.discovery import Status, list_backends

_READ = """
import json, sys
from accelz.discovery import installed, read_descriptor
entry = installed({name!r})[0]
before = set(sys.modules)
descriptor = read_descriptor(entry)
own = entry.value.partition(":")[0].partition(".")[0]
def known(name):
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("accelz", "pluggy", own)
def native(module):
    return str(getattr(module, "__file__", None) or "").endswith((".so", ".pyd"))
new = {{n: m for n, m in sys.modules.items() if n not in before and not known(n)}}
heavy = {{n.partition(".")[0] for n, m in new.items() if native(m)}}
print(json.dumps(sorted(heavy | ({{"torch"}} & set(sys.modules)))))
"""

_PROBE_AND_FORK = """
import json, os, sys
from accelz.discovery import installed, read_descriptor
descriptor = read_descriptor(installed({name!r})[0])
answers = [descriptor.probe(), descriptor.probe()]
def usable():
    import torch
    accelerator = descriptor.load()
    accelerator.bind({local_rank})
    return torch.ones(3, device=accelerator.device).sum().item() == 3
pid = os.fork()
if pid == 0:
    code = 1
    try:
        code = 0 if descriptor.probe() == answers[0] else 2
        if code == 0 and {load}:
            code = 0 if usable() else 3
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
answers.append(descriptor.probe())
if status == 1 and {load}:
    try:
        usable()
    except Exception:
        status = 4
print(json.dumps([[a.available, a.reason] for a in answers] + [status]))
"""

RANGE = "Accelerator.profiler_range"
RANGE_NAMES = ("zero::gather layers.3", "", "% {0} {name} \n", "Grüße, 層 3", "long " * 1000)
PATIENCE = 10.0
"""Seconds that a thread waits for another."""

UNUSABLE = 4  # in the parent as well
CHILD_CODES = {1: "raised", 2: "got another answer from probe()", 3: "computed a wrong sum"}


class DescriptorContract:
    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        return str(request.config.getoption("accelz_device"))

    @about("BackendDescriptor")
    def test_it_is_sound(self, name: str) -> None:
        """Exactly one installed backend has the name, its descriptor is read and its probe answers."""
        rows = [row for row in list_backends() if row.name == name]
        broken = [f"{row.distribution}: {row.reason}" for row in rows if row.status is Status.BROKEN]
        expected = "must be readable and its probe must answer"
        expect(not broken, "BackendDescriptor", expected, "; ".join(broken))
        expected = "must belong to one backend only"
        expect(len(rows) == 1, "BackendDescriptor.name", expected, f"{len(rows)} have it")

    @about("accelz_backend")
    def test_reading_it_imports_no_device_library(self, name: str) -> None:
        """Importing the plugin and reading its descriptor imports neither torch nor a native library."""
        heavy = _python(_READ.format(name=name), "accelz_backend")
        expect(
            not heavy,
            "accelz_backend",
            "the plugin module and its descriptor must import no torch and no device library",
            f"imported: {', '.join(heavy)}",
            "import inside probe() and load()",
        )

    @about("BackendDescriptor.probe")
    def test_probe_repeats_itself_and_survives_a_fork(self, name: str) -> None:
        """The probe gives the same answer twice, in a forked child, and in the parent after the fork."""
        self._probe_and_fork(name, load=False, local_rank=0)

    @about("BackendDescriptor.probe", "BackendDescriptor.load")
    @pytest.mark.usefixtures("devices_left")
    def test_a_child_of_a_probed_process_can_use_the_device(self, name: str) -> None:
        """A probe opens nothing that a forked child would inherit broken: the child can load and compute."""
        self._probe_and_fork(name, load=True, local_rank=0)

    def _probe_and_fork(self, name: str, load: bool, local_rank: int) -> None:
        script = _PROBE_AND_FORK.format(name=name, load=load, local_rank=local_rank)
        *answers, status = _python(script, "BackendDescriptor.probe")
        came = ", ".join(str(a) for a in answers)
        expected = "must answer the same each time"
        expect(all(a == answers[0] for a in answers), "BackendDescriptor.probe", expected, came)
        if status == UNUSABLE:
            pytest.skip("the device cannot be used in a process that was not forked either")
        expect(
            status == 0,
            "BackendDescriptor.load" if load else "BackendDescriptor.probe",
            "must work in a child forked after the parent has probed",
            f"the child {CHILD_CODES.get(status, f'ended with {status}')}",
            "initialise nothing in probe(): look at files, or ask in a subprocess",
        )

    @about("BackendDescriptor.load")
    def test_load_gives_every_role(self, name: str, accelerator: Accelerator) -> None:
        """load() returns an Accelerator with the backend's name, each role of its interface's type."""
        expect(accelerator.name == name, "Accelerator.name", f"must be {name!r}", repr(accelerator.name))
        expect(isinstance(accelerator.device, torch.device), "Accelerator.device", "must be a torch.device")
        for attribute, interface in ROLES.items():
            role = unguarded(getattr(accelerator, attribute))
            expected = f"must be an accelz.{interface.__name__}"
            came = type(role).__name__
            expect(isinstance(role, interface), f"Accelerator.{attribute}", expected, came, "subclass it")

    @about("Accelerator.capabilities")
    def test_capabilities_are_declared(self, capabilities: Capabilities) -> None:
        """Capabilities are accelz's dataclass; flags are bools, rates numbers, the dtypes floating point."""
        where = "Accelerator.capabilities"
        expect(isinstance(capabilities, Capabilities), where, "must be Capabilities", repr(capabilities))
        odd = {k: v for k, v in capabilities.flags().items() if not isinstance(v, bool)}
        expect(not odd, where, "every flag must be True or False", str(odd))
        granularity = capabilities.memory_granularity
        sound = isinstance(granularity, int) and granularity >= 1
        expect(sound, where, "memory_granularity must be bytes, at least 1", repr(granularity))
        known = capabilities.compile in COMPILATIONS
        expect(known, where, f"compile must be one of {COMPILATIONS}", repr(capabilities.compile))
        known = capabilities.scaled_mm in SCALINGS
        expect(known, where, f"scaled_mm must be one of {SCALINGS}", repr(capabilities.scaled_mm))
        rates = {name: getattr(capabilities, name) for name in ("peak_flops", "link_bandwidth")}
        odd = {name: rate for name, rate in rates.items() if not _is_rate(rate)}
        expect(not odd, where, "what is done in a second must be a finite number, 0 if not known", str(odd))
        dtypes: object = capabilities.dtypes
        expect(isinstance(dtypes, frozenset), where, "dtypes must be a frozenset", type(dtypes).__name__)
        assert isinstance(dtypes, frozenset)
        expected = "dtypes must hold float32: master weights need it"
        expect(torch.float32 in dtypes, where, expected, str(dtypes))
        floating = all(isinstance(d, torch.dtype) and d.is_floating_point for d in dtypes)
        expect(floating, where, "dtypes must be floating-point torch dtypes", str(dtypes))

    @about("Accelerator.device_count", "Accelerator.bind")
    def test_bind_gives_a_usable_device(self, accelerator: Accelerator) -> None:
        """There is at least one device, and after bind() this process computes on the one it got."""
        count = accelerator.device_count()
        expect(count >= 1, "Accelerator.device_count", "must be at least 1 if the probe says available")
        single, taken = accelerator.capabilities.one_device_per_process, set()
        for local_rank in _local_ranks(accelerator):
            accelerator.bind(local_rank)
            taken.add(accelerator.device)
            got = torch.full((3,), 2.0, device=accelerator.device).cpu()
            expect_close(got, torch.full((3,), 2.0), "Accelerator.bind", f"device of local rank {local_rank}")
        own_device = single or len(taken) == count
        came = f"self.device was {', '.join(sorted(map(str, taken)))} for {count} local ranks"
        expect(own_device, "Accelerator.bind", "must give each local rank a device of its own", came)

    @about("Accelerator.bind")
    def test_bind_makes_the_device_current(self, accelerator: Accelerator) -> None:
        """A tensor created on the device type without a number lands on the bound device."""
        for local_rank in _local_ranks(accelerator):
            accelerator.bind(local_rank)
            got = torch.ones(1, device=accelerator.device.type).device
            found = f"a new tensor is on {got}, and self.device is {accelerator.device}"
            expect(
                got == accelerator.device,
                "Accelerator.bind",
                "must make one device the current one, and set self.device to it",
                f"for local rank {local_rank} {found}",
            )

    @about("Accelerator.bind")
    @proves("one_device_per_process")
    def test_a_process_keeps_its_device(self, accelerator: Accelerator) -> None:
        """If a process has one device for life, binding another one is refused or changes nothing."""
        accelerator.bind(0)
        device = accelerator.device
        refused = accelerator.device_count() > 1 and _refused(lambda: accelerator.bind(1))
        kept = accelerator.device == device and accelerator.capabilities.one_device_per_process
        accelerator.bind(0)
        expect(refused or kept, "Accelerator.bind", "must not leave the process's one device", "it moved")

    @about("Accelerator.flush")
    @proves("lazy_graph")
    def test_flush_runs_recorded_work(self, accelerator: Accelerator) -> None:
        """On a lazy-graph device flush() starts what was recorded; elsewhere it is the base's no-op."""
        values = torch.arange(5.0, device=accelerator.device) * 2
        accelerator.flush()
        accelerator.streams.synchronize()
        expected = "work queued before it must give the right result"
        expect_close(values, torch.arange(5.0) * 2, "Accelerator.flush", expected)
        own = type(unguarded(accelerator)).flush is not Accelerator.flush
        expect(own, "Accelerator.flush", "a lazy_graph device must have its own", "the base's no-op")

    @about(RANGE)
    @proves("profiler_ranges")
    def test_profiler_ranges_nest_and_let_errors_through(self, accelerator: Accelerator) -> None:
        """Ranges nest, have any text as names, and end where an error leaves them, which stays what it is."""
        _expect_own_ranges(accelerator)
        for name in RANGE_NAMES:
            left = None
            with accelerator.profiler_range("kit outer"), accelerator.profiler_range("kit outer"):
                try:
                    with accelerator.profiler_range(name):
                        raise KeyError(name)
                except KeyError as error:
                    left = error
                with accelerator.profiler_range(name):
                    pass
            expect(left is not None, RANGE, "must let an error in its block through", "it was swallowed")

    @about(RANGE)
    @proves("profiler_ranges")
    def test_profiler_ranges_of_threads_are_apart(self, accelerator: Accelerator) -> None:
        """Ranges of two threads may overlap without being nested."""
        _expect_own_ranges(accelerator)
        begun, ended = threading.Event(), threading.Event()

        def overlap() -> None:
            with accelerator.profiler_range("kit of another thread"):
                begun.set()
                ended.wait(PATIENCE)

        with ThreadPoolExecutor(1) as pool:
            try:
                with accelerator.profiler_range("kit of this thread"):
                    other = pool.submit(overlap)
                    begun.wait(PATIENCE)
            finally:
                ended.set()  # the pool waits for the other thread
            other.result()

    @about("Accelerator.bind", "Collectives.init")
    @proves("shared_device")
    @pytest.mark.usefixtures("devices_left")
    def test_ranks_share_a_device(self, accelerator: Accelerator) -> None:
        """With one rank more than devices, two ranks work on one device, collectives included."""
        size = max(accelerator.device_count(), 1) + 1
        cluster = Cluster(accelerator.name, size)
        try:
            got = cluster.run(sum_of_ranks)
        finally:
            cluster.stop()
        want = float(sum(range(size)))
        expected = f"ranks on one device must sum to {want}"
        expect(got == [want] * size, "Collectives.all_reduce", expected, str(got))


class TestDescriptor(DescriptorContract):
    pass


def _expect_own_ranges(accelerator: Accelerator) -> None:
    own = type(unguarded(accelerator)).profiler_range is not Accelerator.profiler_range
    expect(own, RANGE, "must be the backend's own where profiler_ranges is declared", "it is the base's")


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _local_ranks(accelerator: Accelerator) -> list[int]:
    """Local ranks to bind one after the other, this process's own last."""
    others = not accelerator.capabilities.one_device_per_process
    return [*(range(accelerator.device_count()) if others else ()), 0]


def sum_of_ranks(context: Any) -> float:
    value = torch.tensor([float(context.rank)], device=context.accelerator.device)
    context.accelerator.collectives.all_reduce(value, context.group)
    return value.item()


def _refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ContractBroken:
        return True
    return False


def _python(script: str, method: str) -> Any:
    """Run a script in a fresh interpreter and read the JSON on its last line."""
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise ContractBroken(
            method, "must not hang in a fresh process or a forked child", "60 s passed"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ContractBroken(method, "must work in a fresh process", done.stderr[-2000:])
    return json.loads(lines[-1])
