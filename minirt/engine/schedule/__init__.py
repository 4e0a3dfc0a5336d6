"""The first stage of a step: which sequences run, on which pages."""
