"""Read roles, residual branches, depth and constants from a model's program (jaxpr).

From what is known first to what follows from it:

- `leaves`, `models`: parameters of a model of any library, and its traced forward pass.
- `program`: the forward pass as a flat graph of `Node`s; calls are inlined, constants
  are folded, and what is written in several ways is written in one.
- `links`: which axes of operands become which axes of the result, for each primitive.
- `joints`, `segments`: fused parameters as several, where the program cuts them.
- `axes`, `roles`: what each axis of each parameter does; `heads` of attention.
- `factors`: the parameters that a value is linear in, and the constants beside them.
- `branches`, `again`, `totals`: residual additions, what they add again, and sums over
  layers that do not read the sum.
- `degrees`, `sums`: functions of parameters that grow as they do; sums of products of
  activations that layers add up, e.g. attention logits.
- `facts`: all of this for one model.
- `lists`, `growth`: counterparts in the base, and ratios of sizes.
- `kinds`, `pair`: base and target side by side: what layers have in common, by which
  their branches, sums and constants are paired.
- `states`: whether what data change starts as a kernel.
- `depth`: how much deeper each stream gets, and the parameters that this concerns.
- `twins`, `layers`, `shapes`, `ratios`: of each value, that of the base; which sums
  have more terms, as there are more layers; what grows; constants that differ.
- `logs`, `numbers`: by which number each value is a multiple of the base's, as a
  product of what is known and of what parameters carry, and where it must be one.
- `solve`, `carry`: the fewest factors that make it one everywhere. Parameters carry
  them; what nothing can carry is an error that names the line.
- `compare`, `infer`: from two models to the scales.
"""
