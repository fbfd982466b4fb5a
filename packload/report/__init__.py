"""What batching policies do to a data set, in figures, a table and a picture.

:mod:`~packload.report.picture` needs matplotlib and is imported by whoever draws.
"""

from packload.report.metrics import Figures, Measure, cells, figures
from packload.report.served import Served
from packload.report.source import SourceError, read_lengths
from packload.report.tables import table

__all__ = ["Figures", "Measure", "Served", "SourceError", "cells", "figures", "read_lengths", "table"]
