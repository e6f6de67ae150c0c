"""`vera bench table`: native and adaptive on the same work in one run, and what that costs and saves.

The pieces: `settings` (what is measured), `plan` (which runs, the most valuable first), `subject` and `drift` (the runs), `run`
(the order and the time), `figures` (arithmetic), `report` (the terminal, Markdown), `plots`, `results` (docs/results.md),
`readme` (the headline in a README), and `command`, the command line.
"""

from vera.bench.table.settings import PARTS, TableBench, quick

__all__ = ["PARTS", "TableBench", "quick"]
