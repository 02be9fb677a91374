"""Scales: the roles and growth ratios of all parameters of a model."""
