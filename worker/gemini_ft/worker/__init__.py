"""The library inside a rank. It imports torch and no framework; adapters are leaves that a script imports by name."""

from gemini_ft.worker.checkpointer import Checkpointer
from gemini_ft.worker.rng import RngState
from gemini_ft.worker.stateful import Stateful

__all__ = ["Checkpointer", "RngState", "Stateful"]
