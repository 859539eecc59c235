"""The benchmark of QLoRA trains what it says it does."""

from __future__ import annotations

import bitsandbytes
import pytest
from benchmarks.qlora_rank import BF16, SHARDED, WAYS, QloraRank


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_adapters_of_the_same_base(way: str) -> None:
    rank = QloraRank(way, "tiny", batch=1, length=16, timeout=30)
    rank.build()
    packed = [m for m in rank._model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(packed) == (0 if way == BF16 else 14)
    assert all(layer.weight.quant_state is not None for layer in packed)
    turn = rank.run(5, 3)
    assert len(turn.seconds) == 3
    assert turn.losses[4] < turn.losses[0], "the first batch comes again"
    if way == SHARDED:
        assert rank._engine.steps == 8
