"""Serving a language model.

language_config.py finds the model, tensor_parallel.py splits it over GPUs, decoder.py runs its steps with what a server
adds (cache.py, paged_attention.py, linear_attention.py, engine.py). steps.py prices a step, formats.py with weights and
caches in fewer bits. queue.py has the arithmetic of many requests, server.py what one device gives;
asked.py is what is asked of a server, serving.py asks each device, rows.py is the answer, picture.py its picture.
"""

from flopmeter.ask.serve.cache import ServingError
from flopmeter.ask.serve.rows import Serving, ServingRow
from flopmeter.ask.serve.serving import serving

__all__ = ["Serving", "ServingError", "ServingRow", "serving"]
