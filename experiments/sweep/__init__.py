"""Sweeps: many runs as one program, and how their optima change with the model's size.

| module | contents |
|---|---|
| `api` | `mupax.sweep`, a sweep of a user's own model |
| `main` | `mupax sweep`, a sweep of a zoo model from a config |
| `space` | the config of a sweep, and its tasks |
| `grids` | values of a hyperparameter, and units of distance |
| `tasks`, `own` | a task: all runs of one model shape, of the zoo or a user's |
| `engine`, `population` | training a task in chunks that fit into memory; its program |
| `executors` | where tasks train: here, in processes, on Dask or Slurm |
| `store`, `fingerprint` | finished runs on disk, and when they may be used again |
| `results` | runs as arrays |
| `optima`, `statistics`, `valley` | fits to the runs |
| `regret`, `verdict`, `transfers` | the cost of an untuned value; the verdicts |
"""
