"""Side streams run late, which reveals what an engine forgets: a wait, or that memory is still in use."""

from __future__ import annotations

import pytest
import torch

from accelz import Accelerator

from .on_sim import on_sim


@on_sim
def test_a_missing_wait_shows(accelerator: Accelerator) -> None:
    streams, device = accelerator.streams, accelerator.device
    side = streams.new()
    source = torch.ones(100, device=device)
    with streams.use(side):
        result = source * 2
        done = side.record()
    assert result.isnan().all(), "nobody has waited: fresh memory is poison"
    streams.current().wait(done)
    assert torch.equal(result.cpu(), torch.full((100,), 2.0))


@on_sim
def test_work_waits_for_what_it_was_told_to(accelerator: Accelerator) -> None:
    streams, device = accelerator.streams, accelerator.device
    first, second = streams.new(), streams.new()
    values = torch.zeros(10, device=device)
    with streams.use(first):
        values += 1
        ready = first.record()
    second.wait(ready)
    with streams.use(second):
        values *= 10
        last = second.record()
    assert not ready.done()
    assert values.sum().item() == 0, "the host reads on the default stream, which waits for nobody"
    last.synchronize()
    assert ready.done()
    assert values.sum().item() == 100


@on_sim
def test_one_stream_alone_is_late(accelerator: Accelerator) -> None:
    from accelz_sim import faults

    streams = accelerator.streams
    late, other = streams.new(), streams.new()
    with faults.late_stream(late.native):  # type: ignore[attr-defined]
        with streams.use(late):
            values = torch.ones(10, device=accelerator.device)
            ready = late.record()
        with streams.use(other):
            too_early = values.clone()
            other.wait(ready)
            in_time = values.clone()
        assert other.record().done()
    assert too_early.isnan().all()
    assert in_time.sum().item() == 10


@on_sim
def test_what_a_blocking_read_on_the_stream_itself_needs_is_done(accelerator: Accelerator) -> None:
    streams = accelerator.streams
    with streams.use(streams.new()):
        values = torch.arange(6.0, device=accelerator.device) + 1
        assert values.sum().item() == 21
        assert torch.equal(values[values > 3].cpu(), torch.tensor([4.0, 5, 6]))
        assert torch.equal(values.cpu(), torch.arange(6.0) + 1)


@on_sim
def test_memory_freed_too_early_shows(accelerator: Accelerator) -> None:
    streams, side = accelerator.streams, accelerator.streams.new()
    for keep in (False, True):
        source = torch.ones(100, device=accelerator.device)
        with streams.use(side):
            result = source * 2
            done = side.record()
        if keep:
            streams.keep_alive(source, side)
        del source
        done.synchronize()
        assert result.isnan().all().item() is not keep
        assert (result == 2).all().item() is keep


@on_sim
def test_memory_of_the_stream_itself_may_be_freed_at_once(accelerator: Accelerator) -> None:
    streams, side = accelerator.streams, accelerator.streams.new()
    before = accelerator.memory.stats().allocated
    with streams.use(side):
        values = torch.ones(100, device=accelerator.device)
        for _ in range(5):
            values = values * 2  # frees the previous tensor, which queued work still reads
        assert accelerator.memory.stats().allocated == before + 400
        done = side.record()
    done.synchronize()
    assert (values == 32).all()


@on_sim
def test_copies_from_and_to_pinned_memory_run_late(accelerator: Accelerator) -> None:
    streams, side = accelerator.streams, accelerator.streams.new()
    host = accelerator.memory.empty_host((10,), torch.float32).fill_(1)
    back = accelerator.memory.empty_host((10,), torch.float32).fill_(0)
    with streams.use(side):
        device = torch.empty(10, device=accelerator.device)
        device.copy_(host, non_blocking=True)
        host.fill_(2)  # too early: the copy has not happened yet
        back.copy_(device, non_blocking=True)
        done = side.record()
    assert (back == 0).all()
    done.synchronize()
    assert (back == 2).all()


@on_sim
def test_pageable_memory_may_be_reused_after_the_call(accelerator: Accelerator) -> None:
    streams, side = accelerator.streams, accelerator.streams.new()
    host = torch.ones(10)
    with streams.use(side):
        device = torch.empty(10, device=accelerator.device)
        device.copy_(host, non_blocking=True)
        host.fill_(2)
        assert (device.cpu() == 1).all()


@on_sim
def test_autograd_runs_a_backward_on_the_stream_of_its_forward(accelerator: Accelerator) -> None:
    streams, side = accelerator.streams, accelerator.streams.new()
    weight = torch.full((4, 4), 2.0, device=accelerator.device, requires_grad=True)
    side.wait(streams.current().record())
    with streams.use(side):
        loss = (weight @ weight).sum()
        done = side.record()
    streams.current().wait(done)
    loss.backward()
    streams.synchronize()
    assert (weight.grad == 16).all()


