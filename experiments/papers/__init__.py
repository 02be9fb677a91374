"""The papers: solvers of their limits, and their figures redrawn."""
