"""LoRA adapters of linear layers: rows grouped by adapter, then scaling · B · A · x of each row's adapter."""
