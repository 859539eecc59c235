"""A device whose storages cannot be resized: buffers keep their bytes, and training is the same."""

from __future__ import annotations

from dataclasses import replace

import zero
from accelz import CopyAndKeep
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import Training
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw, collected, same_bits, train_zero

CONFIGS = (zero.Config(timeout=20), zero.Config(timeout=20, precision="bf16", clip_norm=1.0))


def kept_body(context: Context) -> None:
    accelerator = context.accelerator
    usual = accelerator.flat_buffers, accelerator.capabilities
    for config in CONFIGS:
        with collected():
            expected = train_zero(context, fresh(), language_loss, config, steps=3)
        accelerator.flat_buffers = CopyAndKeep(accelerator.device)
        accelerator.capabilities = replace(accelerator.capabilities, storage_resize=False)
        try:
            with collected():
                got = train_zero(context, fresh(), language_loss, config, steps=3)
            with collected():
                _check_what_is_told(config)
        finally:
            accelerator.flat_buffers, accelerator.capabilities = usual
        assert same_bits(got, expected), config


def _check_what_is_told(config: zero.Config) -> None:
    model = fresh()
    engine = Training(model, adamw(model), config).engine
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert engine._tracer.held().gathered >= whole, "buffers that keep their bytes count"


def test_training_is_the_same_and_what_is_kept_is_told(cluster: Clusters) -> None:
    cluster(2).run(kept_body)
