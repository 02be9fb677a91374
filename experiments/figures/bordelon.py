"""Bordelon, Noci, Li, Hanin and Pehlevan, Depthwise transfer in residual networks."""

from .registry import Figure

FIGURES: list[Figure] = []
