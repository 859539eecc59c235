"""Flat buffers: parameters become views of one buffer, and its bytes come and go under them.

The models here cover what autograd saves: views, transposes, indices, recomputed forwards. A test
releases the buffer between forward and backward, brings it back, refills it, and compares gradients with
those of the same model before it was flattened.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accelz.accelerator import Accelerator
from accelz.conformance.cluster import Cluster, Context
from accelz.conformance.contract import checked, expect, expect_close, named, unguarded
from accelz.conformance.held import Held
from accelz.conformance.marks import about, needs, over_dtypes, proves
from accelz.roles.flat_buffer import FlatBuffer, KeptBuffer, Slot, dense_stride, rebind

ALIGN = 8
MIB = 1 << 20


def slots_of(parameters: Sequence[nn.Parameter], align: int = ALIGN) -> tuple[list[Slot], int]:
    """Return slots at aligned offsets with gaps between them, and the buffer's size, including a tail."""
    slots, end = [], align  # a gap in front as well
    for parameter in parameters:
        shape, stride = tuple(parameter.shape), dense_stride(parameter.data)
        slots.append(Slot(end, shape, stride, parameter.numel()))
        end += -(-parameter.numel() // align) * align
    return slots, end + align


class Tied(nn.Module):
    """Embedding and output head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """A block that is recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.block = nn.Sequential(nn.Linear(5, 11), nn.GELU(), nn.Linear(11, 5))
        self._reentrant = reentrant

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        return checkpoint(self.block, hidden, use_reentrant=self._reentrant)  # type: ignore[no-any-return]


def _channels_last(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 3)),
        lambda: torch.randn(4, 7),
    ),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), lambda: torch.randn(2, 3, 6, 6)),
    "convolution, channels last": (
        lambda: _channels_last(nn.Conv2d(3, 4, 3)),
        lambda: torch.randn(2, 3, 6, 6),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 2)),
        lambda: torch.arange(11),
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), lambda: torch.randn(3, 6)),
    "tied weights": (Tied, lambda: torch.arange(19)),
    "checkpoint, reentrant": (lambda: Checkpointed(True), lambda: torch.randn(3, 5)),
    "checkpoint, not reentrant": (lambda: Checkpointed(False), lambda: torch.randn(3, 5)),
}


