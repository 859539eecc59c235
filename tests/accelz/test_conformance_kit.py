"""The kit passes a sound backend, fails each broken one, and names the method that broke its contract."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from accelz import Capabilities, MemoryStats, NullStreams
from accelz.conformance import grouping, report
from accelz.conformance.contract import ROLES, ContractBroken, checked, missing_operator
from accelz.conformance.marks import WITH_DUTIES
from accelz.conformance.test_descriptor import DescriptorContract
from accelz.conformance.test_flat_buffers import FlatBufferContract
from accelz.conformance.test_leaks import NBYTES, Leaks
from accelz.discovery import installed
from accelz_cpu.accelerator import build
from accelz_cpu.memory import ProcessMemory

from . import forked
from .fake_distribution import check, good, install
from .liars.rounds import ROUNDS, SIM_ROUNDS
from .liars.told import BRIEFLY, LIAR

pytestmark = pytest.mark.slow  # starts programs

UNDECLARED = {
    "modest(on_sim=False)": {
        "asynchronous": "operations_return",
        "storage_resize": "storage_can_be",
        "host_data_assignment": "takes_host_data",
        "async_collectives": "return_at_once",
        "scaled_mm rowwise": "ScaledProducts",
        "dtype bfloat16": "matrix_products",
    },
    "modest(on_sim=True)": {
        "pinned_host_memory": "memory_is_pinned",
        "storage_resize": "storage_can_be",
        "compile aot_eager": "model_is_compiled",
        "scaled_mm tensorwise": "ScaledProducts",
        "profiler_ranges": "profiler_ranges",
        "dtype float64": "matrix_products",
    },
}
"""What works although nobody declares it, and the test that finds it, by the double that keeps it quiet."""

DUTIES = ("several_queues", "flush_runs", "allocated_is_exact", "what_was_captured")
"""The tests that prove `WITH_DUTIES`, which pass on the doubles."""

DESCRIPTOR_LIES = {
    "imports torch": ("imports_no_device", "import torch\n" + good("liar"), "accelz_backend: ", "torch"),
    "probe raises": (
        "it_is_sound",
        good("liar").replace("Probe(True", "Probe(1 / 0"),
        "BackendDescriptor: must be readable",
        "probe failed: ZeroDivisionError",
    ),
    "probe changes its mind": (
        "repeats_itself",
        "import itertools\ncount = itertools.count()\n"
        + good("liar").replace("Probe(True, 'a double of the cpu')", "Probe(True, f'{next(count)}')"),
        "BackendDescriptor.probe: must answer the same each time",
        "0",
    ),
    "probe differs after a fork": (
        "repeats_itself",
        "import os\nfirst = os.getpid()\n"
        + good("liar").replace("'a double of the cpu'", "str(os.getpid() == first)"),
        "BackendDescriptor.probe: must work in a child forked",
        "another answer from probe()",
    ),
    "device dies in a child": (
        "a_child_of_a_probed",
        "import os\nfirst = os.getpid()\n"
        + good("liar").replace(
            "def load():", "def load():\n    if os.getpid() != first: raise OSError('forked')"
        ),
        "BackendDescriptor.load: must work in a child forked",
        "raised",
    ),
    "load raises": (
        "load_gives",
        good("liar").replace("def load():", "def load():\n    raise OSError('driver too old')"),
        "BackendDescriptor.load: must not raise\n  got:  OSError: driver too old\nTraceback",
        "line ",
    ),
    "load gives another thing": (
        "load_gives",
        good("liar").replace("return accelerator", "return object()"),
        "BackendDescriptor.load: must return an Accelerator",
        "loaded a object",
    ),
    "capabilities are a dict": (
        "capabilities_are",
        good("liar").replace("return accelerator", "accelerator.capabilities = {}; return accelerator"),
        "Accelerator.capabilities: must be a Capabilities",
        "dict: {}",
    ),
    "the device is a name": (
        "load_gives",
        good("liar").replace("return accelerator", "accelerator.device = 'cpu'; return accelerator"),
        "Accelerator.device: must be a device",
        "str: 'cpu'",
    ),
    "a count is text": (
        "bind_gives",
        good("liar").replace(
            "return accelerator", "accelerator.device_count = lambda: '1'; return accelerator"
        ),
        "Accelerator.device_count: must return int",
        "str: '1'",
    ),
    "another name": (
        "load_gives",
        good("liar").replace("accelerator.name = 'liar'", "accelerator.name = 'cpu'"),
        "Accelerator.name: must be 'liar'",
        "'cpu'",
    ),
}


@pytest.fixture(scope="session")
def round_report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`round_report(call)`: the kit's answer to one double, made by `call` of `liars.told`; one run each."""

    @cache
    def report(call: str) -> dict[str, Any]:
        if "sim" in call.replace("on_sim=False", "") and not installed("sim"):
            pytest.skip("accelz-sim is not installed: see examples/sim_backend/README.md")
        folder = tmp_path_factory.mktemp("liar")
        install(folder, "liar", LIAR.format(call=call))
        tests = (
            (*UNDECLARED[call].values(), *DUTIES)
            if call in UNDECLARED
            else {lie.test for lie in CALLS[call].values()}
        )
        code, summary = forked.check(folder, " or ".join(sorted(tests)))
        assert code == (0 if call in UNDECLARED else 1)
        return summary

    return report


