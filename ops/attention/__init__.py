"""Attention on payloads: what is asked (:class:`Call`), and the backends that can do it."""

from .call import UNLIMITED, Call
from .door import AUTO, TABLE, Backend, attend, attention_backend, markdown
from .weights import attention_weights, packed_weights

__all__ = [
    "AUTO",
    "TABLE",
    "UNLIMITED",
    "Backend",
    "Call",
    "attend",
    "attention_backend",
    "attention_weights",
    "markdown",
    "packed_weights",
]
