"""How the kit reports what is wrong: by method, with what was expected, what came instead, and what to do.

`checked()` puts a guard around a backend's accelerator. A method that raises, or returns something other than
its interface says, becomes a `ContractBroken` that names the method.
"""

from __future__ import annotations

import functools
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.conformance import progress
from accelz.roles.collectives import Collectives, Handle
from accelz.roles.flat_buffer import FlatBuffer, FlatBufferStrategy
from accelz.roles.kernels import Kernels
from accelz.roles.memory import Memory
from accelz.roles.rng import Rng
from accelz.roles.streams import Event, Graph, Stream, Streams

ROLES: dict[str, type] = {
    "memory": Memory,
    "streams": Streams,
    "rng": Rng,
    "collectives": Collectives,
    "flat_buffers": FlatBufferStrategy,
    "kernels": Kernels,
}
"""The interface of each role, by the accelerator's attribute for it."""

INTERFACES: tuple[type, ...] = (Accelerator, *ROLES.values(), Stream, Event, Graph, Handle, FlatBuffer)

STARTS = tuple(name for name in vars(Collectives) if name.startswith("_start_"))
"""What a backend's own `Collectives` overrides."""

ATTRIBUTES: dict[type, dict[str, type]] = {
    Accelerator: {"name": str, "device": torch.device, "capabilities": Capabilities},
    FlatBuffer: {"data": Tensor, "nbytes": int, "materialized": bool},
}
"""The attributes of interfaces that are not methods, with their types."""

MISSING_OPERATOR = (
    re.compile(r"Could not run '(aten::[\w.]+)' with arguments from"),
    re.compile(r"[Tt]he operator '(aten::[\w.]+)' is not currently (?:implemented|supported)"),
    re.compile(r"^(?:aten::)?(\w+_overrideable) not implemented"),
)
"""What torch says of an operator that a device lacks."""


class ContractBroken(AssertionError):
    """A backend does not do what the interface says.

    method: the method whose contract it is. expected: what the contract requires. came: what the backend did
    instead. do: how to fix it, if the kit knows.
    """

    def __init__(self, method: str, expected: str, came: str = "", do: str = "") -> None:
        lines = [f"{method}: {expected}"]
        lines += [f"  got:  {came}"] if came else []
        lines += [f"  do:   {do}"] if do else []
        super().__init__("\n".join(lines))
        self.method = method


class UndeclaredCapabilityWarning(UserWarning):
    """The device can do something that its backend does not declare, so that nobody uses it."""


def expect(ok: bool, method: str, expected: str, came: str = "", do: str = "") -> None:
    """Raise ContractBroken unless `ok`."""
    if not ok:
        raise ContractBroken(method, expected, came, do)


def expect_close(
    got: Tensor, want: Tensor, method: str, expected: str, rtol: float = 0.0, atol: float = 0.0, do: str = ""
) -> None:
    """Raise ContractBroken unless `got` equals `want` within the tolerance; NaN equals NaN."""
    if got.dtype == want.dtype and torch.equal(got.detach().cpu(), want.detach().cpu()):
        return  # most are equal, and the full comparison takes ten times as long
    got64, want64 = got.detach().to("cpu", torch.float64), want.detach().to("cpu", torch.float64)
    if got64.shape != want64.shape:
        raise ContractBroken(method, expected, f"shape {tuple(got64.shape)}, not {tuple(want64.shape)}", do)
    wrong = ~torch.isclose(got64, want64, rtol=rtol, atol=atol, equal_nan=True)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        count = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        came = f"{count}, the first at {at}: {got64[at].item()!r}, not {want64[at].item()!r}"
        raise ContractBroken(method, expected, came, do)


def expect_raises(
    kind: type[Exception], method: str, expected: str, call: Callable[[], Any], do: str = ""
) -> Exception:
    """Raise ContractBroken unless `call` raises `kind`; return that error. do: by default, to raise it."""
    do = do or f"raise {kind.__name__}"
    try:
        call()
    except Exception as error:
        came = error.__cause__ if isinstance(error, ContractBroken) else error
        if isinstance(came, kind):
            return came
        raise ContractBroken(method, expected, _short(came or error), do) from error
    raise ContractBroken(method, expected, "no error at all", do)


def missing_operator(error: BaseException) -> str:
    """The name of the operator, "aten::…", whose absence on the device the error reports, or ""."""
    found = (pattern.search(str(error)) for pattern in MISSING_OPERATOR)
    name = next((match[1] for match in found if match), "")
    return f"aten::{name.removeprefix('aten::')}" if name else ""


@contextmanager
def named(method: str, expected: str) -> Iterator[None]:
    """Report an exception that torch raises inside the block as a broken method of the backend."""
    try:
        yield
    except ContractBroken:
        raise
    except Exception as error:
        raise ContractBroken(method, expected, _short(error)) from error


