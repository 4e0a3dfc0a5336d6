"""The table of slots on the device: edits, a step's input, and what a step commits."""
