"""The engines: one seam (`base`), vLLM in process and a simulator behind it."""
