"""What a training run does, told to observers: `engine.observe(Console(), JsonLines("metrics.jsonl"))`.

Modules, lowest first:

observer        what is told, and the class to subclass
observation     what the parts of an engine report to
writers         observers over well-kept libraries
"""

from zero.observe.observer import Event, Observer, Run, Step
from zero.observe.writers.console import Console
from zero.observe.writers.json_lines import JsonLines

__all__ = ["Console", "Event", "JsonLines", "Observer", "Run", "Step"]
