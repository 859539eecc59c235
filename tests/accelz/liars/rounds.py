"""The rounds: which lies are told together, and what the kit must say of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .accelerators import (
    BindingKeeps,
    CountIsAFloat,
    FirstRankOnly,
    FlushRaises,
    NotARole,
    NotMadeCurrent,
    OneDeviceForAll,
    OneStackOfRanges,
    RangesAreAscii,
    RangesSwallow,
    ResizeRefused,
)
from .collectives import (
    AnotherHalf,
    AverageForSum,
    BarrierOpen,
    BroadcastRaises,
    BuffersKept,
    CodesRefused,
    GroupsAreLists,
    HalvesStay,
    HostSums,
    InputDestroyed,
    KeepsALittle,
    MaximumFromZero,
    MisfitTaken,
    NarrowWire,
    NoHandle,
    NotAsync,
    OnTheFirstStream,
    ReductionsNotAsync,
    SendersBackwards,
    SourceIgnored,
    TwoInTurn,
    WaitRaises,
    WaitsWhereItBegan,
    WholeJobOnly,
    WrongSlice,
)
from .flat_buffers import (
    BindsWhenNotAsked,
    CommonAlone,
    CopiesInsteadOfViews,
    FlattenGivesATuple,
    FurtherBuffersKept,
    GapsDirty,
    MaterializeForgets,
    MaterializeRaises,
    ModelsKept,
    ReleasedBytesKept,
    ReleasedBytesStashed,
    ReleaseKeepsBytes,
    StridesLost,
)
from .kernels import (
    BetaForgotten,
    HalfWeightsForgotten,
    KernelRaises,
    KernelsOnTheFirstStream,
    NonfiniteMissed,
    NormIsATuple,
    OverflowMissed,
    RateForgotten,
    RatesForgotten,
    RemaindersForgotten,
    Saturating,
    ScratchKept,
    ShortTable,
    SixteenBitScale,
    SkipIgnored,
    SmallGrid,
    StepCounted,
    TailOverrun,
    WeightsForgotten,
)
from .memory import (
    FreeIsCapacity,
    FreeOfFour,
    HostMemoryIsAList,
    HostMemoryKept,
    HostMemoryRaises,
    NothingCounted,
    PeakIsSampled,
    PeakNeverReset,
    PinnedInNameOnly,
    RunsOutOtherwise,
    StatsAreADict,
    StatsKeepALittle,
    StatsRaise,
)
from .operators import OperatorsLie
from .rng import (
    FirstGenerator,
    SeedIgnored,
    SeedOfEightBits,
    SeedRaises,
    StateIgnored,
    StateOfAnotherType,
    StateOnTheDevice,
    StatesKept,
)
from .streams import (
    CaptureRuns,
    CurrentIsNone,
    CurrentIsTheFirst,
    DoneTooEarly,
    EnteringRaises,
    ErrorsAreKept,
    EventsNeverDone,
    EventsNoticedLate,
    HostClocks,
    KeepAliveOverwrites,
    KeptAliveForever,
    Milliseconds,
    NeverPutBack,
    NewRaises,
    RecordingElsewhere,
    ReplayedOnTheFirstStream,
    ReplaysKeepALittle,
    SynchronizedTooEarly,
    WaitBlocks,
    WaitsForNothing,
)


@dataclass(frozen=True)
class Lie:
    """One broken promise. method: whom the kit must blame. test: in which of its tests.

    test has the case's dtype and ranks where one is enough: ranks that fail are started anew for the next.

    role: the attribute of the accelerator that `mixin` spoils, "" for the accelerator itself. flags: what is
    declared wrongly. said: what the kit must say beside the method, such as the case.
    """

    method: str
    test: str
    role: str = ""
    mixin: type = object
    flags: dict[str, Any] = field(default_factory=dict)
    said: str = ""


ROUNDS: dict[str, dict[str, Lie]] = {
    "one": {
        "peak is never reset": Lie("Memory.reset_peak", "peak_and_its", "memory", PeakNeverReset),
        "a seed of eight bits": Lie("Rng.seed", "every_bit_of_a_seed", "rng", SeedOfEightBits),
        "a state is not put back": Lie("Rng.set_state", "a_state_comes_back", "rng", StateIgnored),
        "streams are declared": Lie("Streams.new", "several_queues", flags={"streams": True}),
        "a peak is too low": Lie(
            "Capabilities.peak_flops", "no_faster_than_the_peak", flags={"peak_flops": 1.0}
        ),
        "ranges are declared": Lie(
            "Accelerator.profiler_range", "profiler_ranges", flags={"profiler_ranges": True}
        ),
        "links go backwards": Lie(
            "Accelerator.capabilities", "capabilities_are_declared", flags={"link_bandwidth": -1.0}
        ),
        "skip is ignored": Lie("Kernels.step", "test_step[sgd", "kernels", SkipIgnored),
        "a tail is overrun": Lie("Kernels.accumulate", "test_accumulate", "kernels", TailOverrun),
        "nonfinite is missed": Lie(
            "Kernels.norm_and_nonfinite", "nonfinite_is_seen", "kernels", NonfiniteMissed
        ),
        "a scale in 16 bits": Lie("Kernels.scale_cast", "test_scale_cast", "kernels", SixteenBitScale),
        "release keeps the bytes": Lie(
            "FlatBuffer.release", "drops_the_bytes", "flat_buffers", ReleaseKeepsBytes
        ),
        "common to nobody": Lie("FlatBufferStrategy.share", "buffers_in_common", "flat_buffers", CommonAlone),
        "reduce_scatter is wrong": Lie(
            "Collectives.reduce_scatter", "test_reduce_scatter", "collectives", WrongSlice
        ),
        "senders in another order": Lie(
            "Collectives.all_to_all", "test_all_to_all[float32-2", "collectives", SendersBackwards
        ),
        "a sum is an average": Lie(
            "Collectives.all_reduce", "test_all_reduce[float32-2", "collectives", AverageForSum
        ),
        "a wire of 16 bits": Lie(
            "Collectives.all_gather", "test_all_gather[float32-2", "collectives", NarrowWire
        ),
        "a source is ignored": Lie(
            "Collectives.broadcast", "test_broadcast_from_each_rank[2", "collectives", SourceIgnored
        ),
    },
    "two": {
        "stats are a dict": Lie("Memory.stats", "counters_make_sense", "memory", StatsAreADict),
        "host memory raises": Lie("Memory.empty_host", "host_memory_round", "memory", HostMemoryRaises),
        "every seed is 7": Lie("Rng.seed", "a_seed_repeats", "rng", SeedIgnored),
        "ranges swallow errors": Lie(
            "Accelerator.profiler_range", "profiler_ranges_nest", "", RangesSwallow, {"profiler_ranges": True}
        ),
        "events are never done": Lie("Event.done", "the_interface_holds", "streams", EventsNeverDone),
        "keep_alive overwrites": Lie(
            "Streams.keep_alive", "keep_alive_is_harmless", "streams", KeepAliveOverwrites
        ),
        "a stream cannot be entered": Lie("Streams.use", "work_inside_use", "streams", EnteringRaises),
        "a step is counted": Lie("Kernels.step", "scalars_are_only_read", "kernels", StepCounted),
        "an overflow is missed": Lie(
            "Kernels.norm_and_nonfinite", "squares_that_overflow", "kernels", OverflowMissed
        ),
        "weights are forgotten": Lie("Kernels.step", "test_step[lion", "kernels", WeightsForgotten),
        "bytes never come back": Lie(
            "FlatBuffer.materialize", "repeated_calls", "flat_buffers", MaterializeForgets
        ),
        "strides are lost": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", StridesLost
        ),
        "async is not async": Lie("Collectives.all_gather", "return_at_once", "collectives", NotAsync),
        "a barrier is open": Lie(
            "Collectives.barrier", "barrier_waits_for_the_last[2", "collectives", BarrierOpen
        ),
        "host tensors are summed": Lie(
            "Collectives.all_reduce", "test_host_tensors[2", "collectives", HostSums
        ),
        "some ranks reduce nothing": Lie(
            "Collectives.all_reduce", "groups_of_some_ranks[2", "collectives", WholeJobOnly
        ),
        "a misfit is taken": Lie("Collectives.reduce_scatter", "do_not_fit[2", "collectives", MisfitTaken),
        "two buffers in turn": Lie(
            "Collectives.empty",
            "still_read_are_not_given_out[2",
            "collectives",
            TwoInTurn,
            flags={"communication_buffers": True},
            said="must not give out memory",
        ),
        "a buffer of another dtype": Lie(
            "Collectives.empty", "test_communication_buffers[float16-2", "collectives", AnotherHalf
        ),
        "async work is declared": Lie("Event.done", "operations_return", flags={"asynchronous": True}),
    },
    "three": {
        "ranges are ASCII": Lie(
            "Accelerator.profiler_range",
            "profiler_ranges_nest",
            "",
            RangesAreAscii,
            {"profiler_ranges": True},
        ),
        "nothing is counted": Lie("Memory.stats", "allocated_follows", "memory", NothingCounted),
        "exact memory is declared": Lie("Memory.stats", "allocated_is_exact", flags={"exact_memory": True}),
        "pinned memory is declared": Lie(
            "Memory.empty_host", "memory_is_pinned", flags={"pinned_host_memory": True}
        ),
        "a lazy graph is declared": Lie("Accelerator.flush", "flush_runs", flags={"lazy_graph": True}),
        "a state is a list": Lie("Rng.get_state", "a_state_is_a_snapshot", "rng", StateOfAnotherType),
        "time in milliseconds": Lie("Event.seconds_since", "events_measure_time", "streams", Milliseconds),
        "a role of another type": Lie("Accelerator.kernels", "load_gives_every_role", "kernels", NotARole),
        "released bytes are stashed": Lie(
            "FlatBuffer.release", "drops_the_bytes", "flat_buffers", ReleasedBytesStashed
        ),
        "gaps are dirty": Lie("FlatBufferStrategy.flatten", "empty_parameters", "flat_buffers", GapsDirty),
        "copies instead of views": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", CopiesInsteadOfViews
        ),
        "empty_like binds": Lie(
            "FlatBufferStrategy.empty_like", "second_buffer", "flat_buffers", BindsWhenNotAsked
        ),
        "an input is destroyed": Lie(
            "Collectives.reduce_scatter", "test_reduce_scatter[bfloat16-2", "collectives", InputDestroyed
        ),
        "no handle": Lie("Collectives.all_gather", "test_all_gather[float16-2", "collectives", NoHandle),
        "no fp32": Lie(
            "Accelerator.capabilities",
            "capabilities_are_declared",
            flags={"dtypes": frozenset({torch.bfloat16, torch.float16})},
        ),
    },
    "four": {
        "stats raise": Lie("Memory.stats", "counters_make_sense", "memory", StatsRaise),
        "a new stream raises": Lie("Streams.new", "the_interface_holds", "streams", NewRaises),
        "a seed raises": Lie("Rng.seed", "a_seed_repeats", "rng", SeedRaises),
        "a kernel raises": Lie("Kernels.scale_cast", "test_scale_cast", "kernels", KernelRaises),
        "a table is short": Lie("Kernels.norm_and_nonfinite", "over_many_tensors", "kernels", ShortTable),
        "nothing overflows": Lie("Kernels.accumulate", "accumulate_overflows", "kernels", Saturating),
        "codes do not travel": Lie(
            "Collectives.all_gather", "test_all_gather[uint8-1", "collectives", CodesRefused
        ),
        "materialize raises": Lie(
            "FlatBuffer.materialize", "repeated_calls", "flat_buffers", MaterializeRaises
        ),
        "a broadcast raises": Lie(
            "Collectives.broadcast", "test_broadcast_from_each_rank[1", "collectives", BroadcastRaises
        ),
        "a wait raises": Lie("Handle.wait", "any_order[first", "collectives", WaitRaises),
        "one stack of ranges": Lie(
            "Accelerator.profiler_range",
            "profiler_ranges_of",
            "",
            OneStackOfRanges,
            {"profiler_ranges": True},
        ),
        "ranks cannot share": Lie("Accelerator.bind", "ranks_share_a_device", "", FirstRankOnly),
        "float8 is declared": Lie(
            "Capabilities.dtypes",
            "test_further_dtypes",
            flags={"dtypes": frozenset({torch.float32, torch.float8_e4m3fn})},
        ),
    },
    "five": {
        "host memory is a list": Lie("Memory.empty_host", "host_memory_round", "memory", HostMemoryIsAList),
        "no current stream": Lie("Streams.current", "the_interface_holds", "streams", CurrentIsNone),
        "a norm is a tuple": Lie("Kernels.norm_and_nonfinite", "test_norm", "kernels", NormIsATuple),
        "a buffer is a tuple": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", FlattenGivesATuple
        ),
        "half weights are forgotten": Lie(
            "Kernels.step", "test_step[momentum", "kernels", HalfWeightsForgotten
        ),
        "a learning rate is forgotten": Lie("Kernels.step", "test_step[lion", "kernels", RateForgotten),
        "remainders are forgotten": Lie("Kernels.step", "test_step[sgd", "kernels", RemaindersForgotten),
        "a grid is small": Lie("Kernels.dequantise", "no_element_is_too_far", "kernels", SmallGrid),
        "a cast saturates": Lie("Kernels.scale_cast", "scale_cast_overflows", "kernels", Saturating),
        "a beta is forgotten": Lie("Kernels.step", "test_step[adamw", "kernels", BetaForgotten),
        "a maximum begins at zero": Lie(
            "Collectives.all_reduce", "test_all_reduce[float32-2", "collectives", MaximumFromZero
        ),
        "a reduction waits": Lie(
            "Collectives.reduce_scatter", "return_at_once", "collectives", ReductionsNotAsync
        ),
        "halves are not spread": Lie(
            "Collectives.broadcast", "test_broadcast_from_each_rank[2", "collectives", HalvesStay
        ),
        "groups are lists": Lie(
            "Collectives.new_group", "groups_of_some_ranks[2", "collectives", GroupsAreLists
        ),
        "flush raises": Lie("Accelerator.flush", "synchronize_waits", "", FlushRaises),
        "a count is a float": Lie("Accelerator.device_count", "bind_gives_a_usable", "", CountIsAFloat),
        "storage resize is declared": Lie(
            "Capabilities.storage_resize", "a_storage_can_be_resized", "", ResizeRefused
        ),
    },
    "leaks": {
        "host memory is kept": Lie("Memory.empty_host", "host_memory_comes_back", "memory", HostMemoryKept),
        "kept alive forever": Lie("Streams.keep_alive", "what_was_kept_alive", "streams", KeptAliveForever),
        "states are kept": Lie("Rng.get_state", "states_of_generators", "rng", StatesKept),
        "released bytes are kept": Lie(
            "FlatBuffer.release", "a_buffer_that_comes_and_goes", "flat_buffers", ReleasedBytesKept
        ),
        "further buffers are kept": Lie(
            "FlatBufferStrategy.empty_like", "forgotten_buffers", "flat_buffers", FurtherBuffersKept
        ),
        "models are kept": Lie("FlatBufferStrategy.flatten", "forgotten_models", "flat_buffers", ModelsKept),
        "scratch is kept": Lie("Kernels.step", "scratch_memory", "kernels", ScratchKept),
        "gathered buffers are kept": Lie(
            "Collectives.all_gather", "buffers_of_collectives", "collectives", BuffersKept
        ),
        "binding keeps memory": Lie("Accelerator.bind", "binding_again", "", BindingKeeps),
    },
}

FUNCTIONAL = "torch.nn.functional"
ATTENTION = f"{FUNCTIONAL}.scaled_dot_product_attention"


def _operator(name: str, said: str, test: str = "TrainingOperators") -> Lie:
    return Lie(name, test, "", OperatorsLie, said=said)


ROUNDS["operators"] = {
    "attention looks ahead": _operator(ATTENTION, "its result must be right (causal, float32)"),
    "attention is not masked": _operator(ATTENTION, "its result must be right (masked, bfloat16)"),
    "heads are grouped otherwise": _operator(ATTENTION, "its result must be right (grouped, float32)"),
    "a mask of its own": _operator(f"{FUNCTIONAL}.dropout", "must draw anew in every call"),
    "a mean is removed": _operator(f"{FUNCTIONAL}.rms_norm", "its result must be right"),
    "half a gradient of embeddings": _operator(f"{FUNCTIONAL}.embedding", "the gradient of input 1 must be"),
    "indices do not add up": _operator("torch.index_put", "its result must be right (accumulated"),
    "half a gradient of index_put": _operator("torch.index_put", "the gradient of input 2 must be right (fl"),
    "half a gradient of scatter_add": _operator("torch.scatter_add", "the gradient of input 2 must be"),
    "ignored targets count": _operator(f"{FUNCTIONAL}.cross_entropy", "(ignored targets"),
    "one percent more": _operator(f"{FUNCTIONAL}.gelu", "its result must be right (tanh, float32)"),
    "strides are ignored": _operator(f"{FUNCTIONAL}.silu", "its result", "operator_on_strided"),
    "groups are halved": _operator(f"{FUNCTIONAL}.conv2d", "(strided, in groups"),
    "an operator is missing": _operator("torch.aten::cumsum", "register a kernel"),
    "casts of weights are stale": _operator("torch.autocast", "weights that were written", "new_weights"),
    "convolutions are not cast": _operator("torch.autocast", "conv1d must give bfloat16", "every_product"),
    "foreach forgets the last": _operator(
        "torch.optim.AdamW", "parameter 3 must be that of the host (foreach"
    ),
    "a norm is too large": _operator("torch.nn.utils.clip_grad_norm_", "norms must be", "clipping"),
    "recomputation drops others": _operator("torch.utils.checkpoint", "recomputed dropout", "recomputes"),
    "six bits of sixteen": _operator("torch.Tensor.copy_", "torch.int16", "test_copies"),
    "a cast cuts off": _operator("torch.Tensor.to", "torch.float32 to torch.bfloat16", "conversions"),
    "views are copies": _operator("torch.Tensor.view", "writes through views", "share_their_memory"),
    "one scale for all columns": _operator("torch._scaled_mm", "must be right (rowwise", "ScaledProducts"),
    "a bias is left out": _operator("torch._scaled_mm", "with a bias)", "ScaledProducts"),
    "gradients are read as weights": _operator(
        "torch._scaled_mm", "must be right (tensorwise, torch.float8_e5m2", "ScaledProducts"
    ),
    "products saturate": _operator("torch._scaled_mm", "must be infinite (rowwise)", "ScaledProducts"),
    "events are noticed late": Lie(
        "Event.done", "operations_return", "streams", EventsNoticedLate, flags={"asynchronous": True}
    ),
}
"""A device whose torch is wrong, and whose events say late that all work is done in its turn."""

SIM_ROUNDS: dict[str, dict[str, Lie]] = {
    "sim": {
        "inductor is declared": Lie(
            "Capabilities.compile",
            "is_compiled[inductor",
            flags={"compile": "inductor"},
            said="do:   register",
        ),
        "host data is declared": Lie(
            "Capabilities.host_data_assignment",
            "takes_host_data",
            flags={"host_data_assignment": True},
        ),
        "a state is on the device": Lie("Rng.get_state", "a_state_comes_back", "rng", StateOnTheDevice),
        "a stream records elsewhere": Lie("Stream.record", "not_in_use", "streams", RecordingElsewhere),
        "links are too slow": Lie(
            "Capabilities.link_bandwidth", "no_faster_than_the_links", flags={"link_bandwidth": 1.0}
        ),
        "time of the host": Lie("Event.seconds_since", "events_measure_time", "streams", HostClocks),
        "a kernel has a stream of its own": Lie(
            "Kernels.accumulate", "queued_on_the_current", "kernels", KernelsOnTheFirstStream
        ),
        "all memory is free": Lie("Memory.stats", "free_falls", "memory", FreeIsCapacity),
        "one device for all": Lie("Accelerator.bind", "bind_gives_a_usable", "", OneDeviceForAll),
        "buffers are declared": Lie(
            "Collectives.empty", "still_read_are_not_given_out", flags={"communication_buffers": True}
        ),
    },
    "sim, one device": {
        "one device is declared": Lie(
            "Accelerator.bind", "a_process_keeps_its", flags={"one_device_per_process": True}
        ),
        "a peak is sampled": Lie("Memory.stats", "peak_and_its", "memory", PeakIsSampled),
        "free of four devices": Lie("Memory.stats", "what_is_free", "memory", FreeOfFour),
        "events are done at once": Lie("Event.done", "not_done_before_its_work", "streams", DoneTooEarly),
    },
    "sim, events": {
        "the first generator": Lie("Rng.seed", "generator_is_that", "rng", FirstGenerator),
        "events are not waited for": Lie(
            "Event.synchronize", "an_event_is_waited_for", "streams", SynchronizedTooEarly
        ),
        "a stream is not put back": Lie("Streams.use", "puts_the_stream_back", "streams", NeverPutBack),
    },
    "sim, captures": {
        "work is done as it is captured": Lie("Streams.capture", "what_was_captured", "streams", CaptureRuns),
        "replays keep a little": Lie("Graph.replay", "replays_take_no", "streams", ReplaysKeepALittle),
    },
    "sim, replays": {
        "an error inside is kept": Lie("Streams.capture", "an_error_ends_the", "streams", ErrorsAreKept),
        "a replay is elsewhere": Lie(
            "Graph.replay", "in_the_order_of_its_stream", "streams", ReplayedOnTheFirstStream
        ),
        "rates are forgotten": Lie("Kernels.step", "a_step_is_captured", "kernels", RatesForgotten),
    },
    "sim, no order": {
        "a stream does not order": Lie("Stream.wait", "orders_two_streams", "streams", WaitsForNothing),
    },
    "sim, order": {
        "current is the first": Lie("Streams.current", "current_is_the_stream", "streams", CurrentIsTheFirst),
        "a wait blocks the host": Lie("Stream.wait", "wait_does_not_block", "streams", WaitBlocks),
        "pinned in name only": Lie("Memory.empty_host", "copies_of_page_locked", "memory", PinnedInNameOnly),
        "stats keep a little": Lie("Memory.stats", "reading_counters", "memory", StatsKeepALittle),
        "running out has another name": Lie("Memory", "running_out", "", RunsOutOtherwise),
        "a device is not made current": Lie(
            "Accelerator.bind", "makes_the_device_current", "", NotMadeCurrent
        ),
        "an input is read too early": Lie(
            "Collectives.all_gather", "work_before_it", "collectives", OnTheFirstStream
        ),
        "a wait is elsewhere": Lie("Handle.wait", "work_before_it", "collectives", WaitsWhereItBegan),
        "a collective keeps a little": Lie(
            "Collectives.all_gather", "buffers_of_collectives", "collectives", KeepsALittle
        ),
    },
}
