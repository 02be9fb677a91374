"""Checks: `explain`, optimizer chains, and the coordinate check."""