CALLS = {f"tell({name!r})": lies for name, lies in ROUNDS.items()}
CALLS |= {f"tell_on_sim({name!r})": lies for name, lies in SIM_ROUNDS.items()}
CASES = [(call, name) for call, lies in CALLS.items() for name in lies]


@pytest.mark.parametrize(("call", "name"), CASES, ids=[name for _, name in CASES])
def test_each_lie_is_found_and_the_method_named(round_report: Any, call: str, name: str) -> None:
    lie, report = CALLS[call][name], round_report(call)
    failures = [f for f in report["failures"] if lie.test in f["test"]]
    blamed = [f for f in failures if f["broken"] == lie.method and f"{lie.method}: " in f["message"]]
    blamed = [f for f in blamed if lie.said in f["message"]]
    assert blamed, f"{lie.method} is not blamed by {[f['message'][:500] for f in failures]}"
    assert all(f["contract"] and f["methods"] for f in blamed)
    assert [f["message"] for f in failures if f["message"].count("\n  do:   ") != 1] == []
    states = {row["name"]: row["state"] for row in report["capabilities"]}
    for flag in lie.flags:
        if flag in Capabilities().flags():
            assert states[flag] == "failed"


def test_each_role_has_a_liar_of_each_kind() -> None:
    """Wrong values apart, which most lies are: a wrong type, an error, a leak."""
    lies = [lie for lies in ROUNDS.values() for lie in lies.values()]
    for role in ("", "memory", "rng", "streams", "collectives", "flat_buffers", "kernels"):
        assert len({lie.method for lie in lies if lie.role == role}) >= 2, role
    roles = {lie.role for lie in ROUNDS["leaks"].values()}
    assert roles == {"", *ROLES}


def test_truth_beside_the_lies_still_passes(round_report: Any) -> None:
    report = round_report("tell('one')")
    failed = {f["test"].rpartition("::")[2] for f in report["failures"]}
    assert {name for name in failed if "test_step" in name} == {
        "test_step[sgd, skip 1]",
        "test_step[sgd, skip 1, NaN]",
        "test_step[sgd, skip 1, infinite]",
        "test_step[sgd, split, skip 1, NaN]",
    }
    assert "test_accumulate[float32-3]" in failed
    assert "test_accumulate[float32-0]" not in failed
    states = {row["name"]: row["state"] for row in report["capabilities"]}
    assert states["streams"] == "failed"


