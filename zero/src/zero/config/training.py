"""The engine's configuration: one validated, frozen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_serializer, field_validator, model_validator
from torch import nn

from zero.config.compilation import Compile
from zero.config.offload import MeasuredOffload, Offload
from zero.config.validated import Converted, Validated, held

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
ParameterRule = tuple[str, ...] | Callable[[str, nn.Parameter], bool]
Moments = Literal["fp32", "bf16", "bf16_stochastic", "8bit"]
Masters = Literal["fp32", "split"]
UnitRule = Literal["auto"] | tuple[type[nn.Module] | str, ...] | Callable[[str, nn.Module], bool]


class Config(Validated):
    """How a model is trained. Wrong values and unknown keys raise `ConfigError`.

    stage: 0 replicates everything (data parallel), 1 shards the optimizer state, 2 also the gradients,
        3 also the parameters (Rajbhandari et al., ZeRO, 2020).
    precision: dtype of the floating-point parameters. "bf16" and "fp16" keep fp32 master weights in the
        optimizer; "model" leaves every parameter the dtype it has.
    shard_ranks: how many consecutive ranks share a copy of the model, such as those of a machine if the
        network between machines is slow (hybrid sharding; MiCS, Zhang et al., 2022). Each further set of so
        many ranks has its own copy, and only reduced slices of gradients travel between copies. None, or the
        number of ranks: all ranks share one copy. It must divide the number of ranks.
    local_modules: modules whose parameters differ by rank, such as experts: names as in `named_modules()`, in
        which * stands for any part, and the dimension of the mesh along which they differ. They are reduced
        and sharded over the other dimensions of the data only. {"*": "pp"} says that ranks along "pp" have
        models of their own, as the stages of a pipeline are.
    gradient_accumulation_steps: None: as in PyTorch, gradients add up over every `loss.backward()` until
        `optimizer.zero_grad()`, are divided by the number of ranks only, and `optimizer.step()` is an
        optimizer step whenever it is called. A number: the engine counts micro-batches, calls of
        `engine.backward(loss)`, and `engine.step()` is an optimizer step after so many, with the gradient of
        their mean. Sums are kept in fp32.
    accumulate: "sharded" reduces every micro-batch and keeps only this rank's slice; "local" keeps whole
        gradients and communicates once per optimizer step, or, where the engine does not count, in every
        backward outside of `no_sync`. Stage 1 is always local.
    reduce_dtype: dtype in which gradients travel; None sends them in the dtype in which they were computed or
        accumulated.
    gather_dtype: 8-bit dtype in which matrices travel for computation (stage 3), rounded in blocks of 128
        with one scale per block (ZeRO++, Wang et al., 2023); masters, vectors and `zero.gathered` stay
        exact. None sends values as they are.
    exact_parameters: parameters that keep their dtype whatever `precision` says, and whose bits neither
        `gather_dtype` nor autocast changes on their way: names as in `named_parameters()`, in which * stands
        for any part, or a function (name, parameter) -> bool. Always among them are frozen parameters in 8
        bits and fewer, and frozen ones with "quant" or "packed" in the name of their class or attributes.
    autocast_modules: module classes of your own (or their names) whose matrices torch.autocast casts before
        each use, as it does for Linear layers and convolutions; these matrices are cast before they travel
        (stage 3).
    clip_norm: largest global L2 norm of the gradient; None does not clip.
    loss_scale: factor by which the loss is multiplied so that small gradients do not vanish in fp16:
        "dynamic", or a fixed number. None means "dynamic" with precision="fp16" and otherwise no scale; set
        it for fp16 autocast.
    loss_scale_window: steps without overflow after which a dynamic scale doubles.
    whole_parameters: whether the optimizer steps each parameter whole, on one rank, even if ranks have slices
        of it. None does so for every optimizer that is not known to work element by element: Muon, Adafactor,
        and optimizers that are not torch's. Set False for an optimizer of your own that works element by
        element, which saves the exchange. Parameters that a kernel steps are always stepped in slices.
    moments: how kernels keep their state beside the masters: the averages of Adam, AdamW and Lion, SGD's
        momentum. "bf16" takes half of fp32's memory, and rounds to the nearest: an average that a step
        changes by less than 1/512 then stands still, as a second moment does that falls with beta2=0.999.
        "bf16_stochastic" rounds up or down at random, so that averages keep their mean; the random numbers
        are made of the values and the step, and are the same at any number of ranks. "8bit" takes a quarter
        of fp32's memory: 256 values of a parameter share a scale. Other optimizers keep their own state.
    masters: how kernels keep masters of bf16 weights. "split" keeps 16 bits beside the weight, which is the
        master's other half: 2 bytes instead of 4, in every tier. They are fp32 values as before, but for
        ties, one in 131,072 of random bits, which become one unit in the last place nearer to zero. Pieces in
        `optimizer.param_groups` then have no values. Other masters, and those that other optimizers step,
        stay fp32.
    units: what is gathered together: "auto" finds repeated blocks; or give module classes (or their names),
        or a function (name, module) -> bool that picks the modules.
    persistent_below: parameters with fewer elements than this stay gathered all the time (stage 3).
    prefetch: units gathered ahead of their use (stage 3); 0 gathers on demand only.
    cast_inputs: cast floating-point arguments of the model to a 16-bit `precision`.
    cast_buffers: cast floating-point buffers too, as `module.bfloat16()` would.
    offload: state that does not stay on the device; see `Offload`. "auto" measures two steps with the
        optimizer state on the host, then keeps as much of it on the device as there is room for.
    compile: run forward and backward through torch.compile: True, or settings as `Compile(...)`.
    capture_step: on devices that capture graphs, record what kernels do in an optimizer step, once nothing
        but its values and learning rates changes from step to step, and replay that: with the same bits and
        less work of the host.
    timeout: seconds after which an incomplete collective is an error. Waits of a minute are logged.
    outlive_launcher: train on when torchrun's process, or the one that has the job's store, has ended. By
        default every rank then ends with an error, in a step within a minute.
    """

    stage: Literal[0, 1, 2, 3] = 3
    precision: Literal["model", "fp32", "bf16", "fp16"] = "model"
    shard_ranks: int | None = Field(default=None, ge=2)
    local_modules: Converted[tuple[tuple[str, str], ...], Mapping[str, str]] = held(())
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    accumulate: Literal["sharded", "local"] = "sharded"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    gather_dtype: Literal["int8", "fp8"] | None = None
    autocast_modules: tuple[type[nn.Module] | str, ...] = ()
    exact_parameters: ParameterRule = ()
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    loss_scale_window: int = Field(default=2000, ge=1)
    whole_parameters: bool | None = None
    moments: Moments = "fp32"
    masters: Masters = "fp32"
    units: UnitRule = "auto"
    persistent_below: int = Field(default=0, ge=0)
    prefetch: int = Field(default=1, ge=0)
    cast_inputs: bool = True
    cast_buffers: bool = False
    offload: Converted[Offload, Offload | Literal["auto"] | None] = held(Offload())
    compile: Converted[Compile | None, Compile | bool | None] = held(None)
    capture_step: bool = False
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    outlive_launcher: bool = False

    @field_validator("stage", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):  # which equals 0 or 1
            raise ValueError("must be 0, 1, 2 or 3")
        return value

    @field_validator("local_modules", mode="before")
    @classmethod
    def _as_pairs(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return tuple(value.items())
        return tuple(map(tuple, value)) if isinstance(value, list) else value  # as JSON has it

    @field_validator("units", "autocast_modules", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if isinstance(value, type) or (isinstance(value, str) and value != "auto"):
            return (value,)
        given = tuple(value) if isinstance(value, (list, set, frozenset)) else value
        for module in given if isinstance(given, tuple) else ():
            if isinstance(module, nn.Module):
                raise ValueError(f"write the class, {type(module).__name__}, or its name instead of a module")
        return given

    @field_validator("exact_parameters", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("offload", mode="before")
    @classmethod
    def _as_offload(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "auto":
            raise ValueError("must be 'auto', or say what leaves the device: zero.Offload(optimizer='host')")
        return MeasuredOffload() if value == "auto" else Offload() if value is None else value

    @field_serializer("offload")
    def _as_given(self, offload: Offload) -> Any:
        return "auto" if offload.measured else offload if offload.model_fields_set else None

    @field_validator("compile", mode="before")
    @classmethod
    def _as_settings(cls, value: Any) -> Any:
        return (Compile() if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _fp16_is_scaled(self) -> Config:
        if self.precision == "fp16" and self.loss_scale is None:
            self.__dict__["loss_scale"] = "dynamic"  # which is not given, so a copy need not have it
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        for name in ("gather_dtype", "autocast_modules"):
            if getattr(self, name) and self.stage < 3:
                raise ValueError(
                    f"{name}: below stage 3 no weights are gathered for the computation; set stage=3"
                )
        if self.shard_ranks is not None and self.stage == 0:
            raise ValueError("shard_ranks: at stage 0 every rank has the whole model; set stage=1, 2 or 3")
        if self.cast_buffers and self.precision == "model":
            raise ValueError("cast_buffers: precision='model' leaves every dtype as it is; set a precision")
        if self.offload.params != "device" and self.stage < 3:
            raise ValueError("offload: below stage 3 the parameters stay whole on the device; set stage=3")
        placed = (self.offload.optimizer, self.offload.params, self.offload.gradients or "device")
        if self.capture_step and set(placed) != {"device"}:
            raise ValueError(
                "capture_step: steps are captured only where the optimizer's state, the parameters and their "
                "gradients stay on the device; leave out capture_step or their offload"
            )
        if self.offload.activations != "device" and self.compile is None:
            raise ValueError("offload: activations are offloaded only in compiled graphs; set compile=True")
        if self.offload.activations != "device" and self.compile is not None and self.compile.graphs:
            raise ValueError(
                "compile: captured graphs keep the activations' memory on the device; leave out graphs or "
                "offload.activations"
            )
        if self.masters == "split" and self.precision not in ("bf16", "model"):
            raise ValueError("masters: 'split' is for masters of bf16 parameters; set precision='bf16'")
        return self


def dtype_named(word: str | None) -> torch.dtype | None:
    """The dtype that a setting names; None for "model" and where nothing is set."""
    return None if word is None else DTYPES.get(word)