class FlatBufferContract:
    def flatten(
        self, accelerator: Accelerator, parameters: Sequence[nn.Parameter], dtype: torch.dtype = torch.float32
    ) -> FlatBuffer:
        slots, numel = slots_of(parameters)
        buffer = accelerator.flat_buffers.flatten(parameters, slots, numel, dtype)
        data = buffer.data
        came = f"{tuple(data.shape)} of {data.dtype} on {data.device}"
        fits = tuple(data.shape) == (numel,) and data.dtype == dtype and data.device == accelerator.device
        expected = f"data must be ({numel},) of {dtype} on {accelerator.device}"
        expect(fits, "FlatBufferStrategy.flatten", expected, came)
        expect(buffer.materialized, "FlatBufferStrategy.flatten", "the buffer must be materialized")
        return buffer

    def refill(self, accelerator: Accelerator, buffer: FlatBuffer, values: Tensor) -> None:
        """Bring the bytes back and fill them, as a gather does."""
        buffer.materialize()
        accelerator.streams.synchronize()
        _expect_storage(buffer, "FlatBuffer.materialize")
        buffer.data.copy_(values)

    def release(self, accelerator: Accelerator, buffer: FlatBuffer) -> None:
        accelerator.streams.synchronize()
        buffer.release()
        expect(not buffer.materialized, "FlatBuffer.release", "materialized must be False after it")

    @about("FlatBufferStrategy.flatten")
    @pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "from the device"])
    @over_dtypes()
    def test_flatten_keeps_values_and_views(
        self, accelerator: Accelerator, on_device: bool, dtype: torch.dtype
    ) -> None:
        """Values survive, cast to the buffer's dtype; each parameter is a view at its offset; gaps are 0."""
        where = "FlatBufferStrategy.flatten"
        start = accelerator.device if on_device else torch.device("cpu")
        parameters = [nn.Parameter(p.to(start)) for p in _awkward_tensors()]
        before = [p.detach().cpu().clone() for p in parameters]
        strides = [dense_stride(p.data) for p in parameters]
        buffer = self.flatten(accelerator, parameters, dtype)
        covered = torch.zeros(buffer.data.numel(), dtype=torch.bool)
        for parameter, value, stride, slot in zip(parameters, before, strides, buffer.slots, strict=True):
            expect_close(parameter, value.to(dtype), where, f"values of {tuple(value.shape)} must survive")
            came = f"{parameter.stride()}"
            kept = parameter.numel() == 0 or parameter.stride() == stride
            expect(kept, where, f"dense strides {stride} must survive", came)
            _expect_view(parameter, buffer, slot, where)
            covered[slot.offset : slot.offset + slot.numel] = True
        gaps = buffer.data.cpu()[~covered]
        expect_close(gaps, torch.zeros_like(gaps), where, "what no slot covers must be zero")

    @about("FlatBufferStrategy.flatten")
    def test_flatten_keeps_the_parameter(self, accelerator: Accelerator) -> None:
        """Identity, class, attributes, requires_grad, hooks and ties survive."""
        where = "FlatBufferStrategy.flatten"
        model = Tied()
        model.mix.bias.requires_grad_(False)
        weight = model.embedding.weight
        weight.tag = "kept"  # type: ignore[attr-defined]
        calls: list[str] = []
        weight.register_hook(lambda grad: calls.append("grad"))
        weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        names = [(name, id(p)) for name, p in model.named_parameters()]
        self.flatten(accelerator, list(model.parameters()))
        same = names == [(name, id(p)) for name, p in model.named_parameters()]
        expect(same, where, "every Parameter object must stay the same object")
        expect(model.head.weight is model.embedding.weight, where, "tied modules must share the Parameter")
        expect(type(weight) is nn.Parameter, where, "the class must stay nn.Parameter", type(weight).__name__)
        expect(getattr(weight, "tag", None) == "kept", where, "attributes must survive")
        flags = [p.requires_grad for p in model.parameters()]
        expect(flags == [True, True, False], where, "requires_grad must survive", str(flags))
        model(torch.arange(19, device=accelerator.device)).sum().backward()
        expect(sorted(calls) == ["accumulated", "grad"], where, "hooks must fire once each", str(calls))
        expect(model.mix.bias.grad is None, where, "a frozen parameter must get no gradient")

    @about("FlatBufferStrategy.flatten")
    @pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "from the device"])
    def test_what_shares_memory_with_a_parameter_keeps_it(
        self, accelerator: Accelerator, on_device: bool
    ) -> None:
        """A state dict taken before keeps its values: flatten must not empty the parameters' memory."""
        model = Tied().to(accelerator.device if on_device else torch.device("cpu"))
        state = model.state_dict()
        expected = {name: value.cpu().clone() for name, value in state.items()}
        buffer = self.flatten(accelerator, list(model.parameters()))
        buffer.data.zero_()
        accelerator.streams.synchronize()
        for name, value in state.items():
            where, what = "FlatBufferStrategy.flatten", f"{name} in a state dict taken before must keep"
            there = value.untyped_storage().nbytes() >= value.nbytes
            expect(there, where, f"{what} its memory")
            expect_close(value, expected[name], where, f"{what} its values")

    @about("FlatBufferStrategy.flatten", "Capabilities.storage_resize")
    def test_buffers_need_only_what_is_declared(self, accelerator: Accelerator) -> None:
        """Without storage_resize, buffers drop bytes in a way of their own, or say that they keep them."""
        if accelerator.capabilities.storage_resize:
            return
        buffer = unguarded(self.flatten(accelerator, [nn.Parameter(torch.ones(3))]))
        own = type(buffer).release is not FlatBuffer.release
        expected = "must not rely on resize_, since storage_resize is not declared"
        came = f"{type(buffer).__name__}.release, which is resize_"
        do = "declare storage_resize if it works; else the role is accelz.CopyAndKeep(device)"
        expect(own, "FlatBufferStrategy.flatten", expected, came, do)

    @about("FlatBuffer.release", "FlatBuffer.materialize")
    @pytest.mark.parametrize("name", MODELS)
    def test_views_saved_by_autograd_survive(self, accelerator: Accelerator, name: str) -> None:
        """Gradients are correct if the buffer is released after forward and refilled before backward."""
        make, sample = MODELS[name]
        torch.manual_seed(1)
        model, inputs = make(), sample()
        twin = _on_device(copy.deepcopy(model), accelerator)
        buffer = self.flatten(accelerator, list(model.parameters()))
        values = buffer.data.clone()
        for _ in range(2):
            _forward(twin, inputs, accelerator).backward()
            loss = _forward(model, inputs, accelerator)
            self.release(accelerator, buffer)
            shapes = [tuple(p.shape) for p in model.parameters()]
            expected = "shapes must stay"
            expect(shapes == [s.shape for s in buffer.slots], "FlatBuffer.release", expected, str(shapes))
            self.refill(accelerator, buffer, values)
            with named("FlatBuffer.materialize", "backward through saved views must work"):
                loss.backward()
            for (what, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                expect_close(p.grad, q.grad, "FlatBuffer.materialize", f"{what}.grad", rtol=1e-5, atol=1e-6)

    @about("FlatBuffer.release")
    def test_release_drops_the_bytes(self, accelerator: Accelerator) -> None:
        """The memory is really freed, also while autograd holds views, and comes back with materialize().

        A device that does not declare `storage_resize` may have buffers that say that they keep it.
        """
        layer = nn.Linear(2048, 4096, bias=False)
        buffer = self.flatten(accelerator, list(layer.parameters()))
        if isinstance(unguarded(buffer), KeptBuffer) and not accelerator.capabilities.storage_resize:
            pytest.skip("not declared: storage_resize; its buffers keep their bytes")
        held = layer(torch.ones(2, 2048, device=accelerator.device))
        before = Held.now(accelerator)
        self.release(accelerator, buffer)
        more = Held.now(accelerator).beyond(before)
        exact = accelerator.capabilities.exact_memory
        enough = buffer.nbytes if exact else buffer.nbytes // 2
        came = f"{-more.device} bytes fewer are allocated on the device, {more.host} more in the process"
        gone = -more.device >= enough and more.host < buffer.nbytes // 2
        expected = f"must drop {buffer.nbytes} bytes"
        expect(gone, "FlatBuffer.release", expected, came, "resize the storage to 0")
        buffer.materialize()
        _expect_storage(buffer, "FlatBuffer.materialize")
        del held

    @about("FlatBuffer.release", "FlatBuffer.materialize")
    def test_repeated_calls_change_nothing(self, accelerator: Accelerator) -> None:
        """release() twice is release(); materialize() on a materialized buffer keeps its content."""
        parameter = nn.Parameter(torch.arange(100.0))
        buffer = self.flatten(accelerator, [parameter])
        values = buffer.data.clone()
        buffer.materialize()
        expected = "a materialized buffer must keep its content"
        expect_close(buffer.data, values, "FlatBuffer.materialize", expected)
        self.release(accelerator, buffer)
        self.release(accelerator, buffer)
        self.refill(accelerator, buffer, values)
        buffer.materialize()
        expected = "parameters must see the new bytes"
        expect_close(parameter, torch.arange(100.0), "FlatBuffer.materialize", expected)

    @about("FlatBufferStrategy.flatten")
    def test_empty_parameters_and_buffers(self, accelerator: Accelerator) -> None:
        """Zero-sized parameters, and a buffer of nothing else, survive all calls."""
        parameter = nn.Parameter(torch.empty(0, 3))
        buffer = accelerator.flat_buffers.flatten([parameter], [Slot(0, (0, 3), (3, 1), 0)], 0, torch.float32)
        for call in (buffer.release, buffer.materialize, buffer.bind, buffer.release):
            call()
            expected = "a zero-sized parameter must keep its shape"
            expect(tuple(parameter.shape) == (0, 3), "FlatBuffer", expected)
        none = accelerator.flat_buffers.flatten([], [], 16, torch.float32)
        expected = "a buffer of no parameters is 0"
        expect_close(none.data, torch.zeros(16), "FlatBufferStrategy.flatten", expected)

    @about("FlatBufferStrategy.empty_like", "FlatBuffer.bind")
    @over_dtypes(torch.bfloat16, torch.float16)
    def test_a_second_buffer_in_another_dtype(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """A model bound to a 16-bit buffer computes and gets gradients in that dtype, and goes back."""
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        wide = self.flatten(accelerator, list(model.parameters()))
        values = wide.data.clone()
        narrow = accelerator.flat_buffers.empty_like(wide, dtype)
        where = "FlatBufferStrategy.empty_like"
        expect(not narrow.materialized, where, "must be released at first")
        expect(model[0].weight.dtype == torch.float32, where, "must not bind the parameters")
        for _ in range(2):
            self._compute_in(accelerator, model, narrow, values.to(dtype))
            self._compute_in(accelerator, model, wide, values)

    def _compute_in(
        self, accelerator: Accelerator, model: nn.Module, buffer: FlatBuffer, values: Tensor
    ) -> None:
        dtype, where = values.dtype, "FlatBuffer.bind"
        self.refill(accelerator, buffer, values)
        buffer.bind()
        for parameter, slot in zip(model.parameters(), buffer.slots, strict=True):
            expect(parameter.dtype == dtype, where, f"parameters must be {dtype}", str(parameter.dtype))
            _expect_view(parameter, buffer, slot, where)
            parameter.grad = None
        out = model(torch.ones(3, 6, dtype=dtype, device=accelerator.device))
        with named(where, f"a backward in {dtype} must work"):
            out.sum().backward()
        grads = [None if p.grad is None else p.grad.dtype for p in model.parameters()]
        expect(set(grads) == {dtype}, where, f"gradients must be {dtype}", str(grads))
        for parameter in model.parameters():
            parameter.grad = None
        self.release(accelerator, buffer)

    @about("FlatBufferStrategy.share")
    def test_buffers_in_common(self, accelerator: Accelerator, cluster: Callable[[int], Cluster]) -> None:
        """All ranks get the same memory and see what each writes to its slice; or all get None."""
        cluster(2).run(common_body)

    @about("FlatBufferStrategy.flatten", "Memory.stats")
    @needs("exact_memory")
    @pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "from the device"])
    def test_flatten_does_not_need_the_model_twice(self, accelerator: Accelerator, on_device: bool) -> None:
        """Device peak while flattening: the buffer plus one parameter, not the model twice."""
        start = accelerator.device if on_device else torch.device("cpu")
        parameters = [nn.Parameter(torch.ones(2 * MIB, device=start)) for _ in range(8)]
        gc.collect()
        accelerator.streams.synchronize()
        accelerator.memory.trim()
        model_bytes = 8 * 4 * 2 * MIB
        base = accelerator.memory.stats().allocated - (model_bytes if on_device else 0)
        accelerator.memory.reset_peak()
        self.flatten(accelerator, parameters)
        peak = accelerator.memory.stats().peak - base
        bound = model_bytes + model_bytes // 8 + 4 * MIB
        expect(peak <= bound, "FlatBufferStrategy.flatten", f"peak must stay below {bound} bytes", f"{peak}")

    @about("Capabilities.storage_resize")
    @proves("storage_resize")
    def test_a_storage_can_be_resized(self, accelerator: Accelerator) -> None:
        """A storage shrinks to 0 bytes and grows again in place, under a live view."""
        data = torch.ones(1024, device=accelerator.device)
        view = data.view(32, 32)
        where = "Capabilities.storage_resize"
        with named(
            where, "untyped_storage().resize_ must work (PrivateUse1: the hook resizePrivateUse1Bytes)"
        ):
            data.untyped_storage().resize_(0)
            emptied = data.untyped_storage().nbytes() == 0
            data.untyped_storage().resize_(4096)
        data.fill_(3.0)
        expect(emptied, where, "resize_(0) must leave 0 bytes")
        expect_close(view, torch.full((32, 32), 3.0), where, "a view must see the new bytes")

    @about("Capabilities.host_data_assignment")
    @proves("host_data_assignment")
    def test_a_parameter_takes_host_data(self, accelerator: Accelerator) -> None:
        """A device Parameter's data can be set to a host tensor and back, the object staying the same."""
        parameter = nn.Parameter(torch.ones(5, device=accelerator.device))
        where = "Capabilities.host_data_assignment"
        with named(where, "a device Parameter must take host data"):
            parameter.data = torch.full((5,), 2.0)
        expected = "the Parameter must be on the host"
        expect(parameter.device.type == "cpu", where, expected, str(parameter.device))
        parameter.data = torch.full((5,), 3.0, device=accelerator.device)
        expected = "must be back on the device"
        expect(parameter.device == accelerator.device, where, expected, str(parameter.device))
        expect_close(parameter, torch.full((5,), 3.0), where, "must have the value set last")