@pytest.mark.parametrize("call", UNDECLARED)
def test_what_works_undeclared_is_shown_and_does_not_fail(round_report: Any, call: str) -> None:
    states = {row["name"]: row["state"] for row in round_report(call)["capabilities"]}
    assert {name for name in UNDECLARED[call] if states[name] != "works undeclared"} == set()
    assert states["dtype float32"] == "proved"
    assert states["one_device_per_process"] == "not declared"


def test_the_kit_uses_nothing_that_is_not_declared(tmp_path: Path) -> None:
    install(tmp_path, "liar", LIAR.format(call="without_resizing()"))
    code, summary = forked.check(tmp_path, "do_not_fit or protects or finds_no_room")
    assert summary["failures"] == []
    assert code == 0
    last = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["capabilities"]) == ("summary", summary["capabilities"])


def test_nobody_is_advised_to_declare_what_has_further_duties(round_report: Any) -> None:
    states = {row["name"]: row["state"] for row in round_report("modest(on_sim=True)")["capabilities"]}
    assert {states[name] for name in WITH_DUTIES} == {"not declared"}


@pytest.mark.parametrize("lie", DESCRIPTOR_LIES)
def test_a_lying_descriptor_is_found(tmp_path: Path, lie: str) -> None:
    test, source, blamed, came = DESCRIPTOR_LIES[lie]
    install(tmp_path, "liar", source)
    code, summary = forked.check(tmp_path, test)
    details = "\n".join(f["detail"] for f in summary["failures"])
    assert code == 1
    assert blamed in details
    assert came in details
    assert all("\n  do:   " in f["message"] for f in summary["failures"])


def test_a_missing_operator_is_named_once(tmp_path: Path) -> None:
    """What torch says where a device has no kernel and no fallback for an operator."""
    missing = (
        "    import torch\n    def missing(*args, **options):\n        raise NotImplementedError("
        "\"Could not run 'aten::randn' with arguments from the 'liar' backend. This could be\")\n"
        "    torch.randn = missing\n"
    )
    install(
        tmp_path, "liar", good("liar").replace("    return accelerator", f"{missing}    return accelerator")
    )
    code, summary = forked.check(tmp_path, "a_seed_repeats or a_state_comes_back or several_tensors")
    messages = {f["message"] for f in summary["failures"]}
    assert code == 1
    assert len(summary["failures"]) == 3
    assert len(messages) == 1
    assert messages.pop().startswith(
        "torch.aten::randn: not implemented yet on this device\n  do:   register"
    )


@pytest.mark.parametrize(
    "said",
    [
        "Could not run 'aten::foo.out' with arguments from the 'acme' backend.",
        "The operator 'aten::foo.out' is not currently implemented for the acme device.",
        "foo_overrideable not implemented. You are likely triggering this with tensor backend other than",
    ],
)
def test_torchs_ways_to_say_that_an_operator_is_missing(said: str) -> None:
    assert missing_operator(NotImplementedError(said)) in ("aten::foo.out", "aten::foo_overrideable")


@pytest.mark.parametrize(
    ("shared", "tests"), [(True, "TestRng"), (False, "buffers_in_common or TestRng")], ids=["alone", "ranks"]
)
def test_where_nothing_binds_that_is_all_that_is_said(tmp_path: Path, shared: bool, tests: str) -> None:
    broken = (
        f"    accelerator.capabilities = accelz.Capabilities(shared_device={shared})\n"
        "    def bind(local_rank):\n"
        "        raise accelz.BackendError('no memory counters')\n"
        "    accelerator.bind = bind\n"
    )
    source = good("liar").replace(
        "    return accelerator", f"    import accelz\n{broken}    return accelerator"
    )
    install(tmp_path, "liar", source)
    code, summary = forked.check(tmp_path, tests)
    (failure,) = summary["failures"]
    assert code == 1
    assert failure["message"].startswith("Accelerator.bind: must not raise here")
    assert "no memory counters" in failure["message"]
    assert summary["not_run"] >= 4


