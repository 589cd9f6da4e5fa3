"""What the fork server loads once: Megatron with its patches, and the engine."""

import megatron_patches

megatron_patches.activate()

import moerl.train.engine  # noqa: F401