class TestFlatBuffers(FlatBufferContract):
    pass


def common_body(context: Context) -> None:
    accelerator, where = checked(context.accelerator), "FlatBufferStrategy.share"
    numel = 12 * context.size
    parameter, slot = nn.Parameter(torch.arange(float(numel))), Slot(0, (numel,), (1,), numel)
    private = accelerator.flat_buffers.flatten([parameter], [slot], numel, torch.float32)
    common = accelerator.flat_buffers.share(private, context.group)
    answers = torch.tensor([0 if common is None else 1])
    accelerator.collectives.all_reduce(answers, context.group)
    told = f"{answers.item()} of {context.size} ranks got a buffer"
    expect(answers.item() in (0, context.size), where, "every rank must get the same answer", told)
    expect_close(parameter, torch.arange(float(numel)), where, "values must survive")
    if common is None:
        return
    expect(common.common, where, "the buffer must say that it is common")
    expect(not private.materialized, where, "the private bytes must be given back")
    _expect_view(parameter, common, slot, where)
    accelerator.collectives.barrier(context.group)  # no rank writes while others read
    common.data[12 * context.rank :][:12] = float(context.rank)
    accelerator.streams.synchronize()
    accelerator.collectives.barrier(context.group)
    want = torch.arange(float(context.size)).repeat_interleave(12)
    expect_close(parameter, want, where, "each rank must see what the others write to their slices")
    common.release()
    expect(common.materialized, "FlatBuffer.release", "must change nothing on a common buffer")
    accelerator.collectives.barrier(context.group)  # nor leaves


