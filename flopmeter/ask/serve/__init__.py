"""Serving a language model: decoder.py has its steps, steps.py their prices, formats.py weights and caches in fewer
bits, slo.py the latencies to keep to, queue.py the arithmetic of many requests, serving.py the answer, picture.py its
picture."""

from flopmeter.ask.serve.cache import ServingError
from flopmeter.ask.serve.rows import Serving, ServingRow
from flopmeter.ask.serve.serving import serving

__all__ = ["Serving", "ServingError", "ServingRow", "serving"]