def test_one_reason_is_one_entry_in_whatever_cases_it_shows(round_report: Any) -> None:
    failures = round_report("tell('one')")["failures"]
    entries = [text for text in grouping.texts(failures) if text.startswith("Collectives.reduce_scatter: ")]
    assert len([f for f in failures if f["broken"] == "Collectives.reduce_scatter"]) > 5
    assert len(entries) == 1
    assert "in:   test_reduce_scatter (12 cases: " in entries[0]
    assert "size 1, 2, 4" in entries[0]
    assert "dtype float64, float32, bfloat16, float16" in entries[0]


def test_failures_that_differ_in_values_alone_are_alike() -> None:
    def failure(test: str, message: str) -> dict[str, Any]:
        return {"test": f"x::{test}", "broken": "Stream.record", "message": message, "parameters": {}}

    came = [f"Stream.record: must return Event\n  got:  Event: <event_id={i}>" for i in range(3)]
    other = "Stream.record: must be behind this stream's work\n  got:  3"
    failures = [failure(f"test_{i}", message) for i, message in enumerate([*came, other])]
    assert grouping.texts(failures) == [
        f"{came[0]}\n  in:   test_0, test_1, test_2\n",
        f"{other}\n  in:   test_3\n",
    ]


def test_ranks_that_fail_alike_are_one_message(round_report: Any) -> None:
    failures = round_report("tell('four')")["failures"]
    alone = {f["message"] for f in failures if "test_broadcast_from" in f["test"] and "1 ranks" in f["test"]}
    assert len(alone) == 1
    assert alone.pop().startswith("Collectives.broadcast: must not raise here\n  got:  OSError: no link")


@pytest.mark.parametrize("devices", [1, 2])
def test_ranks_get_every_device_that_cannot_be_shared(tmp_path: Path, devices: int) -> None:
    if not installed("sim"):
        pytest.skip("accelz-sim is not installed: see examples/sim_backend/README.md")
    call = f"exclusive({devices}, __import__('pathlib').Path({str(tmp_path)!r}))"
    install(tmp_path, "liar", LIAR.format(call=call))
    tests = "(reduce_scatter and float32) or return_at_once or a_child_of or bind_gives or seed_repeats"
    code, summary = forked.check(tmp_path, tests)
    assert summary["failures"] == []
    assert code == 0
    assert summary["ranks_tested"] == devices
    untested = {row["what"]: row["needs"] for row in summary["not_tried"]}
    lacking = {"collectives between ranks", "async_collectives"}
    assert lacking & set(untested) == (lacking if devices == 1 else set())
    if devices == 1:
        needed = "2 devices, because shared_device is not declared; this machine has 1"
        assert {untested[what] for what in lacking} == {needed}


class EventOfTorch(NullStreams):
    def current(self) -> Any:
        return torch.nn.Identity()


class RaisesDeep(NullStreams):
    def synchronize(self) -> None:
        raise OSError("no driver")


def test_classes_are_told_with_their_modules() -> None:
    accelerator = build()
    accelerator.streams = EventOfTorch()
    with pytest.raises(ContractBroken) as error:
        checked(accelerator).streams.current()
    said = "Streams.current: must return accelz.Stream\n  got:  torch.nn.modules.linear.Identity: "
    assert str(error.value).startswith(said)


def test_a_stack_has_the_backends_frames_only() -> None:
    accelerator = build()
    accelerator.streams = RaisesDeep()
    with pytest.raises(ContractBroken) as error:
        checked(accelerator).streams.synchronize()
    assert "in synchronize" in str(error.value)
    assert "contract.py" not in str(error.value)


def test_dtypes_must_be_a_set() -> None:
    with pytest.raises(ContractBroken, match=r"(?s)dtypes must be a frozenset.*got:  list"):
        DescriptorContract().test_capabilities_are_declared(Capabilities(dtypes=[torch.float32]))  # type: ignore[arg-type]


def test_buffers_that_rest_on_an_undeclared_resize_are_found() -> None:
    accelerator = build()
    accelerator.capabilities = Capabilities(storage_resize=False)
    with pytest.raises(ContractBroken, match=r"(?s)must not rely on resize_.*do:   declare storage_resize"):
        FlatBufferContract().test_buffers_need_only_what_is_declared(checked(accelerator))