def checked(accelerator: Accelerator) -> Accelerator:
    """Wrap the accelerator in a guard that reports broken methods by name."""
    return cast(Accelerator, _Checked(accelerator, Accelerator))


def unguarded(role: Any) -> Any:
    """Return the backend's own object behind the guard."""
    return role._raw if isinstance(role, _Checked) else role


class _Checked:
    def __init__(self, raw: Any, interface: type) -> None:
        self._raw = raw
        self._interface = interface

    def __getattr__(self, name: str) -> Any:
        method = f"{self._interface.__name__}.{name}"
        value = _guarded(method, lambda: getattr(self._raw, name))
        if self._interface is Accelerator and name in ROLES:
            if isinstance(value, Collectives):
                _check_starts(value)
            return _Checked(value, ROLES[name])
        kind = ATTRIBUTES.get(self._interface, {}).get(name)
        if kind is not None and not isinstance(value, kind):
            raise ContractBroken(method, f"must be {_article(kind)}", _shown(value))
        declared = getattr(self._interface, name, None)
        if isinstance(declared, types.FunctionType):
            return functools.partial(_call, method, declared, value)
        return value


def _call(method: str, declared: types.FunctionType, bound: Any, *args: Any, **kwargs: Any) -> Any:
    plain = [unguarded(a) for a in args]
    value = _guarded(method, lambda: bound(*plain, **{k: unguarded(v) for k, v in kwargs.items()}))
    hint = _return_hint(declared)
    if not _matches(value, hint):
        what = _name(hint) if isinstance(hint, type) else str(hint)
        raise ContractBroken(method, f"must return {what}", _shown(value))
    if _kind(hint) is AbstractContextManager:
        return _CheckedContext(method, value)
    return _wrapped(value)


def _check_starts(collectives: Collectives) -> None:
    """Have the `_start_…` methods of the backend's own checked for what they return."""
    for name in STARTS:
        own = getattr(type(collectives), name) is not getattr(Collectives, name)
        if own and name not in vars(collectives):
            setattr(collectives, name, functools.partial(_started, name, getattr(collectives, name)))


def _started(name: str, start: Callable[..., Any], *args: Any) -> Any:
    work = start(*args)
    if not isinstance(work, dist.Work):
        raise ContractBroken(
            f"Collectives.{name}",
            "must return a torch.distributed.Work",
            _shown(work),
            "start the collective with async_op=True and return what torch returns, or subclass dist.Work",
        )
    return work


class _CheckedContext:
    """A context manager that a backend's method returned: entering and leaving it is part of that method."""

    def __init__(self, method: str, raw: AbstractContextManager[Any]) -> None:
        self._method = method
        self._raw = raw

    def __enter__(self) -> Any:
        return _guarded(self._method, self._raw.__enter__)

    def __exit__(self, *error: Any) -> bool | None:
        return cast("bool | None", _guarded(self._method, lambda: self._raw.__exit__(*error)))


def _guarded(method: str, call: Callable[[], Any]) -> Any:
    try:
        with progress.running(method):
            return call()
    except ContractBroken:  # raised by the watchdog
        raise
    except NotImplementedError as error:
        raise ContractBroken(
            method, "not implemented yet", _raised_at(error), str(error).split("\n")[0]
        ) from error
    except Exception as error:
        raise ContractBroken(method, "must not raise here", f"{_short(error)}\n{stack_of(error)}") from error


def stack_of(error: BaseException) -> str:
    """The traceback of an error, without the frames of the kit."""
    told = traceback.TracebackException.from_exception(error)
    told.stack[:] = [frame for frame in told.stack if Path(frame.filename).parent != Path(__file__).parent]
    return "".join(told.format()).rstrip()


def _raised_at(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {frame.filename}:{frame.lineno}"


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _shown(value: Any) -> str:
    return "None" if value is None else f"{_name(type(value))}: {value!r:.200}"


def _name(kind: type) -> str:
    """A class's name with its module: a device library may have classes of the same names."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    module = "accelz" if kind.__module__.startswith("accelz.roles.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _wrapped(value: Any) -> Any:
    interface = next((i for i in INTERFACES if isinstance(value, i)), None)
    return value if interface is None else _Checked(value, interface)


@functools.cache
def _return_hint(function: types.FunctionType) -> Any:
    return typing.get_type_hints(function).get("return")


def _kind(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _matches(value: Any, hint: Any) -> bool:
    if hint in (None, type(None), Any):
        return True
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(value is None if h is type(None) else _matches(value, h) for h in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float))
    kind = _kind(hint)
    return not isinstance(kind, type) or isinstance(value, kind)
