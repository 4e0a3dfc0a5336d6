"""To look into a running model, and to reach into it: hidden states, edits of the residual stream, logits processors of requests.

A `Hook` is a layer, so the rest of minirt knows only that a step has some (`Batch.hooks`, `StepPlan.hooks`).
"""
