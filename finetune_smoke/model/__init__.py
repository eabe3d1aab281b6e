"""The base model, its LoRA adapters, and how they compute."""
