"""Moving weights from the trainer to the rollout servers, with every installed byte verified.

trainer rank 0: send.WeightSender -> transport (shm | gloo) -> engine: receive.WeightSession; the driver's sync.WeightSync
leads both through one push, and canary.run_canary compares their log-probs afterwards.
"""
