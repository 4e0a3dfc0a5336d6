"""LoRA adapters: files in PEFT's format, merged into a model's weights or applied per request."""
