"""The papers' claims, measured: figures, tables and the pages that show them.

`python -m papers` runs from a checkout; the wheel does not contain this package.

| module | contents |
|---|---|
| `catalogue` | every figure, and how it is drawn |
| `request` | what is asked for: a scale, and folders |
| `registry` | what a figure is: its claim, how it is drawn and checked |
| `tp6`, `bordelon`, `jelassi`, `yaida` | the figures of each paper |
| `rows`, `training` | claims beyond the papers |
| `solved_*` | figures from the solvers of `mupax.experiments.theory` |
| `features` | networks that are trained and compared layer by layer |
| `claims_*`, `curves` | from sweeps and numbers to drawings and verdicts |
| `parts`, `sizes`, `tables` | the sweeps, their sizes by scale, and their tables |
| `numbers` | the tables of figures without sweeps |
| `draw` | pictures |
| `pages`, `summaries` | the generated parts of figures.md and evidence.md |
| `data` | the tables |
| `figures` | the pictures of `figures.md` |
"""
