"""Read roles, residual branches, depth and constants from a model's program (jaxpr)."""