@on_sim
def test_an_error_in_late_work_is_raised_by_whoever_waits(accelerator: Accelerator) -> None:
    streams, side = accelerator.streams, accelerator.streams.new()
    with streams.use(side):
        torch.nn.functional.embedding(torch.tensor([9], device="sim"), torch.ones(3, 2, device="sim"))
        done = side.record()
    with pytest.raises(IndexError):
        done.synchronize()
    streams.synchronize()
    assert done.done()


@on_sim
def test_prompt_streams_run_at_once(accelerator: Accelerator) -> None:
    from accelz_sim import faults

    streams, side = accelerator.streams, accelerator.streams.new()
    with streams.use(side):
        late = torch.ones(3, device=accelerator.device)
        with faults.prompt_streams():
            assert (late + 1 == 2).all()
            result = torch.ones(3, device=accelerator.device) * 3
    assert (result == 3).all()


@on_sim
def test_a_stream_of_no_device_in_particular_is_of_the_current_one(accelerator: Accelerator) -> None:
    with torch.get_device_module("sim").device(1):
        side = torch.Stream("sim")
        assert side.device == torch.device("sim", 1)
        with side:
            assert torch.accelerator.current_stream() == side
            assert torch.get_device_module("sim").current_stream() == side
        assert torch.accelerator.current_stream() != side
    assert torch.Stream(device="sim").device == torch.device("sim", accelerator.device.index)


@on_sim
def test_norms_of_16_bits_run_late(accelerator: Accelerator) -> None:
    """Their statistics have the dtype that the backward needs, although meta tensors have another."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        norms = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.GroupNorm(2, 4)).to(torch.bfloat16)
        values = torch.randn(3, 4, 6).to(torch.bfloat16)
        norms, values = norms.to("sim"), values.to("sim").requires_grad_()
        (norms(values) ** 2).sum().backward()
        return [values.grad, *(p.grad for p in norms.parameters())]

    expected = gradients()
    with accelerator.streams.use(accelerator.streams.new()):
        late = gradients()
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(late, expected, strict=True))


@on_sim
def test_results_of_one_operation_have_each_its_own_shape(accelerator: Accelerator) -> None:
    """The device remembers what shapes an operation's results have, for arguments of the same kind."""

    def results() -> list[torch.Tensor]:
        matrix = torch.arange(12.0).view(3, 4).to("sim")
        at = torch.tensor([2, 0]).to("sim")
        made = [matrix[at], matrix[:, at], matrix.t()[at], matrix.sum(0), matrix.sum(1), matrix.sum()]
        made += [matrix.sum(0, keepdim=True), matrix.sum(0, dtype=torch.float64), matrix.double().sum(0)]
        made += [torch.cat([matrix, matrix], dim) for dim in (0, 1)]
        made += [
            torch.nn.functional.layer_norm(x, x.shape[1:]) for x in (matrix, matrix.t(), matrix.bfloat16())
        ]
        return made

    expected = results()
    with accelerator.streams.use(accelerator.streams.new()):
        for _ in range(2):
            for late, prompt in zip(results(), expected, strict=True):
                assert (late.dtype, late.stride()) == (prompt.dtype, prompt.stride())
                assert torch.equal(late.cpu(), prompt.cpu())


@on_sim
def test_operations_that_resize_their_result_run_late(accelerator: Accelerator) -> None:
    """torch gives some of them an empty tensor to write to."""
    values = torch.full((5, 3), -2.0).to("sim")
    side = accelerator.streams.new()
    with accelerator.streams.use(side):
        late = [values.abs(), values.t().abs(), values.abs().amax(1)]
        out = torch.empty(0, device="sim")
        torch.neg(values, out=out)
        done = side.record()
    assert not done.done()
    accelerator.streams.current().wait(done)
    assert [tuple(each.shape) for each in (*late, out)] == [(5, 3), (3, 5), (5,), (5, 3)]
    assert all(bool((each == 2).all()) for each in (*late, out))


@on_sim
def test_a_graph_has_memory_of_its_own_device_alone(accelerator: Accelerator) -> None:
    values = torch.ones(100, device="sim:0")
    places = []

    def run() -> None:
        places.append(torch.empty(100, device="sim:1").data_ptr())
        doubled = values * 2
        places.append(doubled.data_ptr())
        values.copy_(doubled)

    graph = accelerator.streams.capture(run)
    assert places[0] != places[1]
    graph.replay()
    assert torch.equal(values.cpu(), torch.full((100,), 2.0))


@on_sim
def test_a_backward_is_not_captured(accelerator: Accelerator) -> None:
    """Its work is queued by another thread, and no replay would do it."""
    weight = torch.ones(100, device="sim", requires_grad=True)

    def run() -> None:
        (weight * 3).sum().backward()

    run()
    with pytest.raises(RuntimeError, match=r"another thread captures .*call no backward"):
        accelerator.streams.capture(run)
    run()
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), torch.full((100,), 6.0))
