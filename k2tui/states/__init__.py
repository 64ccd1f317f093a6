"""Hidden states on disk: layout, writer, memory-mapped reader, check, converters. Knows no engine and no trainer.

Needs the standard library and numpy; torch is imported late, by the functions that hand out bf16 tensors.
"""

from __future__ import annotations

from k2tui.states.layout import Manifest, loss_rows
from k2tui.states.reader import Sample, StatesReader
from k2tui.states.writer import StatesWriter, WriterLimits

__all__ = ["Manifest", "Sample", "StatesReader", "StatesWriter", "WriterLimits", "loss_rows"]
