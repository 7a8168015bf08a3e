"""Remarks for who uses the extractors from Python; commands pass what they say to the user themselves."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def tell(sentence: str) -> None:
    """Log a sentence as a warning, once in a process."""
    logger.warning(sentence)
