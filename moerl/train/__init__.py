"""Training: the group of ranks seen from the driver, and the Megatron engine each rank runs."""
