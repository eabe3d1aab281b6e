"""finetune_smoke."""
