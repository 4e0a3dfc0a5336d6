"""The command line `minirt`: one file for each command, `options` and `output` for what they share."""
