"""How ranks share a training: DDP, FSDP2, CUDA graphs."""