def _on_device(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Move a model and keep its ties, which `Module.to` loses on a device that torch treats as foreign."""
    for parameter in model.parameters():
        rebind(parameter, parameter.detach().to(accelerator.device))
    return model


def _forward(model: nn.Module, inputs: Tensor, accelerator: Accelerator) -> Tensor:
    placed = inputs.to(accelerator.device)
    if placed.is_floating_point():
        placed.requires_grad_()  # a reentrant checkpoint needs it
    return model(placed).square().sum()  # type: ignore[no-any-return]


def _expect_view(parameter: nn.Parameter, buffer: FlatBuffer, slot: Slot, where: str) -> None:
    if parameter.numel():
        start = buffer.data.data_ptr() + slot.offset * buffer.data.element_size()
        at_slot = parameter.data_ptr() == start
        expect(at_slot, where, f"{slot} must be a view of the buffer at its offset", "other memory")


def _expect_storage(buffer: FlatBuffer, where: str) -> None:
    nbytes = buffer.data.untyped_storage().nbytes()
    whole = buffer.materialized and nbytes >= buffer.nbytes
    expect(whole, where, f"must bring {buffer.nbytes} bytes back", f"{nbytes} bytes")


def _awkward_tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 5),
        torch.randn(7, 4).t(),  # dense, but not contiguous
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5, 6)[:, ::2],  # not dense
        torch.randn(1, 4).expand(3, 4),  # several elements in one place
        torch.randn(()),
        torch.empty(0),
        torch.empty(0, 3),
        torch.randn(1),
        torch.randn(4, 1, 3).transpose(0, 2),
    ]
