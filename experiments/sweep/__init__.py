"""Many runs as one program, and what they say: grids, optima, verdicts."""
