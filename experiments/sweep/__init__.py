"""Sweeps: many runs as one program, and how their optima change with the model's size.

| module | contents |
|---|---|
| `api` | `mupax.sweep`: the description of a user's functions |
| `command`, `space` | `mupax sweep`: the description of a config |
| `grids` | values of a hyperparameter, and units of distance |
| `tasks`, `functions` | a task: all runs of one model shape, of the zoo or a user's |
| `engine`, `program` | training a task in chunks that fit into memory; its program |
| `training` | all tasks, here or on an executor; tables and report |
| `store`, `fingerprint` | finished runs on disk, and when they may be used again |
| `cost` | `--dry_run` |
| `results` | runs as arrays |
| `optima`, `statistics` | fits to the runs |
| `regret`, `verdict`, `transfers` | the cost of an untuned value; the verdicts |
"""
