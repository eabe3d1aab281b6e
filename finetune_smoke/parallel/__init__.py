"""How ranks share a training: DDP or FSDP2."""