def test_all_that_a_missing_hook_breaks_has_one_reason(request: pytest.FixtureRequest) -> None:
    torchs = "register `PrivateUse1HooksInterface` and implement `resizePrivateUse1Bytes` at the same time"
    broken = ContractBroken("FlatBuffer.release", "not implemented yet", "NotImplementedError", torchs)
    found = {report._finding(request.node, error, "") for error in (broken, NotImplementedError(torchs))}
    assert len(found) == 1
    method, message = found.pop()
    assert method == "Capabilities.storage_resize"
    assert "do:   implement that hook, or declare storage_resize=False" in message


class UncountedFrees(ProcessMemory):
    """Counts bytes exactly, but the free of every fifth tensor is not seen."""

    def stats(self) -> MemoryStats:
        return dataclasses.replace(super().stats(), allocated=made[0] // 5 * NBYTES)


made = [0]


def test_a_leak_of_the_allocator_is_blamed_on_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(make: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            made[0] += 1
            return make(*args, **options)

        return wrapper

    monkeypatch.setattr("accelz.conformance.test_leaks.SETTLE_SECONDS", BRIEFLY)
    for name in ("full", "empty"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))
    accelerator = build()
    accelerator.memory = UncountedFrees()
    accelerator.capabilities = dataclasses.replace(accelerator.capabilities, exact_memory=True)
    leaks = Leaks(checked(accelerator))
    with pytest.raises(ContractBroken, match=r"Memory.stats: tensors that are made and dropped must keep"):
        leaks.check("Kernels.step", leaks.block)


def test_a_device_that_bind_has_not_set_is_told_as_such() -> None:
    accelerator = build()
    accelerator.device = torch.device("cpu", 0)
    with pytest.raises(ContractBroken, match=r"(?s)set self.device to it.*self.device is cpu:0"):
        DescriptorContract().test_bind_makes_the_device_current(checked(accelerator))


VENDOR_TEST = """
from accelz.conformance.contract import expect
from accelz.conformance.test_rng import RngContract

class TestOurRng(RngContract):
    def test_a_seed_repeats_and_seeds_differ(self, accelerator):
        "Overridden: we know better."

    def test_ours(self, accelerator):
        expect(accelerator.name == "cpu", "Accelerator.name", "must be cpu")
"""


def test_a_vendor_subclasses_a_contract(tmp_path: Path) -> None:
    (tmp_path / "test_ours.py").write_text(VENDOR_TEST)
    done = forked.by_pytest(tmp_path, "--accelz-device", "cpu")
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def test_pyargs_form_warns_about_the_undeclared(tmp_path: Path) -> None:
    install(tmp_path, "liar", LIAR.format(call="modest(on_sim=False)"))
    done = forked.by_pytest(
        tmp_path,
        "--pyargs",
        "accelz.conformance",
        "--accelz-device",
        "liar",
        "-k",
        "storage_can_be or TestRng",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UndeclaredCapabilityWarning: storage_resize works but is not declared" in done.stdout
    assert "accelz conformance: liar" in done.stdout


def test_without_a_device_the_kit_says_what_it_needs(tmp_path: Path) -> None:
    done = forked.by_pytest(tmp_path, "--pyargs", "accelz.conformance")
    assert done.returncode != 0
    assert "needs a backend: --accelz-device NAME" in done.stdout
    done = forked.by_pytest(tmp_path, "--pyargs", "accelz.conformance", "--accelz-device", "nosuch")
    assert done.returncode == 4
    assert "no backend called 'nosuch' is installed (installed: " in done.stderr


def test_the_cpu_conforms(tmp_path: Path) -> None:
    code, summary = check(tmp_path, name="cpu")
    assert summary["failures"] == []
    assert code == 0
    assert summary["ok"] is True
    assert summary["passed"] > 200
    for row in summary["capabilities"]:
        assert row["state"] == ("proved" if row["declared"] else "not declared"), row
