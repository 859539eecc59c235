"""A program that a launcher starts: `python launched.py OUT FOLDER`. Rank 0 writes what the test compares."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.frameworks import accelerate_loops as loops
from tests.frameworks.trainer_runs import history, make_trainer

if __name__ == "__main__":
    accelerator, parts = loops.make_accelerator(3), loops.make_parts()
    loops.prepare(accelerator, parts, (loops.ALL_AT_ONCE,))
    log = loops.train(accelerator, parts, clip_norm=0.5, epochs=2)
    trainer = make_trainer(3, sys.argv[2], {})
    trainer.train()
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps({"loop": log, "trainer": history(trainer)}))
    accelerator.end_training()
