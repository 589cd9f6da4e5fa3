"""What a run will need and take, computed before anything is allocated."""
