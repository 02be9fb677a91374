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
- `degrees`, `sums`: whether the scale of a value matters; sums of products of
  activations, which need a factor where their number of terms grows.
- `facts`: all of this for one model.
- `lists`, `growth`: counterparts in the base, and ratios of sizes.
- `kinds`, `pair`: base and target side by side: what layers have in common, by which
  their branches, sums and constants are paired.
- `depth`: how much deeper each stream gets, and the parameters that this concerns.
- `carry`, `constants`, `logits`, `readouts`: constants are checked; what is missing is
  carried by parameters, or is an error that names the line.
- `copies`: a check of all this: copies of the base's units compute the same.
- `compare`, `infer`: from two models to the scales.
"""
