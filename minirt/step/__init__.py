"""What a step is, below the layers: its plan, its input as the layers see it, and what they keep between steps."""
