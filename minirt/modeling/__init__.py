"""What a model is made of: its config, packed parameters and weight formats, rotary embedding, and the list of layers."""
